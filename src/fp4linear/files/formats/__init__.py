"""The formats, one module each, behind one registry. To add one is a module and a line.

Tensors decide, in this order; no config or exclude list is ever believed against them. Special formats come before
the ones whose names they share.
"""

from __future__ import annotations

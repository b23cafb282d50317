"""How copies and pickles of a layer come back."""

from __future__ import annotations

from typing import Any

from fp4linear._core import Fp4Linear


def rebuild(cls: type[Fp4Linear], b: Any, scales: Any, scale2: Any, bias: Any, keywords: dict[str, Any]) -> Fp4Linear:
    """Make the layer that Fp4Linear.__reduce__ took apart."""
    layer = cls.__new__(cls)
    Fp4Linear.__init__(layer, b, scales, scale2, bias, **keywords)
    return layer

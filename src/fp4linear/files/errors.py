"""The one error of this package."""

from __future__ import annotations


class FormatError(ValueError):
    """A file or a set of tensors that is damaged, inconsistent, or in a format that is not supported.

    The message names the file and, where there is one, the tensor.
    """

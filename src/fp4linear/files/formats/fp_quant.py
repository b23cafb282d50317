"""FP-Quant: X.qweight (bytes) and X.scales."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import PACKED, SCALES, Refused, dtype_of

if TYPE_CHECKING:
    from ..checkpoint import Tensors


class FPQuant(Refused):
    name = "FP-Quant"
    weight_suffixes = (".qweight",)
    reason = "x must be Hadamard-rotated before the layer, which is not supported"

    def claims(self, tensors: Tensors, layer: str) -> bool:
        return dtype_of(tensors, layer + ".qweight") in PACKED and dtype_of(tensors, layer + ".scales") in SCALES

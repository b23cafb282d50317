"""Experts in one 3-D tensor, often transposed: weight [E, K/2, N], scale [E, K/16, N]."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import PACKED, Refused, dtype_of

if TYPE_CHECKING:
    from ..checkpoint import Tensors

PAIRS = (
    (".weight", ".weight_scale"),
    (".weight_packed", ".weight_scale"),
    ("", "_scale"),
    ("", "_weight_scale"),
    ("_packed", "_scale"),
)


class Experts3D(Refused):
    name = "3-D mixture-of-experts weight"
    weight_suffixes = (".weight", ".weight_packed", "_packed", "")
    reason = "experts in one, possibly transposed, 3-D tensor are not supported yet: expected a 2-D tensor an expert"

    def layer_of(self, tensor: str) -> str | None:
        layer = super().layer_of(tensor)
        # The empty suffix would make every tensor a layer.
        return None if layer is not None and tensor.endswith(("_scale", "_scale_2", ".bias")) else layer

    def claims(self, tensors: Tensors, layer: str) -> bool:
        for weight, scales in PAIRS:
            if dtype_of(tensors, layer + weight) in PACKED and dtype_of(tensors, layer + scales) in ("F8_E4M3", "U8"):
                return len(tensors.info(layer + weight).shape) == 3
        return False

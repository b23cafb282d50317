"""Transformer Engine's NVFP4 tensors: rowwise_data, padded scales, amax instead of a factor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import PACKED, Refused, dtype_of

if TYPE_CHECKING:
    from ..checkpoint import Tensors


class TransformerEngine(Refused):
    name = "Transformer Engine NVFP4"
    weight_suffixes = (".rowwise_data", "._rowwise_data")
    reason = "its scales are padded and its global is an amax, which is not supported yet"

    def claims(self, tensors: Tensors, layer: str) -> bool:
        return any(dtype_of(tensors, layer + suffix) in PACKED for suffix in self.weight_suffixes)

"""MLX's quantised tensors: X.weight U32 [N, K/8] and X.scales U8 [N, K/16]."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Refused, dtype_of

if TYPE_CHECKING:
    from ..checkpoint import Tensors


class MLX(Refused):
    name = "MLX nvfp4"
    weight_suffixes = (".weight",)
    reason = "words of eight codes and a global amax are not supported yet"

    def claims(self, tensors: Tensors, layer: str) -> bool:
        return dtype_of(tensors, layer + ".weight") == "U32" and dtype_of(tensors, layer + ".scales") == "U8"

"""Weights that were rotated before they were quantised, by the marks of single files (ComfyUI's convrot)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Refused
from .marks import ROTATIONS, mark_of
from .modelopt import is_trio

if TYPE_CHECKING:
    from ..checkpoint import Tensors


class Rotated(Refused):
    name = "Hadamard-rotated NVFP4"
    weight_suffixes = (".weight",)
    reason = "its mark says that x must be Hadamard-rotated before the layer, which is not supported"

    def claims(self, tensors: Tensors, layer: str) -> bool:
        return is_trio(tensors, layer) and any(mark_of(tensors, layer).get(key) for key in ROTATIONS)

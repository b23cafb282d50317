"""ModelOpt's single files for diffusers: as ComfyUI's, but with the low nibble = even k. BFL's carry the same mark."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import PACKED, SCALES, Refused, dtype_of
from .comfyui import SINGLE_FILE_MARK

if TYPE_CHECKING:
    from ..checkpoint import Tensors


class ModelOptDiffusers(Refused):
    name = "ModelOpt for diffusers (or a BFL single file)"
    weight_suffixes = (".weight",)
    reason = (
        f"the header's {SINGLE_FILE_MARK} stands for swizzled scales and for either order of nibbles, "
        "which is not supported yet"
    )

    def claims(self, tensors: Tensors, layer: str) -> bool:
        weight = layer + ".weight"
        return (
            dtype_of(tensors, weight) in PACKED
            and dtype_of(tensors, layer + ".weight_scale") in SCALES
            and SINGLE_FILE_MARK in tensors.metadata(weight)
        )

"""ComfyUI and BFL single files: ModelOpt's names with the high nibble = even k and swizzled scales."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Refused

if TYPE_CHECKING:
    from ..checkpoint import Tensors

SINGLE_FILE_MARK = "_quantization_metadata"  # header metadata of BFL's files and of ModelOpt's for diffusers


def has_single_file_marks(tensors: Tensors, layer: str) -> bool:
    return layer + ".comfy_quant" in tensors or SINGLE_FILE_MARK in tensors.metadata(layer + ".weight")


class ComfyUI(Refused):
    name = "ComfyUI / BFL"
    weight_suffixes = (".weight",)
    reason = "its codes have the high nibble first and its scales are swizzled, which is not supported yet"

    def claims(self, tensors: Tensors, layer: str) -> bool:
        return layer + ".weight" in tensors and layer + ".comfy_quant" in tensors

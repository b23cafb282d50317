"""ComfyUI and BFL single files: ModelOpt's names with the high nibble = even k and swizzled scales.

Rows (and columns) are padded to a multiple of 16 with zeros. Marks: X.comfy_quant, JSON in bytes, or the header's
_quantization_metadata, which BFL's files share with ModelOpt's for diffusers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Asked, Format, Parts
from .marks import mark_of, mark_problem
from .modelopt import is_trio
from .single_file import TRIO_SUFFIXES, read_trio, single_file_problem, stored_shape

if TYPE_CHECKING:
    from ..checkpoint import Tensors


class ComfyUI(Format):
    name = "comfyui"
    weight_suffixes = (".weight",)
    suffixes = (*TRIO_SUFFIXES, ".comfy_quant")
    input_scale = (".input_scale", False)
    options = ("swizzled", "nibbles")

    def claims(self, tensors: Tensors, layer: str) -> bool:
        return layer + ".comfy_quant" in tensors and self.accepts(tensors, layer)

    def accepts(self, tensors: Tensors, layer: str) -> bool:
        return is_trio(tensors, layer)

    def unsupported(self, tensors: Tensors, layer: str, asked: Asked) -> str | None:
        return mark_problem(tensors, layer) or single_file_problem(tensors, layer, asked, swizzled=True)

    def shape(self, tensors: Tensors, layer: str) -> tuple[int, int] | None:
        return stored_shape(tensors, layer, mark_of(tensors, layer))

    def read(self, tensors: Tensors, layer: str, asked: Asked) -> Parts:
        return read_trio(tensors, layer, asked, mark_of(tensors, layer), swizzled=True, nibbles="high")

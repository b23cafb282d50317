"""ModelOpt's single files for diffusers: its own order of nibbles, scales in rows or swizzled, rows padded.

They carry the header's _quantization_metadata, and so do BFL's files, whose nibbles are the other way round: where
the header doesn't name ModelOpt, the caller is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Asked, Format, Parts
from .marks import HEADER_MARK, has_single_file_marks, mark_of, mark_problem
from .modelopt import is_trio
from .single_file import TRIO_SUFFIXES, read_trio, single_file_problem, stored_shape

if TYPE_CHECKING:
    from ..checkpoint import Tensors


class ModelOptDiffusers(Format):
    name = "modelopt-diffusers"
    weight_suffixes = (".weight",)
    suffixes = TRIO_SUFFIXES
    input_scale = (".input_scale", False)
    options = ("swizzled", "nibbles")

    def claims(self, tensors: Tensors, layer: str) -> bool:
        return is_trio(tensors, layer) and has_single_file_marks(tensors, layer)

    def accepts(self, tensors: Tensors, layer: str) -> bool:
        return is_trio(tensors, layer)

    def unsupported(self, tensors: Tensors, layer: str, asked: Asked) -> str | None:
        if problem := mark_problem(tensors, layer):
            return problem
        if asked.format is None and asked.nibbles is None and not names_modelopt(tensors, layer + ".weight"):
            return (
                f'the header\'s {HEADER_MARK} stands for either order of nibbles: pass format="comfyui" for a BFL or '
                'ComfyUI file (high nibble = even k, swizzled scales), format="modelopt-diffusers" for ModelOpt\'s '
                '(low nibble), or nibbles="high" or "low"'
            )
        return single_file_problem(tensors, layer, asked, swizzled=None)

    def shape(self, tensors: Tensors, layer: str) -> tuple[int, int] | None:
        return stored_shape(tensors, layer, mark_of(tensors, layer))

    def read(self, tensors: Tensors, layer: str, asked: Asked) -> Parts:
        return read_trio(tensors, layer, asked, mark_of(tensors, layer), swizzled=None, nibbles="low")


def names_modelopt(tensors: Tensors, tensor: str) -> bool:
    """True where the header names ModelOpt as the tool that wrote it."""
    return any("modelopt" in f"{key} {value[:200]}".lower() for key, value in tensors.metadata(tensor).items())

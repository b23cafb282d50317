"""NVIDIA ModelOpt's Hugging Face export: X.weight, X.weight_scale, X.weight_scale_2 (multiplies; amax / 2688).

X.input_scale belongs to activations and is never part of the weight.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from .base import (
    PACKED,
    SCALES,
    Format,
    Parts,
    check_packed,
    dtype_of,
    packed_shape,
    padded_scale_shape,
    plain_scale_shape,
    read_bias,
    read_codes,
    read_global,
)
from .comfyui import has_single_file_marks

if TYPE_CHECKING:
    from ..checkpoint import Tensors


class ModelOpt(Format):
    name = "modelopt"
    weight_suffixes = (".weight",)

    def claims(self, tensors: Tensors, layer: str) -> bool:
        return is_trio(tensors, layer) and not has_single_file_marks(tensors, layer)

    def unsupported(self, tensors: Tensors, layer: str, chosen: bool) -> str | None:
        weight, scales = layer + ".weight", layer + ".weight_scale"
        for awq in (layer + ".pre_quant_scale", layer + ".input_quantizer._pre_quant_scale"):
            if awq in tensors:
                return f"ModelOpt NVFP4_AWQ: {awq} multiplies x, which is not supported"
        if low_rank := low_rank_tensor(tensors, layer):
            return f"ModelOpt SVDQuant: {low_rank} is a low-rank term beside the weight, which is not supported"
        if layer + ".weight_scale_2" not in tensors:
            return f"there is no {layer}.weight_scale_2, the global scale"
        if problem := check_packed(tensors, weight, scales):
            return problem
        if not chosen and not self._layout_is_known(tensors, layer):
            return (
                "its scales may be row-major or swizzled (the shapes are the same) and no mark tells: "
                'pass format="modelopt" where they are row-major and low nibbles are even k'
            )
        return None

    def read(self, tensors: Tensors, layer: str) -> Parts:
        b = read_codes(tensors, layer + ".weight")
        scale2 = read_global(tensors, layer + ".weight_scale_2", b.shape[0])
        if (abs(scale2) > 1).any():
            warnings.warn(
                f"{tensors.source}: {layer}.weight_scale_2 is {float(abs(scale2).max()):g}; ModelOpt's multiply and "
                "are far below 1: is it a divisor?",
                stacklevel=4,
            )
        return Parts(b, read_codes(tensors, layer + ".weight_scale"), scale2, read_bias(tensors, layer, b.shape[0]))

    def _layout_is_known(self, tensors: Tensors, layer: str) -> bool:
        n, half_k = packed_shape(tensors, layer + ".weight")
        if plain_scale_shape(n, half_k) != padded_scale_shape(n, half_k):
            return True
        if tensors.producer(layer + ".weight") == self.name:
            return True
        if "modelopt rows" not in tensors.cache:
            tensors.cache["modelopt rows"] = any(self._shows_rows(tensors, name) for name in tensors)
        return bool(tensors.cache["modelopt rows"])

    def _shows_rows(self, tensors: Tensors, name: str) -> bool:
        """True for a layer whose shapes leave no doubt that this checkpoint's scales are row-major."""
        layer = self.layer_of(name)
        if layer is None or not self.claims(tensors, layer):
            return False
        n, half_k = packed_shape(tensors, name)
        plain = plain_scale_shape(n, half_k)
        return plain != padded_scale_shape(n, half_k) and tensors.info(layer + ".weight_scale").shape == plain


def is_trio(tensors: Tensors, layer: str) -> bool:
    """X.weight is packed, 2-D, and X.weight_scale holds bytes: the names that ModelOpt, ComfyUI and BFL share."""
    weight, scales = layer + ".weight", layer + ".weight_scale"
    return (
        dtype_of(tensors, weight) in PACKED
        and len(tensors.info(weight).shape) == 2
        and dtype_of(tensors, scales) in SCALES
    )


def low_rank_tensor(tensors: Tensors, layer: str) -> str | None:
    """A tensor of the layer that holds a low-rank term."""
    if "low rank" not in tensors.cache:
        marks = ("svd", "lora_a", "lora_b", "lora_up", "lora_down")
        tensors.cache["low rank"] = [name for name in tensors if any(mark in name.lower() for mark in marks)]
    for name in tensors.cache["low rank"]:
        if name.startswith(layer + "."):
            return str(name)
    return None

"""NVIDIA ModelOpt's Hugging Face export: X.weight, X.weight_scale, X.weight_scale_2 (multiplies; amax / 2688).

X.input_scale belongs to activations and is never part of the weight. NVFP4_AWQ adds X.pre_quant_scale [K], which
multiplies x.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import FormatError
from .base import (
    PACKED,
    SCALES,
    Asked,
    Format,
    Parts,
    check_codes,
    check_scales,
    dtype_of,
    packed_shape,
    padded_scale_shape,
    plain_scale_shape,
    read_bias,
    read_codes,
    read_global,
    read_scales,
)
from .marks import has_single_file_marks

if TYPE_CHECKING:
    from ..checkpoint import Tensors


PRE_QUANT_SCALES = (".pre_quant_scale", ".input_quantizer._pre_quant_scale")  # AWQ; the second is the quantiser's own


class ModelOpt(Format):
    name = "modelopt"
    weight_suffixes = (".weight",)
    suffixes = (".weight_scale", ".weight_scale_2", *PRE_QUANT_SCALES)
    input_scale = (".input_scale", False)
    options = ("swizzled",)

    def claims(self, tensors: Tensors, layer: str) -> bool:
        return is_trio(tensors, layer) and not has_single_file_marks(tensors, layer)

    def unsupported(self, tensors: Tensors, layer: str, asked: Asked) -> str | None:
        if problem := trio_problem(tensors, layer):
            return problem
        weight, scales = layer + ".weight", layer + ".weight_scale"
        n, half_k = packed_shape(tensors, weight)
        plain, padded = plain_scale_shape(n, half_k), padded_scale_shape(n, half_k)
        if asked.swizzled is not None:
            return check_scales(tensors, weight, scales, padded if asked.swizzled else plain)
        if tensors.info(scales).shape == padded != plain:
            return (
                f"{scales} is {list(padded)}, swizzled, and no mark tells the order of nibbles: pass "
                'format="comfyui" (high nibble = even k), format="modelopt-diffusers" (low), or swizzled=True for '
                "ModelOpt's own order (low)"
            )
        if problem := check_scales(tensors, weight, scales, plain):
            return problem
        if asked.format is None and not self._layout_is_known(tensors, layer):
            return (
                "its scales may be row-major or swizzled (the shapes are the same) and no mark tells: "
                'pass format="modelopt" where they are row-major and low nibbles are even k, otherwise swizzled=True, '
                'format="comfyui" or format="modelopt-diffusers"'
            )
        return None

    def shape(self, tensors: Tensors, layer: str) -> tuple[int, int] | None:
        n, half_k = packed_shape(tensors, layer + ".weight")
        return n, 2 * half_k

    def read(self, tensors: Tensors, layer: str, asked: Asked) -> Parts:
        b = read_codes(tensors, layer + ".weight")
        scale2 = read_multiplier(tensors, layer, b.shape[0])
        scales = read_scales(tensors, layer + ".weight_scale", *b.shape, swizzled=bool(asked.swizzled))
        return Parts(b, scales, scale2, read_bias(tensors, layer, b.shape[0]), read_pre_quant_scale(tensors, layer, b))

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


def trio_problem(tensors: Tensors, layer: str) -> str | None:
    """Why the tensors of the three names can't be read whatever their layout, or None."""
    if low_rank := low_rank_tensor(tensors, layer):
        return f"ModelOpt SVDQuant: {low_rank} is a low-rank term beside the weight, which is not supported"
    if layer + ".weight_scale_2" not in tensors:
        return f"there is no {layer}.weight_scale_2, the global scale"
    return check_codes(tensors, layer + ".weight")


def read_multiplier(tensors: Tensors, layer: str, out_features: int) -> npt.NDArray[np.float32]:
    """X.weight_scale_2, with a warning where it looks like a divisor."""
    scale2 = read_global(tensors, layer + ".weight_scale_2", out_features)
    if (abs(scale2) > 1).any():
        warnings.warn(
            f"{tensors.source}: {layer}.weight_scale_2 is {float(abs(scale2).max()):g}; ModelOpt's multiply and "
            "are far below 1: is it a divisor?",
            stacklevel=5,
        )
    return scale2


def pre_quant_scale_tensor(tensors: Tensors, layer: str) -> str | None:
    """AWQ's factors for x."""
    return next((layer + suffix for suffix in PRE_QUANT_SCALES if layer + suffix in tensors), None)


def read_pre_quant_scale(tensors: Tensors, layer: str, b: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32] | None:
    name = pre_quant_scale_tensor(tensors, layer)
    if name is None:
        return None
    factors, in_features = tensors.floats(name), 2 * b.shape[1]
    if factors.size != in_features:
        raise FormatError(f"{tensors.source}: tensor {name!r}: shape {list(factors.shape)}, expected [{in_features}]")
    if not np.isfinite(factors).all():
        raise FormatError(f"{tensors.source}: tensor {name!r} holds values that aren't finite")
    return factors.reshape(-1)


def low_rank_tensor(tensors: Tensors, layer: str) -> str | None:
    """A tensor of the layer that holds a low-rank term."""
    if "low rank" not in tensors.cache:
        marks = ("svd", "lora_a", "lora_b", "lora_up", "lora_down")
        tensors.cache["low rank"] = [name for name in tensors if any(mark in name.lower() for mark in marks)]
    for name in tensors.cache["low rank"]:
        if name.startswith(layer + "."):
            return str(name)
    return None

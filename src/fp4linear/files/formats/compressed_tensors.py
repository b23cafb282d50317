"""compressed-tensors `nvfp4-pack-quantized`: X.weight_packed, X.weight_scale, X.weight_global_scale.

The global divides (2688 / amax).
X.input_global_scale belongs to activations and is never part of the weight.
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
    check_packed,
    dtype_of,
    packed_shape,
    read_bias,
    read_codes,
    read_global,
)

if TYPE_CHECKING:
    from ..checkpoint import Tensors


class CompressedTensors(Format):
    name = "compressed-tensors"
    weight_suffixes = (".weight_packed",)
    suffixes = (".weight_scale", ".weight_global_scale")
    input_scale = (".input_global_scale", True)

    def claims(self, tensors: Tensors, layer: str) -> bool:
        weight, scales = layer + ".weight_packed", layer + ".weight_scale"
        return (
            dtype_of(tensors, weight) in PACKED
            and len(tensors.info(weight).shape) == 2
            and dtype_of(tensors, scales) in SCALES
        )

    def unsupported(self, tensors: Tensors, layer: str, asked: Asked) -> str | None:
        if layer + ".weight_global_scale" not in tensors:
            return f"there is no {layer}.weight_global_scale"
        for extra in (".weight_zero_point", ".weight_g_idx"):
            if layer + extra in tensors:
                return f"{layer}{extra} is no part of nvfp4-pack-quantized"
        return check_packed(tensors, layer + ".weight_packed", layer + ".weight_scale")

    def shape(self, tensors: Tensors, layer: str) -> tuple[int, int] | None:
        n, half_k = packed_shape(tensors, layer + ".weight_packed")
        return n, 2 * half_k

    def read(self, tensors: Tensors, layer: str, asked: Asked) -> Parts:
        b = read_codes(tensors, layer + ".weight_packed")
        name = layer + ".weight_global_scale"
        divisor = read_global(tensors, name, b.shape[0])
        scale2 = reciprocal(divisor)
        if not np.isfinite(scale2).all():
            raise FormatError(
                f"{tensors.source}: tensor {name!r}: got {float(abs(divisor).min()):g}, expected a divisor whose "
                "reciprocal is finite (0 marks a dead expert)"
            )
        if (abs(divisor) < 1).any():
            warnings.warn(
                f"{tensors.source}: {name} is {float(abs(divisor).min()):g}; compressed-tensors' divide and are far "
                "above 1: is it a multiplier?",
                stacklevel=5,
            )
        return Parts(b, read_codes(tensors, layer + ".weight_scale"), scale2, read_bias(tensors, layer, b.shape[0]))


def reciprocal(divisor: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """1 / divisor with one rounding: the quotient of two float32 numbers in float64, then to float32."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.asarray((1.0 / divisor.astype(np.float64)).astype(np.float32))

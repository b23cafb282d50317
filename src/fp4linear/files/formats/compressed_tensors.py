"""compressed-tensors `nvfp4-pack-quantized`: X.weight_packed, X.weight_scale, X.weight_global_scale.

The global divides (2688 / amax).
X.input_global_scale belongs to activations and is never part of the weight.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np

from ..errors import FormatError
from .base import PACKED, SCALES, Format, Parts, check_packed, dtype_of, read_bias, read_codes, read_global

if TYPE_CHECKING:
    from ..checkpoint import Tensors


class CompressedTensors(Format):
    name = "compressed-tensors"
    weight_suffixes = (".weight_packed",)

    def claims(self, tensors: Tensors, layer: str) -> bool:
        weight, scales = layer + ".weight_packed", layer + ".weight_scale"
        return (
            dtype_of(tensors, weight) in PACKED
            and len(tensors.info(weight).shape) == 2
            and dtype_of(tensors, scales) in SCALES
        )

    def unsupported(self, tensors: Tensors, layer: str, chosen: bool) -> str | None:
        if layer + ".weight_global_scale" not in tensors:
            return f"there is no {layer}.weight_global_scale"
        for extra in (".weight_zero_point", ".weight_g_idx"):
            if layer + extra in tensors:
                return f"{layer}{extra} is no part of nvfp4-pack-quantized"
        return check_packed(tensors, layer + ".weight_packed", layer + ".weight_scale")

    def read(self, tensors: Tensors, layer: str) -> Parts:
        b = read_codes(tensors, layer + ".weight_packed")
        name = layer + ".weight_global_scale"
        divisor = read_global(tensors, name, b.shape[0])
        with np.errstate(divide="ignore", over="ignore"):
            # One rounding: the quotient of two float32 numbers in float64, then to float32.
            scale2 = np.asarray((1.0 / divisor.astype(np.float64)).astype(np.float32))
        if not np.isfinite(scale2).all():
            raise FormatError(
                f"{tensors.source}: tensor {name!r}: got {float(abs(divisor).min()):g}, expected a divisor whose "
                "reciprocal is finite (0 marks a dead expert)"
            )
        if (abs(divisor) < 1).any():
            warnings.warn(
                f"{tensors.source}: {name} is {float(abs(divisor).min()):g}; compressed-tensors' divide and are far "
                "above 1: is it a multiplier?",
                stacklevel=4,
            )
        return Parts(b, read_codes(tensors, layer + ".weight_scale"), scale2, read_bias(tensors, layer, b.shape[0]))

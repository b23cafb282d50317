"""What the single-file formats share: ModelOpt's three names, either order of nibbles, scales in rows or swizzled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ..errors import FormatError
from .base import (
    Asked,
    Parts,
    check_scales,
    packed_shape,
    padded_scale_shape,
    plain_scale_shape,
    read_codes,
    read_scales,
    swap_nibbles,
)
from .modelopt import pre_quant_scale_tensor, read_multiplier, trio_problem

if TYPE_CHECKING:
    from ..checkpoint import Tensors

TRIO_SUFFIXES = (".weight_scale", ".weight_scale_2")
ROW_PADDING = COLUMN_PADDING = 16


def single_file_problem(tensors: Tensors, layer: str, asked: Asked, *, swizzled: bool | None) -> str | None:
    """Why the layer can't be read, or None. swizzled: what the format says where the caller doesn't; None: shapes."""
    if problem := trio_problem(tensors, layer):
        return problem
    if awq := pre_quant_scale_tensor(tensors, layer):
        return f"{awq} multiplies x, which is not supported in this format"
    weight, scales = layer + ".weight", layer + ".weight_scale"
    n, half_k = packed_shape(tensors, weight)
    plain, padded = plain_scale_shape(n, half_k), padded_scale_shape(n, half_k)
    decided = swizzled if asked.swizzled is None else asked.swizzled
    if decided is not None:
        return check_scales(tensors, weight, scales, padded if decided else plain)
    if plain == padded:
        return "its scales may be row-major or swizzled (the shapes are the same): pass swizzled=True or swizzled=False"
    return check_scales(tensors, weight, scales, plain, padded)


def stored_shape(tensors: Tensors, layer: str, mark: dict[str, Any]) -> tuple[int, int]:
    """(out_features, in_features): as the mark or the bias tells, otherwise padding included."""
    n, half_k = packed_shape(tensors, layer + ".weight")
    k = 2 * half_k
    said = mark.get("orig_shape")
    if isinstance(said, list) and len(said) == 2 and all(type(size) is int for size in said):
        rows, columns = said
        if n - ROW_PADDING < rows <= n and k - COLUMN_PADDING < columns <= k and rows >= 0 and columns >= 0:
            return rows, columns - columns % 2
    bias = layer + ".bias"
    if bias in tensors and len(shape := tensors.info(bias).shape) == 1 and n - ROW_PADDING < shape[0] <= n:
        return shape[0], k
    return n, k


def read_trio(
    tensors: Tensors,
    layer: str,
    asked: Asked,
    mark: dict[str, Any],
    *,
    swizzled: bool | None,
    nibbles: Literal["low", "high"],
) -> Parts:
    """The layer, where `single_file_problem` gave None."""
    weight, scales = layer + ".weight", layer + ".weight_scale"
    n, k = stored_shape(tensors, layer, mark)
    stored = read_codes(tensors, weight)
    decided = swizzled if asked.swizzled is None else asked.swizzled
    if decided is None:
        decided = tensors.info(scales).shape == padded_scale_shape(*stored.shape)
    plain = read_scales(tensors, scales, *stored.shape, swizzled=decided)
    b = stored if (asked.nibbles or nibbles) == "low" else swap_nibbles(stored)
    bias = read_padded_bias(tensors, layer, n)
    scale2 = read_multiplier(tensors, layer, stored.shape[0])
    return Parts(b[:n, : k // 2], plain[:n, : -(-k // 16)], scale2[:n] if scale2.ndim else scale2, bias)


def read_padded_bias(tensors: Tensors, layer: str, out_features: int) -> npt.NDArray[np.float32] | None:
    """X.bias, which may be as long as the layer or as its padded weight."""
    name = layer + ".bias"
    if name not in tensors:
        return None
    bias = tensors.floats(name)
    if bias.ndim == 1 and out_features < bias.size < out_features + ROW_PADDING:
        bias = bias[:out_features]
    if bias.ndim != 1 or bias.size != out_features:
        raise FormatError(f"{tensors.source}: tensor {name!r}: shape {list(bias.shape)}, expected [{out_features}]")
    return bias

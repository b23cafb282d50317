"""torchao's NVFP4Tensor in safetensors: X._weight_qdata, X._weight_scale, optional X._weight_per_tensor_scale.

The header holds JSON under the tensor's name, X.weight: `_type`, and in `_data` `is_swizzled_scales`. Swizzled scales
have the shape [ceil(N/128)*32, ceil(K/64)*16], which is never that of plain ones, so that the shape decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .base import (
    PACKED,
    SCALES,
    Asked,
    Format,
    Parts,
    check_codes,
    check_scales,
    dtype_of,
    json_object,
    packed_shape,
    padded_scale_shape,
    plain_scale_shape,
    read_bias,
    read_codes,
    read_global,
    read_scales,
    swizzled_scale_shape,
)

if TYPE_CHECKING:
    from ..checkpoint import Tensors

QDATA, SCALE, GLOBAL = "._weight_qdata", "._weight_scale", "._weight_per_tensor_scale"


class TorchAO(Format):
    name = "torchao"
    weight_suffixes = (QDATA,)
    suffixes = (SCALE, GLOBAL)
    input_scale = ("._weight_act_per_tensor_scale", False)
    options = ("swizzled",)

    def claims(self, tensors: Tensors, layer: str) -> bool:
        if dtype_of(tensors, layer + QDATA) not in PACKED or dtype_of(tensors, layer + SCALE) not in SCALES:
            return False
        return tensor_type(tensors, layer) in ("NVFP4Tensor", None)

    def unsupported(self, tensors: Tensors, layer: str, asked: Asked) -> str | None:
        weight, scales = layer + QDATA, layer + SCALE
        if problem := check_codes(tensors, weight):
            return problem
        data = attributes(tensors, layer).get("_data")
        if isinstance(data, dict) and data.get("block_size", 16) != 16:
            return f"its header says block_size {str(data['block_size'])[:20]}, expected 16"
        n, half_k = packed_shape(tensors, weight)
        plain = plain_scale_shape(n, half_k)
        swizzled = (swizzled_scale_shape(n, half_k), padded_scale_shape(n, half_k))
        flag = data.get("is_swizzled_scales") if isinstance(data, dict) else None
        said = asked.swizzled if asked.swizzled is not None else flag
        if said is None:
            return check_scales(tensors, weight, scales, plain, swizzled[0])
        return check_scales(tensors, weight, scales, *(swizzled if said else (plain,)))

    def shape(self, tensors: Tensors, layer: str) -> tuple[int, int] | None:
        shape = packed_shape(tensors, layer + QDATA)
        return (shape[0], 2 * shape[1]) if len(shape) == 2 else None

    def read(self, tensors: Tensors, layer: str, asked: Asked) -> Parts:
        b = read_codes(tensors, layer + QDATA)
        data = attributes(tensors, layer).get("_data")
        flag = data.get("is_swizzled_scales") if isinstance(data, dict) else None
        said = asked.swizzled if asked.swizzled is not None else flag
        if said is None:
            said = tensors.info(layer + SCALE).shape != plain_scale_shape(*b.shape)
        scales = read_scales(tensors, layer + SCALE, *b.shape, swizzled=bool(said))
        one = np.asarray(1.0, np.float32)
        scale2 = read_global(tensors, layer + GLOBAL, b.shape[0]) if layer + GLOBAL in tensors else one
        return Parts(b, scales, scale2, read_bias(tensors, layer, b.shape[0]))


def attributes(tensors: Tensors, layer: str) -> dict[str, Any]:
    """What the header says of X.weight; empty where it says nothing."""
    text = tensors.metadata(layer + QDATA).get(layer + ".weight")
    return {} if text is None else json_object(text.encode("utf-8", "replace"), tensors.source)


def tensor_type(tensors: Tensors, layer: str) -> str | None:
    """The class of X.weight, None where the header doesn't tell."""
    kind = attributes(tensors, layer).get("_type")
    return kind if isinstance(kind, str) else None

"""MXFP4, which is not NVFP4: E8M0 scales for 32 values each, and no global."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import PACKED, Refused, dtype_of, packed_shape
from .torchao import QDATA, SCALE, tensor_type

if TYPE_CHECKING:
    from ..checkpoint import Tensors

GLOBALS = (".weight_scale_2", ".weight_global_scale")


class MXFP4(Refused):
    name = "MXFP4"
    weight_suffixes = (".weight_packed", ".weight", "_blocks", QDATA, ".quantized_weight_values")
    reason = "its scales are E8M0 bytes for 32 values each: it is not NVFP4"

    def claims(self, tensors: Tensors, layer: str) -> bool:
        if dtype_of(tensors, layer + "_blocks") == "U8" and dtype_of(tensors, layer + "_scales") in ("U8", "F8_E8M0"):
            return True  # gpt-oss
        if dtype_of(tensors, layer + QDATA) in PACKED:
            return tensor_type(tensors, layer) == "MXTensor" or dtype_of(tensors, layer + SCALE) == "F8_E8M0"
        if dtype_of(tensors, layer + ".quantized_weight_values") == "U8":
            return dtype_of(tensors, layer + ".quantized_weight_scale_factors") == "F8_E8M0"
        if dtype_of(tensors, layer + ".weight") in ("GGUF_MXFP4",):
            return True
        if dtype_of(tensors, layer + ".weight") == "U32" and dtype_of(tensors, layer + ".scales") == "U8":
            words, scales = tensors.info(layer + ".weight").shape, tensors.info(layer + ".scales").shape
            return bool(words) and words[-1] > 0 and scales == (*words[:-1], words[-1] / 4)  # MLX
        scales_name = layer + ".weight_scale"
        if scales_name not in tensors or any(layer + suffix in tensors for suffix in GLOBALS):
            return False
        for suffix in (".weight_packed", ".weight"):
            weight = layer + suffix
            if dtype_of(tensors, weight) in PACKED:
                shape, info = packed_shape(tensors, weight), tensors.info(scales_name)
                blocks_of_32 = bool(shape) and info.shape == (*shape[:-1], -(-2 * shape[-1] // 32))
                return info.dtype == "F8_E8M0" or (info.dtype == "U8" and blocks_of_32)
        return False

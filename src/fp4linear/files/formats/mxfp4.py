"""MXFP4, which is not NVFP4: E8M0 scales for 32 values each, and no global."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import PACKED, Refused, dtype_of

if TYPE_CHECKING:
    from ..checkpoint import Tensors

GLOBALS = (".weight_scale_2", ".weight_global_scale")


class MXFP4(Refused):
    name = "MXFP4"
    weight_suffixes = (".weight_packed", ".weight", "_blocks")
    reason = "its scales are E8M0 bytes for 32 values each: it is not NVFP4"

    def claims(self, tensors: Tensors, layer: str) -> bool:
        if dtype_of(tensors, layer + "_blocks") == "U8" and dtype_of(tensors, layer + "_scales") in ("U8", "F8_E8M0"):
            return True  # gpt-oss
        scales = layer + ".weight_scale"
        if scales not in tensors or any(layer + suffix in tensors for suffix in GLOBALS):
            return False
        for suffix in (".weight_packed", ".weight"):
            weight = layer + suffix
            if dtype_of(tensors, weight) in PACKED:
                shape, info = tensors.info(weight).shape, tensors.info(scales)
                blocks_of_32 = bool(shape) and info.shape == (*shape[:-1], -(-2 * shape[-1] // 32))
                return info.dtype == "F8_E8M0" or (info.dtype == "U8" and blocks_of_32)
        return False

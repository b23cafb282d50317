"""torchao's NVFP4Tensor: X._weight_qdata, X._weight_scale, optional X._weight_per_tensor_scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Refused

if TYPE_CHECKING:
    from ..checkpoint import Tensors


class TorchAO(Refused):
    name = "torchao NVFP4Tensor"
    weight_suffixes = ("._weight_qdata", "._weight_scale")
    reason = "its scales may be swizzled, by a flag in the header, which is not supported yet"

    def claims(self, tensors: Tensors, layer: str) -> bool:
        return layer + "._weight_qdata" in tensors

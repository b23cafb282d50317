"""GGUF's type 40: blocks of 64 values in 36 bytes, and an optional factor in a tensor X.scale that multiplies.

A block is four E4M3 bytes and four times eight code bytes; in such a sub-block of 16 values the low nibbles are
values 0 to 7 and the high ones 8 to 15. Scales are unsigned, and 0x7F reads as 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import FormatError
from ..gguf_file import NVFP4, NVFP4_BYTES, NVFP4_VALUES
from .base import Asked, Format, Parts, dtype_of, read_bias, read_global
from .stacks import MAX_EXPERTS, read_expert_bias, split, stack_biases

if TYPE_CHECKING:
    from ..checkpoint import Tensors

WEIGHT, SCALE = ".weight", ".scale"


class GGUF(Format):
    name = "gguf"
    weight_suffixes = (WEIGHT,)
    suffixes = (SCALE,)
    input_scale = (".input_scale", False)

    def layers_of(self, tensors: Tensors, tensor: str) -> Iterator[str]:
        layer = self.layer_of(tensor)
        if layer is None or dtype_of(tensors, tensor) != NVFP4:
            return
        shape = tensors.info(tensor).shape
        if len(shape) == 3 and 0 < shape[0] <= MAX_EXPERTS and min(shape) > 0:
            yield from (f"{layer}[{expert}]" for expert in range(shape[0]))
        else:
            yield layer

    def place_of(self, tensors: Tensors, layer: str) -> tuple[str, int | None]:
        # A tensor may be called X[3].weight without being one of a stack.
        return (layer, None) if layer + WEIGHT in tensors else split(layer)

    def claims(self, tensors: Tensors, layer: str) -> bool:
        return dtype_of(tensors, self.place_of(tensors, layer)[0] + WEIGHT) == NVFP4

    def unsupported(self, tensors: Tensors, layer: str, asked: Asked) -> str | None:
        base, expert = self.place_of(tensors, layer)
        shape = tensors.info(base + WEIGHT).shape
        if len(shape) == 3 and expert is None:
            return f"it holds {shape[0]} experts: name one, such as {base + '[0]'!r}"
        if len(shape) != (2 if expert is None else 3) or (expert is not None and expert >= shape[0]):
            return f"{base}{WEIGHT} is {list(shape)}, which has no such layer"
        return None

    def shape(self, tensors: Tensors, layer: str) -> tuple[int, int] | None:
        shape = tensors.info(self.place_of(tensors, layer)[0] + WEIGHT).shape
        return (shape[-2], shape[-1]) if len(shape) >= 2 else None

    def read(self, tensors: Tensors, layer: str, asked: Asked) -> Parts:
        base, expert = self.place_of(tensors, layer)
        *stack, n, k = tensors.info(base + WEIGHT).shape
        blocks = tensors.array(base + WEIGHT).reshape(*(stack or [1]), n, k // NVFP4_VALUES, NVFP4_BYTES)[expert or 0]
        scales = blocks[..., :4].reshape(n, k // 16)
        if (scales & 0x80).any():
            raise FormatError(f"{tensors.source}: layer {layer!r}: signs on scales, which are unsigned in GGUF")
        scale2 = np.asarray(1.0, np.float32)
        if base + SCALE in tensors:
            experts = tensors.info(base + WEIGHT).shape[0] if expert is not None else 1
            scale2 = read_global(tensors, base + SCALE, experts)
            scale2 = scale2[expert] if scale2.ndim and expert is not None else scale2
        bias = read_bias(tensors, base, n) if expert is None else read_expert_bias(tensors, base, expert, n)
        codes = adjacent(blocks[..., 4:].reshape(n, k // 16, 8)).reshape(n, k // 2)
        return Parts(codes, np.where(scales == 0x7F, np.uint8(0), scales), np.asarray(scale2), bias)

    def tensors_of(self, tensors: Tensors, layer: str) -> list[str]:
        base, expert = self.place_of(tensors, layer)
        return super().tensors_of(tensors, base) + (stack_biases(tensors, base) if expert is not None else [])


def adjacent(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Sub-blocks [..., 8] whose halves lie in the two nibbles, to two neighbours a byte."""
    low, high = codes & np.uint8(15), codes >> np.uint8(4)
    halves = [half[..., 0::2] | half[..., 1::2] << np.uint8(4) for half in (low, high)]
    joined: npt.NDArray[np.uint8] = np.concatenate(halves, axis=-1)
    return joined

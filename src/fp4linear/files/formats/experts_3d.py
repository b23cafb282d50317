"""Mixture-of-experts weights in one 3-D tensor: [E, N, K/2] with scales [E, N, K/16], or both transposed,
[E, K/2, N] and [E, K/16, N]. The shapes tell which. Every expert is a layer of its own, "X[3]".

ModelOpt's names multiply (…_scale_2: one factor, or one an expert), compressed-tensors' divide (…_global_scale).
Scales in the 128x4 layout are refused: no exporter writes them for stacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import FormatError
from .base import PACKED, SCALES, Asked, Format, Parts, dtype_of, packed_shape, read_codes, swap_nibbles
from .compressed_tensors import reciprocal
from .mxfp4 import MXFP4
from .stacks import MAX_EXPERTS, read_expert_bias, split, stack_biases

if TYPE_CHECKING:
    from ..checkpoint import Tensors

# Weight, block scales, factor, and whether it divides.
NAMES = (
    (".weight", ".weight_scale", ".weight_scale_2", False),
    (".weight_packed", ".weight_scale", ".weight_global_scale", True),
    ("", "_weight_scale", "_weight_scale_2", False),
    ("", "_scale", "_scale_2", False),
    ("_packed", "_scale", "_global_scale", True),
)
NOT_WEIGHTS = ("_scale", "_scale_2", ".bias", "_bias")


class Experts3D(Format):
    name = "experts"
    weight_suffixes = (".weight", ".weight_packed", "_packed", "")
    options = ("nibbles",)

    def layers_of(self, tensors: Tensors, tensor: str) -> Iterator[str]:
        if tensor.endswith(NOT_WEIGHTS) or len(tensors.info(tensor).shape) != 3:
            return
        for suffix in self.weight_suffixes:
            base = tensor.removesuffix(suffix)
            found = names(tensors, base) if base and tensor.endswith(suffix) else None
            if found and base + found[0] == tensor:
                if MXFP4().claims(tensors, base):
                    return
                shape = tensors.info(tensor).shape
                if min(shape) > 0 and shape[0] <= MAX_EXPERTS:
                    yield from (f"{base}[{expert}]" for expert in range(shape[0]))
                else:
                    yield base
                return

    def place_of(self, tensors: Tensors, layer: str) -> tuple[str, int | None]:
        # A stack may itself be called X[3].
        return (layer, None) if names(tensors, layer) is not None else split(layer)

    def claims(self, tensors: Tensors, layer: str) -> bool:
        return names(tensors, self.place_of(tensors, layer)[0]) is not None

    def unsupported(self, tensors: Tensors, layer: str, asked: Asked) -> str | None:
        base, expert = self.place_of(tensors, layer)
        weight, scales, factor = (base + suffix for suffix in trio(tensors, base)[:3])
        info = tensors.info(weight)
        if expert is None:
            return f"{weight} is {info}, a stack of experts: name one, such as {base + '[0]'!r}"
        if expert >= info.shape[0]:
            return f"{weight} holds {info.shape[0]} experts"
        for awq in (base + ".pre_quant_scale", base + "_pre_quant_scale"):
            if awq in tensors:
                return f"{awq} multiplies x, which is not supported for stacks of experts"
        if factor not in tensors:
            return f"there is no {factor}, the global scale"
        got = tensors.info(factor).shape
        if np.prod(got, dtype=object) not in (1, info.shape[0]):
            return f"{factor} is {list(got)}, expected one factor or one for each of {info.shape[0]} experts"
        if transposed(tensors, base) is None:
            return (
                f"{scales} is {tensors.info(scales)}: it fits {weight}, {info}, neither as [E, N, K/16] nor "
                "transposed as [E, K/16, N]"
            )
        return None

    def shape(self, tensors: Tensors, layer: str) -> tuple[int, int] | None:
        base, _ = self.place_of(tensors, layer)
        _, rows, columns = packed_shape(tensors, base + trio(tensors, base)[0])
        turned = transposed(tensors, base)
        return None if turned is None else (columns, 2 * rows) if turned else (rows, 2 * columns)

    def read(self, tensors: Tensors, layer: str, asked: Asked) -> Parts:
        base, expert = self.place_of(tensors, layer)
        weight, scales, factor, divides = trio(tensors, base)
        index = expert or 0
        b, block_scales = read_codes(tensors, base + weight)[index], read_codes(tensors, base + scales)[index]
        if transposed(tensors, base):
            b, block_scales = np.ascontiguousarray(b.T), np.ascontiguousarray(block_scales.T)
        if asked.nibbles == "high":
            b = swap_nibbles(b)
        factors = tensors.floats(base + factor).reshape(-1)
        value: npt.NDArray[np.float32] = np.asarray(factors[index if factors.size > 1 else 0])
        scale2 = reciprocal(value) if divides else value
        if not np.isfinite(value) or not np.isfinite(scale2):
            hint = " (0 marks a dead expert)" if divides else ""
            raise FormatError(
                f"{tensors.source}: tensor {base + factor!r}: got {float(value):g} for expert {index}, expected a "
                f"finite {'divisor whose reciprocal is finite' if divides else 'factor'}{hint}"
            )
        return Parts(b, block_scales, scale2, read_expert_bias(tensors, base, index, b.shape[0]))

    def tensors_of(self, tensors: Tensors, layer: str) -> list[str]:
        base, _ = self.place_of(tensors, layer)
        weight, scales, factor, _ = trio(tensors, base)
        parts = [base + suffix for suffix in (weight, scales, factor) if base + suffix in tensors]
        return parts + stack_biases(tensors, base)


def names(tensors: Tensors, base: str) -> tuple[str, str, str, bool] | None:
    """The suffixes of a stack's tensors, None where there is no such stack."""
    for entry in NAMES:
        weight, scales = base + entry[0], base + entry[1]
        if dtype_of(tensors, weight) in PACKED and dtype_of(tensors, scales) in SCALES:
            both = len(tensors.info(weight).shape) == 3 == len(tensors.info(scales).shape)
            return entry if both else None
    return None


def trio(tensors: Tensors, base: str) -> tuple[str, str, str, bool]:
    found = names(tensors, base)
    if found is None:
        raise FormatError(f"{tensors.source}: layer {base!r}: no stack of experts")
    return found


def transposed(tensors: Tensors, base: str) -> bool | None:
    """Whether K lies before N; None where the scales fit neither way, or both (one value)."""
    weight, scales, _, _ = trio(tensors, base)
    info = tensors.info(base + weight)
    experts, rows, columns = packed_shape(tensors, base + weight)
    got = tensors.info(base + scales).shape
    plain = got == (experts, rows, -(-columns // 8))
    turned = got == (experts, -(-rows // 8), columns)
    if info.dtype == "F4":  # two codes of one byte lie along the last axis
        turned = False
        plain = plain and info.shape[-1] % 2 == 0
    return turned if plain != turned else None

"""Stacks of experts: one tensor holds the weights of many layers, which are named "X[3]"."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import FormatError

if TYPE_CHECKING:
    from ..checkpoint import Tensors

MAX_EXPERTS = 65536  # more than any model has: a shape that says otherwise is damaged


def split(layer: str) -> tuple[str, int | None]:
    """ "X[3]" to X and 3, other names to themselves and None."""
    base, bracket, index = layer.rpartition("[")
    digits = index[:-1]
    if bracket and index.endswith("]") and digits.isascii() and digits.isdigit() and len(digits) <= 5:
        return base, int(digits)
    return layer, None


def stack_biases(tensors: Tensors, base: str) -> list[str]:
    """The bias of a stack, [E, N]."""
    return [name for name in (base + ".bias", base + "_bias") if name in tensors]


def read_expert_bias(tensors: Tensors, base: str, expert: int, n: int) -> npt.NDArray[np.float32] | None:
    """One expert's bias [N], None where the stack has none."""
    for name in stack_biases(tensors, base):
        bias = tensors.floats(name)
        if bias.ndim != 2 or bias.shape[1] != n or expert >= bias.shape[0]:
            raise FormatError(f"{tensors.source}: tensor {name!r}: shape {list(bias.shape)}, expected [E, {n}]")
        return np.ascontiguousarray(bias[expert])
    return None

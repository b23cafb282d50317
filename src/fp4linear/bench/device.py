"""What the benchmark asks of a device. The CPU is one; a GPU is another file with the same functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .suites import Item
from .timing import Samples

# Random bytes in this range are scales of 2^-3 .. 2^4: no zeros, no NaN, no overflow.
LEAST_SCALE, GREATEST_SCALE = 0x20, 0x58
SCALE2 = 2.0**-10  # a power of two: exact in every reference


@dataclass(frozen=True)
class Weight:
    """A random NVFP4 weight in canonical form."""

    b: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.uint8]
    scale2: float = SCALE2

    @property
    def nbytes(self) -> int:
        return self.b.nbytes + self.scales.nbytes


def random_weight(n: int, k: int, seed: int = 0) -> Weight:
    random = np.random.default_rng(seed)
    b = np.frombuffer(random.bytes(n * (k // 2)), np.uint8).reshape(n, k // 2)
    scales = random.integers(LEAST_SCALE, GREATEST_SCALE + 1, (n, -(-k // 16)), dtype=np.uint8)
    return Weight(b, scales)


@dataclass
class Timing:
    """What a device measured for one item. bandwidth: bytes a second that it reads, in the same run; None where the
    weights don't come from memory.
    """

    ours: Samples
    dense: Samples | None
    dense_is: str
    bandwidth: float | None
    weight_sets: int


class Device(Protocol):
    """A place where layers run."""

    name: str

    def prepare(self, item: Item, weight: Weight) -> Any:
        """Layers, x and dense weights of an item."""

    def result(self, prepared: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any], str | None, str]:
        """One call: x, y, the path that ran and the instruction set or architecture that ran it."""

    def time(self, prepared: Any, seconds: float) -> Timing:
        """Alternating samples of ours and of a dense matmul."""

"""What the benchmark asks of a device. The CPU is one; a GPU is another file with the same functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .accuracy import Accuracy
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
    """What a device measured for one item.

    ours, dense: seconds of a call, or of a whole chain. bandwidth: bytes a second that the device reads, in the same
    run; None where the weights don't come from memory. weights: "cold" (from memory), "hot" (one layer again and
    again) or "L2" (all layers together are smaller than the caches). launches: calls of ours that one time was taken
    over. accuracy: of the results of the timed calls, where they were checked.
    """

    ours: Samples
    dense: Samples | None
    dense_is: str
    bandwidth: float | None
    weight_sets: int
    weights: str = "cold"
    launches: int = 1
    bandwidth_by: str = ""
    accuracy: Accuracy | None = None


@dataclass(frozen=True)
class Checked:
    """A call's accuracy, the path that ran and the instruction set or architecture that ran it."""

    accuracy: Accuracy
    path: str | None
    isa: str


class Device(Protocol):
    """A place where layers run."""

    name: str
    model: str  # of the processor
    limit: float | None  # bytes a second that were once measured on this model

    def prepare(self, item: Item, weight: Weight) -> Any:
        """Layers (`.layers`), x and dense weights of an item."""

    def verify(self, prepared: Any) -> Checked:
        """One call, compared with float64."""

    def time(self, parts: Sequence[Any], seconds: float) -> Timing:
        """Alternating samples of ours and of a dense matmul. Several parts are a chain."""


def wanted_path(layer: Any, item: Item) -> str | None:
    """The path that has to run."""
    path: str | None = layer.plan(item.m, item.dtype).path if item.path == "auto" else item.path
    return path

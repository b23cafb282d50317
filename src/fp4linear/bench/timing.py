"""Medians of alternating samples: ours, theirs, ours, theirs, so that a drifting clock meets both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

MIN_SAMPLE_SECONDS = 200e-6  # a sample is repeated until it takes this long: the clock's own cost is then below 0.1 %
MIN_ROUNDS = 5
MAX_ROUNDS = 400

Pass = Sequence[Callable[[], object]]  # calls made one after another; a rotation over distinct weights is one pass


@dataclass
class Samples:
    """Seconds of one call, one number a sample."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def quantile(self, q: float) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def alternate(passes: Mapping[str, Pass], seconds: float) -> dict[str, Samples]:
    """Runs all passes in turn for about that long (at least 5 rounds, after one that doesn't count)."""
    repeats = {name: max(1, round(MIN_SAMPLE_SECONDS / max(run(calls, 1), 1e-9))) for name, calls in passes.items()}
    samples = {name: Samples() for name in passes}
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < MIN_ROUNDS or (time.perf_counter() < end and rounds < MAX_ROUNDS):
        for name, calls in passes.items():
            samples[name].seconds.append(run(calls, repeats[name]) / (len(calls) * repeats[name]))
        rounds += 1
    return samples


def run(calls: Pass, repeats: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeats):
        for call in calls:
            call()
    return time.perf_counter() - begin

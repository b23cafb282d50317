"""Medians of alternating samples: ours, theirs, ours, theirs, so that a drifting clock meets both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

TURN_SECONDS = 0.04  # of one side, before the other has its turn
# Idle time before each turn. The threads of OpenBLAS spin on after a matmul, and a call of ours in that time shares the
# cores with them: 11008x4096 at M = 1 took 1117 us after 0.03 s, 793 after 0.1 and 823 after 0.3 (2 cores).
SETTLE_SECONDS = 0.1
MIN_ROUNDS = 5
MAX_ROUNDS = 50

Call = Callable[[], object]


@dataclass
class Samples:
    """Seconds of single calls: for each call of a rotation, its samples."""

    by_call: list[list[float]]

    @property
    def all(self) -> list[float]:
        return [second for call in self.by_call for second in call]

    @property
    def median(self) -> float:
        return statistics.median(self.all)

    @property
    def medians(self) -> list[float]:
        """One for each call; only where all of them had a sample, which hot ones have."""
        return [statistics.median(call) for call in self.by_call]

    def extend(self, more: Samples) -> None:
        """Adds later samples of the same calls."""
        for mine, theirs in zip(self.by_call, more.by_call, strict=True):
            mine.extend(theirs)

    def quantile(self, q: float) -> float:
        ordered = sorted(self.all)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def alternate(
    sides: Mapping[str, Sequence[Call]], seconds: float, *, cold: bool = False, min_rounds: int = MIN_ROUNDS
) -> dict[str, Samples]:
    """Gives each side turns of about 40 ms until the time is over, but not less than `min_rounds`.

    sides: the calls of each side, made one after another and over again. cold: they read distinct memory, larger
    together than any cache, and a turn goes on where the last one of the side stopped; otherwise all of them run once
    before each turn, untimed, to be hot, and a turn has each at least once.
    """
    samples = {name: Samples([[] for _ in calls]) for name, calls in sides.items()}
    position = dict.fromkeys(sides, 0)
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < min_rounds or (time.perf_counter() < end and rounds < MAX_ROUNDS):
        for name, calls in sides.items():
            if len(sides) > 1:
                time.sleep(SETTLE_SECONDS)
            for call in [calls[position[name] - 1]] if cold else calls:  # wakes the threads
                call()
            position[name] = turn(calls, samples[name], position[name], 1 if cold else len(calls))
        rounds += 1
    return samples


def turn(calls: Sequence[Call], samples: Samples, position: int, least: int) -> int:
    """Times calls from `position` on for a turn, at least so many; gives the position after the last."""
    end = time.perf_counter() + TURN_SECONDS
    done = 0
    while done < least or time.perf_counter() < end:
        call = calls[position]
        begin = time.perf_counter()
        call()
        samples.by_call[position].append(time.perf_counter() - begin)
        position = (position + 1) % len(calls)
        done += 1
    return position

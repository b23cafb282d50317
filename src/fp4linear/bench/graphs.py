"""CUDA graphs of many launches, and their replays in turns: ours, theirs, ours, theirs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, Protocol

from .timing import Samples

LEAST_LAUNCHES = 8  # of a graph: the gap between two replays must not be a large part of it
MOST_LAUNCHES = 1024
# A graph starts some 2 us after the one before it ends, with no overlap of launches: below 0.5 % of this.
GRAPH_SECONDS = 500e-6
TURN_SECONDS = 0.01
LEAST_REPLAYS, MOST_REPLAYS = 2, 30  # that are timed in a turn
MIN_ROUNDS = 4
MAX_ROUNDS = 200

Call = Callable[[], object]


class Side(Protocol):
    """One of the things that take turns."""

    def turn(self) -> list[float]:
        """Seconds of some repetitions."""


class Graph:
    """The calls as one CUDA graph. A sample is the time of a replay over `share`."""

    def __init__(self, torch: Any, calls: Sequence[Call], share: int) -> None:
        """Every call runs once before the capture: libraries set themselves up in their first calls."""
        self._torch = torch
        self._share = share
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # Its own stream: the one that torch keeps for captures is on the GPU of the process's first capture.
        with torch.cuda.graph(self._graph, stream=stream):
            for call in calls:
                call()
        self.seconds = min(self._replays(2))

    def replay(self) -> None:
        self._graph.replay()
        self._torch.cuda.synchronize()

    def turn(self) -> list[float]:
        count = min(max(math.ceil(TURN_SECONDS / self.seconds), LEAST_REPLAYS), MOST_REPLAYS)
        return [seconds / self._share for seconds in self._replays(count)]

    def _replays(self, count: int) -> list[float]:
        return seconds_of(self._torch, self._graph.replay, count)


def seconds_of(torch: Any, call: Call, count: int) -> list[float]:
    """Seconds from the end of one call's work to that of the next: while the GPU is at one, the host queues others."""
    call()  # untimed: it gives the host a lead, and the other side has just had the caches
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e-3 for a, b in pairwise(events)]


def alternate(sides: Mapping[str, Side], seconds: float) -> dict[str, Samples]:
    """Turns of all sides until the time is over, but not less than MIN_ROUNDS."""
    samples = {name: Samples([[]]) for name in sides}
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < MIN_ROUNDS or (time.perf_counter() < end and rounds < MAX_ROUNDS):
        for name, side in sides.items():
            samples[name].by_call[0].extend(side.turn())
        rounds += 1
    return samples


def weight_sets(nbytes: int, cold_bytes: int, most: int) -> int:
    """Distinct weights of nbytes each that a rotation needs: cold_bytes together, at least two, at most so many."""
    return min(max(-(-cold_bytes // nbytes), 2), most)


def rotation(sets: int) -> int:
    """Launches of the shortest graph: whole rotations."""
    return sets * -(-LEAST_LAUNCHES // sets)


def longer(launches: int, seconds: float) -> int:
    """Launches of a graph that lasts GRAPH_SECONDS, where one of `launches` lasts `seconds`: a multiple of them."""
    times = min(math.ceil(GRAPH_SECONDS / seconds), MOST_LAUNCHES // launches)
    return launches * max(times, 1)


def interleave(counts: Sequence[int]) -> list[tuple[int, int]]:
    """(part, index) of a chain whose parts have so many launches each, spread evenly: 80, 40 and 1 give 0 0 1, forty
    times, then 2.
    """
    launches = [(part, index) for part, count in enumerate(counts) for index in range(count)]
    return sorted(launches, key=lambda launch: Fraction(launch[1] + 1, counts[launch[0]]))

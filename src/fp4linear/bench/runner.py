"""Runs items on a device and says what came out."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .device import Device, Weight, random_weight, wanted_path
from .suites import Item


@dataclass(frozen=True)
class Record:
    """One line of results. Times in microseconds, rates in 10^9 a second; shares and ratios are plain numbers.

    us is the time of a call, or of all calls of a chain, from CUDA-graph replays of `launches` calls on a GPU. gb_s
    counts the packed weight (codes and scales) once a call. tolerance_used: the largest error against fp64 as a
    share of what the contract allows; at most 1.
    """

    label: str
    n: int | None  # None for a chain
    k: int | None
    m: int
    dtype: str
    device: str
    device_model: str
    isa: str
    threads: int | None
    weights: str  # "cold", "hot" or "L2"; see Timing
    weight_sets: int
    launches: int
    path: str | None
    us: float
    us_p10: float
    us_p90: float
    gb_s: float
    gflop_s: float
    bandwidth_gb_s: float | None
    bandwidth_share: float | None
    bandwidth_by: str
    limit_gb_s: float | None  # recorded for this model of GPU
    limit_share: float | None
    dense: str
    dense_us: float | None
    dense_ratio: float | None  # dense time over ours
    tolerance_used: float
    max_abs_error: float
    samples: int
    version: str
    date: str

    @property
    def good(self) -> bool:
        return self.tolerance_used <= 1

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run(device: Device, items: Iterable[Item], *, seconds: float = 1.0) -> Iterator[Record]:
    """Measures the items in their order, each for about `seconds`. RuntimeError where another path ran."""
    weights: dict[tuple[int, int], Weight] = {}
    for item in items:
        parts = item.parts
        # Those of the item before, where it had the same shapes; no others are kept.
        weights = {(p.n, p.k): weights.get((p.n, p.k)) or random_weight(p.n, p.k) for p in parts}
        yield run_item(device, item, [weights[p.n, p.k] for p in parts], seconds)


def run_item(device: Device, item: Item, weights: Sequence[Weight], seconds: float) -> Record:
    """weights: one for each part."""
    from fp4linear import __version__

    parts = [device.prepare(part, weight) for part, weight in zip(item.parts, weights, strict=True)]
    checks = [device.verify(part) for part in parts]
    for part, check in zip(parts, checks, strict=True):
        wanted = wanted_path(part.layers[0], part.item)
        if check.path != wanted:
            raise RuntimeError(f"path: {check.path} ran, expected {wanted} ({part.item})")
        if item.isa is not None and check.isa != item.isa:
            raise RuntimeError(f"isa: {check.isa} ran, expected {item.isa} ({item})")
    timing = device.time(parts, seconds)
    accuracies = [check.accuracy for check in checks] + ([timing.accuracy] if timing.accuracy else [])
    ours = timing.ours.median
    dense = timing.dense.median if timing.dense else None
    calls = [part.sets or 1 for part in item.parts] if item.chain else [1]
    rate = sum(count * weight.nbytes for count, weight in zip(calls, weights, strict=True)) / ours
    operations = sum(2.0 * part.n * part.k * item.m * count for part, count in zip(item.parts, calls, strict=True))
    limit = device.limit if timing.weights == "cold" else None
    return Record(
        label=item.label,
        n=None if item.chain else item.n,
        k=None if item.chain else item.k,
        m=item.m,
        dtype=item.dtype,
        device=device.name,
        device_model=device.model,
        isa=checks[0].isa,
        threads=parts[0].threads,
        weights=timing.weights,
        weight_sets=timing.weight_sets,
        launches=timing.launches,
        path="+".join(dict.fromkeys(check.path or "none" for check in checks)) if item.chain else checks[0].path,
        us=ours * 1e6,
        us_p10=timing.ours.quantile(0.1) * 1e6,
        us_p90=timing.ours.quantile(0.9) * 1e6,
        gb_s=rate / 1e9,
        gflop_s=operations / ours / 1e9,
        bandwidth_gb_s=timing.bandwidth / 1e9 if timing.bandwidth else None,
        bandwidth_share=rate / timing.bandwidth if timing.bandwidth else None,
        bandwidth_by=timing.bandwidth_by,
        limit_gb_s=limit / 1e9 if limit else None,
        limit_share=rate / limit if limit else None,
        dense=timing.dense_is if dense else "",
        dense_us=dense * 1e6 if dense else None,
        dense_ratio=dense / ours if dense else None,
        tolerance_used=max(accuracy.tolerance_used for accuracy in accuracies),
        max_abs_error=max(accuracy.max_abs for accuracy in accuracies),
        samples=len(timing.ours.all),
        version=__version__,
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    )

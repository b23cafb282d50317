"""Runs items on a device and says what came out."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from .accuracy import measure
from .device import Device, Weight, random_weight
from .suites import Item


@dataclass(frozen=True)
class Record:
    """One line of results. Times in microseconds, rates in 10^9 a second; shares and ratios are plain numbers.

    gb_s counts the packed weight (codes and scales) once a call. tolerance_used: the largest error against fp64 as a
    share of what the contract allows; at most 1.
    """

    label: str
    n: int
    k: int
    m: int
    dtype: str
    device: str
    isa: str
    threads: int | None
    weights: str  # "cold" or "hot"
    weight_sets: int
    path: str | None
    us: float
    us_p10: float
    us_p90: float
    gb_s: float
    gflop_s: float
    bandwidth_gb_s: float | None
    bandwidth_share: float | None
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
    """Measures the items in their order, each for about `seconds` a side. RuntimeError where another path ran."""
    weight: Weight | None = None
    for item in items:
        if weight is None or weight.b.shape != (item.n, item.k // 2):
            weight = random_weight(item.n, item.k)
        yield run_item(device, item, weight, seconds)


def run_item(device: Device, item: Item, weight: Weight, seconds: float) -> Record:
    from fp4linear import __version__

    prepared = device.prepare(item, weight)
    x, y, path, isa = device.result(prepared)
    planned = prepared.layers[0].plan(item.m, item.dtype).path
    wanted = planned if item.path == "auto" else item.path
    if path != wanted:
        raise RuntimeError(f"path: {path} ran, expected {wanted} ({item})")
    if item.isa is not None and isa != item.isa:
        raise RuntimeError(f"isa: {isa} ran, expected {item.isa} ({item})")
    accuracy = measure(x, y, weight.b, weight.scales, weight.scale2, sample=True)
    timing = device.time(prepared, seconds)
    ours = timing.ours.median
    dense = timing.dense.median if timing.dense else None
    rate = weight.nbytes / ours
    return Record(
        label=item.label,
        n=item.n,
        k=item.k,
        m=item.m,
        dtype=item.dtype,
        device=device.name,
        isa=isa,
        threads=prepared.threads,
        weights="cold" if item.cold else "hot",
        weight_sets=timing.weight_sets,
        path=path,
        us=ours * 1e6,
        us_p10=timing.ours.quantile(0.1) * 1e6,
        us_p90=timing.ours.quantile(0.9) * 1e6,
        gb_s=rate / 1e9,
        gflop_s=2.0 * item.n * item.k * item.m / ours / 1e9,
        bandwidth_gb_s=timing.bandwidth / 1e9 if timing.bandwidth else None,
        bandwidth_share=rate / timing.bandwidth if timing.bandwidth else None,
        dense=timing.dense_is if dense else "",
        dense_us=dense * 1e6 if dense else None,
        dense_ratio=dense / ours if dense else None,
        tolerance_used=accuracy.tolerance_used,
        max_abs_error=accuracy.max_abs,
        samples=len(timing.ours.all),
        version=__version__,
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    )

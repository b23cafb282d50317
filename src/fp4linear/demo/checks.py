"""The layers of the demo, checked and timed on the x that they really get."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..bench.accuracy import measure
from ..bench.blas import blas_threads
from ..bench.timing import alternate

if TYPE_CHECKING:
    from rich.table import Table

    from fp4linear import Fp4Linear

SECONDS = 2.0  # of timing, for all layers and both sides together


@dataclass(frozen=True)
class Check:
    """tolerance_used: error against fp64 on the same NVFP4 weights, as a share of what the contract allows;
    float_error: relative error against the float layer, which quantising causes; us, dense_us: medians.
    """

    name: str
    n: int
    k: int
    m: int
    bytes_before: int
    bytes_after: int
    tolerance_used: float
    relative_error: float
    float_error: float
    us: float
    dense_us: float
    path: str | None

    @property
    def good(self) -> bool:
        return self.tolerance_used <= 1 and self.path is not None


@dataclass(frozen=True)
class Case:
    """A layer, the x [M, K] that it gets, and the float layer that it stands for."""

    name: str
    layer: Fp4Linear
    x: npt.NDArray[np.float32]
    weight: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32] | None


def check_all(cases: Sequence[Case]) -> list[Check]:
    """Times of all layers in turns with their dense matmuls on one thread, then the results."""
    ours = [partial(case.layer.forward, case.x) for case in cases]
    dense = [partial(np.matmul, case.x, case.weight.T) for case in cases]
    with blas_threads(1):
        times = alternate({"ours": ours, "dense": dense}, SECONDS)
    return [
        check(case, us * 1e6, dense_us * 1e6)
        for case, us, dense_us in zip(cases, times["ours"].medians, times["dense"].medians, strict=True)
    ]


def check(case: Case, us: float, dense_us: float) -> Check:
    layer, x, weight = case.layer, case.x, case.weight
    y = layer.forward(x)
    path = layer.last_path
    accuracy = measure(x, y, *layer.canonical(), case.bias)
    dense = x.astype(np.float64) @ weight.T.astype(np.float64) + (0 if case.bias is None else case.bias)
    return Check(
        name=case.name,
        n=layer.out_features,
        k=layer.in_features,
        m=x.shape[0],
        bytes_before=weight.nbytes,
        bytes_after=layer.nbytes,
        tolerance_used=accuracy.tolerance_used,
        relative_error=accuracy.relative,
        float_error=float(np.linalg.norm(y.astype(np.float64) - dense) / np.linalg.norm(dense)),
        us=us,
        dense_us=dense_us,
        path=path,
    )


def table(checks: Iterable[Check], every_layer: bool) -> Table:
    """A line a layer, or one for each shape with the worst errors and the median times of its layers."""
    from rich import box
    from rich.table import Table

    result = Table(
        "layer", "N x K", "M", "KB before", "after", "tol.", "vs fp64", "vs float", "us", "dense us", "path",
        box=box.SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    result.columns[0].overflow = "fold"
    for column in result.columns[1:10]:
        column.justify = "right"
    checks = list(checks)
    stem = os.path.commonprefix([c.name for c in checks]) if len(checks) > 1 else ""  # noqa: RUF071
    prefix = stem[: stem.rfind(".") + 1]
    groups: dict[object, list[Check]] = defaultdict(list)
    for c in checks:
        groups[c.name if every_layer else (c.n, c.k, c.m)].append(c)
    for group in groups.values():
        first, paths = group[0], sorted({str(c.path) for c in group})
        worst = max(c.tolerance_used for c in group)
        result.add_row(
            first.name.removeprefix(prefix) + (f" (+{len(group) - 1})" if len(group) > 1 else ""),
            f"{first.n} x {first.k}",
            str(first.m),
            f"{sum(c.bytes_before for c in group) / 1e3:.0f}",
            f"{sum(c.bytes_after for c in group) / 1e3:.0f}",
            f"{worst:.3f}" if worst <= 1 else f"[red]{worst:.3f}[/]",
            f"{max(c.relative_error for c in group):.1e}",
            f"{max(c.float_error for c in group):.3f}",
            f"{np.median([c.us for c in group]):.0f}",
            f"{np.median([c.dense_us for c in group]):.0f}",
            ", ".join(paths),
        )
    return result

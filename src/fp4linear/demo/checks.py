"""One layer of the demo, checked and timed on the x that it really gets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..bench.accuracy import measure
from ..bench.timing import alternate

if TYPE_CHECKING:
    from rich.table import Table

    from fp4linear import Fp4Linear

SECONDS_A_LAYER = 0.05  # of timing, for both sides together


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


def check(
    name: str,
    layer: Fp4Linear,
    x: npt.NDArray[Any],
    weight: npt.NDArray[np.float32],
    bias: npt.NDArray[np.float32] | None,
) -> Check:
    """x: [M, K] as the layer gets it; weight, bias: of the float layer."""
    y = layer.forward(x)
    path = layer.last_path
    accuracy = measure(x, y, *layer.canonical(), bias)
    # The rounding of x to 16 bits, where it has 16, is common to both layers.
    x32 = x.astype(np.float32)
    dense = x32.astype(np.float64) @ weight.T.astype(np.float64) + (0 if bias is None else bias)
    transposed = weight.T
    samples = alternate(
        {"ours": [lambda: layer.forward(x)], "dense": [lambda: np.matmul(x32, transposed)]}, SECONDS_A_LAYER
    )
    return Check(
        name=name,
        n=layer.out_features,
        k=layer.in_features,
        m=x.shape[0],
        bytes_before=weight.nbytes,
        bytes_after=layer.nbytes,
        tolerance_used=accuracy.tolerance_used,
        relative_error=accuracy.relative,
        float_error=float(np.linalg.norm(y.astype(np.float64) - dense) / np.linalg.norm(dense)),
        us=samples["ours"].median * 1e6,
        dense_us=samples["dense"].median * 1e6,
        path=path,
    )


def table(checks: Iterable[Check], every_layer: bool) -> Table:
    """A line a layer, or one for each shape with the worst errors and the mean times of its layers."""
    from rich import box
    from rich.table import Table

    result = Table(
        "layer", "N x K", "M", "KB before", "after", "tol.", "vs fp64", "vs float", "us", "dense us", "path",
        box=box.SIMPLE_HEAD,
    )  # fmt: skip
    for column in result.columns[1:10]:
        column.justify = "right"
    groups: dict[object, list[Check]] = defaultdict(list)
    for c in checks:
        groups[c.name if every_layer else (c.n, c.k, c.m)].append(c)
    for group in groups.values():
        first, paths = group[0], sorted({str(c.path) for c in group})
        worst = max(c.tolerance_used for c in group)
        result.add_row(
            first.name if len(group) == 1 else f"{len(group)} layers",
            f"{first.n} x {first.k}",
            str(first.m),
            f"{sum(c.bytes_before for c in group) / 1e3:.0f}",
            f"{sum(c.bytes_after for c in group) / 1e3:.0f}",
            f"{worst:.3f}" if worst <= 1 else f"[red]{worst:.3f}[/]",
            f"{max(c.relative_error for c in group):.1e}",
            f"{max(c.float_error for c in group):.3f}",
            f"{np.mean([c.us for c in group]):.0f}",
            f"{np.mean([c.dense_us for c in group]):.0f}",
            ", ".join(paths),
        )
    return result

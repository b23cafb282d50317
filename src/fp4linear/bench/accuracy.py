"""The contract on results, against float64 on the same NVFP4 weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

SUM_ERROR = 2.0**-15  # of the sum of |x w|: what fp32 sums may lose
UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}  # the one rounding of y
FP16_LEAST_NORMAL = 2.0**-14
FP16_SUBNORMAL_ERROR = 2.0**-25  # extra, where the result is an FP16 subnormal
SAMPLED_ROWS = 64  # output features compared in a large layer
SAMPLED_TOKENS = 16


@dataclass(frozen=True)
class Accuracy:
    """tolerance_used: the largest error as a share of what the contract allows it, at most 1 where the result is good
    (inf for NaN); max_abs: the largest error; relative: Frobenius norm of the error over that of the reference.
    """

    tolerance_used: float
    max_abs: float
    relative: float

    @property
    def good(self) -> bool:
        return self.tolerance_used <= 1


def measure(
    x: npt.NDArray[Any],
    y: npt.NDArray[Any],
    b: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.uint8],
    scale2: npt.ArrayLike,
    bias: npt.NDArray[np.float32] | None = None,
    *,
    sample: bool = False,
) -> Accuracy:
    """Compares y [M, N] with x [M, K] · W^T + bias in float64.

    Tolerance: |y - ref| <= u |ref| + 2^-15 sum |x w|, u by the dtype of y. sample: at most 64 output features and 16
    rows of x, the first and last of both among them.
    """
    from fp4linear import reference

    tokens = spread(x.shape[0], SAMPLED_TOKENS if sample else x.shape[0])
    rows = spread(b.shape[0], SAMPLED_ROWS if sample else b.shape[0])
    codes, bytes_, part_of_x = b[rows], scales[rows], x[tokens].astype(np.float64)
    factor = np.asarray(scale2, np.float32)
    factor = factor[rows] if factor.size > 1 else factor.reshape(())
    ref = reference(part_of_x, codes, bytes_, factor, None if bias is None else bias[rows])
    # |w| is the same weight with the sign bits of codes and scales cleared.
    magnitude = reference(np.abs(part_of_x), codes & 0x77, bytes_ & 0x7F, np.abs(factor))
    got = y[np.ix_(tokens, rows)].astype(np.float64)
    allowed = UNIT_ROUNDOFF[y.dtype.name] * np.abs(ref) + SUM_ERROR * magnitude
    if y.dtype == np.float16:
        allowed = allowed + np.where(np.abs(ref) < FP16_LEAST_NORMAL, FP16_SUBNORMAL_ERROR, 0.0)
    error = np.abs(got - ref)
    if not error.size:
        return Accuracy(0.0, 0.0, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        used = np.where(error == 0, 0.0, error / allowed)  # NaN stays: it is no good result
    norm = float(np.linalg.norm(ref))
    worst = float(np.max(used))
    return Accuracy(
        worst if worst == worst else np.inf,
        float(error.max()),
        float(np.linalg.norm(got - ref)) / norm if norm else 0.0,
    )


def spread(count: int, most: int) -> npt.NDArray[np.intp]:
    """At most `most` indices over [0, count), both ends included."""
    return np.unique(np.linspace(0, max(count - 1, 0), min(count, most)).astype(np.intp))

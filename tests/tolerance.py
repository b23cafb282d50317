"""The contract on results: one rounding of fp32 sums, judged against float64."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.reference import Expected

SUM_ERROR = 2.0**-15  # of the sum of |x w|: fp32 accumulation in any order


class _Type(NamedTuple):
    unit_roundoff: float
    least_normal: float
    half_subnormal_step: float  # extra error of a correctly rounded subnormal result
    overflow: float  # magnitudes from here on round to infinity


_TYPES = {
    np.dtype(np.float16): _Type(2.0**-11, 2.0**-14, 2.0**-25, 65520.0),
    np.dtype(ml_dtypes.bfloat16): _Type(2.0**-8, 2.0**-126, 2.0**-134, 2.0**128 - 2.0**119),
    np.dtype(np.float32): _Type(2.0**-24, 2.0**-126, 2.0**-149, 2.0**128 - 2.0**103),
}


def assert_within_contract(y: NDArray, expected: Expected, *, nan_at: NDArray[np.bool_] | None = None) -> None:
    """|y - ref| <= u |ref| + 2^-15 sum|x w| (+ 2^-25 for an fp16 subnormal), and infinity exactly where the rounded
    reference is one. NaN is an error except at nan_at, where it is required.
    """
    kind = _TYPES[y.dtype]
    assert y.shape == expected.y.shape, f"shape {y.shape}, expected {expected.y.shape}"
    got = np.asarray(y).astype(np.float64)
    nan_at = np.zeros(got.shape, bool) if nan_at is None else np.broadcast_to(nan_at, got.shape)
    wrong_nan = np.isnan(got) != nan_at
    assert not wrong_nan.any(), (
        f"NaN at {np.argwhere(np.isnan(got))[:5].tolist()}, wanted it at "
        f"{np.argwhere(nan_at)[:5].tolist()}; first difference at {np.argwhere(wrong_nan)[0].tolist()}"
    )

    ref = np.where(nan_at, 0.0, expected.y)
    assert not np.isnan(ref).any(), "the reference has a NaN that nan_at does not name"
    sums = SUM_ERROR * np.where(nan_at, 0.0, expected.magnitude)
    with np.errstate(invalid="ignore"):
        bound = kind.unit_roundoff * np.abs(ref) + sums
        bound = bound + np.where(
            np.minimum(np.abs(ref), np.abs(got)) < kind.least_normal, kind.half_subnormal_step, 0.0
        )
        near = np.abs(got - ref) <= bound
        must_overflow = np.abs(ref) - sums >= kind.overflow
        may_overflow = np.abs(ref) + sums >= kind.overflow
    same_infinity = np.isinf(got) & (np.sign(got) == np.sign(ref))
    must_overflow |= np.isinf(ref)
    good = np.where(must_overflow, same_infinity, np.where(np.isinf(got), same_infinity & may_overflow, near))
    good |= nan_at
    if not good.all():
        worst = tuple(np.argwhere(~good)[0])
        raise AssertionError(
            f"{y.dtype} result {got[worst]!r} at {worst}, reference {ref[worst]!r}, allowed error {bound[worst]!r}; "
            f"{(~good).sum()} of {good.size} outside the contract"
        )


def assert_same_bits(a: NDArray, b: NDArray, *, zero_signs: bool = True) -> None:
    """Equal type, shape and bits. zero_signs=False lets +0 equal -0."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype and a.shape == b.shape, f"{a.dtype} {a.shape} against {b.dtype} {b.shape}"
    if not zero_signs:
        a, b = a + a.dtype.type(0), b + b.dtype.type(0)
    ab, bb = (np.ascontiguousarray(v).view(f"u{v.dtype.itemsize}") for v in (a, b))
    differ = np.argwhere(ab != bb)
    assert differ.size == 0, (
        f"first of {len(differ)} differences at {differ[0].tolist()}: "
        f"{a[tuple(differ[0])]!r} against {b[tuple(differ[0])]!r}"
    )

"""Quantising against plain NumPy: block scales, codes, errors, round trips."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import fp4linear
from tests import reference
from tests.strategies import seeds
from tests.tolerance import assert_same_bits

METHODS = ["max_abs", "four_over_six", "mse"]
each_method = pytest.mark.parametrize("method", METHODS)
SCALE_VALUES = reference.E4M3[:0x7F]  # finite and not negative, in order


def nearest_code(values: NDArray) -> NDArray[np.uint8]:
    """E2M1 codes by search: nearest, ties to the even code, saturating."""
    gaps = np.abs(np.abs(values)[..., None] - reference.E2M1[:8])
    # A tie is between neighbours, of which one is even: an epsilon below any gap of the test's values decides.
    code = np.argmin(gaps + 1e-12 * (np.arange(8) % 2), axis=-1)
    return (code | np.where(np.signbit(values), 8, 0)).astype(np.uint8)


def blocks_of(w: NDArray) -> NDArray[np.float64]:
    """[N, K] -> [N, blocks, 16], the last block filled with zeros."""
    n, k = w.shape
    padded = np.zeros((n, -(-k // 16) * 16))
    padded[:, :k] = w
    return padded.reshape(n, -1, 16)


def block_errors(w: NDArray, q: Any) -> NDArray[np.float64]:
    """Squared error of each block, [N, blocks]."""
    return (blocks_of(w - reference.dequantize(q.b, q.scales, q.scale2)) ** 2).sum(-1)


def best_block_errors(w: NDArray, scale2: float) -> NDArray[np.float64]:
    """The least squared error of each block over all 127 scale bytes."""
    blocks = blocks_of(w)
    best = (blocks**2).sum(-1)
    for scale in SCALE_VALUES[1:]:
        step = scale * scale2
        decoded = reference.E2M1[nearest_code(blocks / step)] * step
        best = np.minimum(best, ((blocks - decoded) ** 2).sum(-1))
    return best


@st.composite
def weights(draw: st.DrawFn) -> NDArray[np.float32]:
    n, k = draw(st.integers(1, 12)), 2 * draw(st.integers(1, 60))
    random = np.random.default_rng(draw(seeds))
    w = random.standard_normal((n, k)) * draw(st.sampled_from([1.0, 0.02, 1e4, 2.0**-60]))
    kind = draw(st.sampled_from(["normal", "outliers", "zero blocks", "rows apart", "few values"]))
    if kind == "outliers":
        w *= 1 + 30 * (random.random((n, k)) < 0.02)
    elif kind == "zero blocks":
        w[:, :16] = 0
    elif kind == "rows apart":
        w *= 10.0 ** random.uniform(-5, 0, (n, 1))
    elif kind == "few values":
        w = np.round(w / np.abs(w).max() * 6) / 2
    return w.astype(np.float32)


@each_method
@given(w=weights())
def test_shapes_types_and_the_global_scale(method: str, w: NDArray[np.float32]) -> None:
    q = fp4linear.quantize(w, method=method)
    n, k = w.shape
    assert q._fields == ("b", "scales", "scale2")
    assert q.b.dtype == np.uint8 and q.b.shape == (n, k // 2)
    assert q.scales.dtype == np.uint8 and q.scales.shape == (n, -(-k // 16))
    assert (q.scales < 0x7F).all()  # neither NaN nor negative
    greatest = 256 if method == "four_over_six" else 448
    amax = np.abs(w).max()
    if amax > 0:
        assert abs(float(q.scale2) / (float(amax) / (6 * greatest)) - 1) < 2**-22
    layer = fp4linear.Fp4Linear(*q)
    assert (layer.out_features, layer.in_features) == (n, k)


@given(w=weights())
def test_max_abs(w: NDArray[np.float32]) -> None:
    q = fp4linear.quantize(w)
    scale2 = float(q.scale2)
    want = np.clip(np.abs(blocks_of(w)).max(-1) / (6 * scale2), 0, 448)
    # The nearest E4M3 value, so no other is nearer (a quotient's own rounding apart).
    gaps = np.abs(want[..., None] - SCALE_VALUES)
    got = np.take_along_axis(gaps, q.scales[..., None].astype(np.int64), -1)[..., 0]
    assert (got <= gaps.min(-1) + 1e-6 * want).all()
    # Codes: no code of a block is nearer than the one chosen.
    step = np.repeat(reference.E4M3[q.scales] * scale2, 16, axis=1)[:, : w.shape[1]]
    decoded = reference.dequantize(q.b, q.scales, scale2)
    nearest = np.abs(w[..., None].astype(np.float64) - step[..., None] * reference.E2M1).min(-1)
    assert (np.abs(w - decoded) <= nearest + 1e-6 * step).all()


@given(w=weights())
def test_four_over_six_is_the_better_of_the_two(w: NDArray[np.float32]) -> None:
    q = fp4linear.quantize(w, method="four_over_six")
    scale2 = float(q.scale2)
    amax = np.abs(blocks_of(w)).max(-1)
    errors = []
    for greatest in (6, 4):
        scales = (np.minimum(amax / (greatest * scale2), 448)).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
        step = scales.astype(np.float64)[..., None] * scale2
        with np.errstate(divide="ignore", invalid="ignore"):
            code = nearest_code(np.where(step > 0, blocks_of(w) / step, 0.0))
        errors.append(((blocks_of(w) - reference.E2M1[code] * step) ** 2).sum(-1))
    best = np.minimum(*errors)
    assert (block_errors(w, q) <= best * (1 + 1e-5) + 1e-12 * amax**2).all()


@given(w=weights())
def test_mse_is_the_best_of_all_scales(w: NDArray[np.float32]) -> None:
    q = fp4linear.quantize(w, method="mse")
    best = best_block_errors(w, float(q.scale2))
    assert (block_errors(w, q) <= best * (1 + 1e-5) + 1e-12 * np.abs(blocks_of(w)).max(-1) ** 2).all()


def test_mse_among_subnormal_scales() -> None:
    """13 / 512 is the best scale of this block, 4 times the max-abs one: half of it is no number of E4M3."""
    w = np.zeros((1, 16), np.float32)
    w[0, :2] = -1.32333735e-05, -1.41319479e-05
    q = fp4linear.quantize(w, method="mse", scale2=3.6165526e-4)
    assert q.scales[0, 0] == 13
    assert block_errors(w, q)[0, 0] == pytest.approx(4.204e-13, rel=1e-3)


@pytest.mark.parametrize("method", METHODS[1:])
@given(w=weights(), factor=st.sampled_from([1.0, 1.75, 3.0]))
def test_a_search_never_makes_a_block_worse(method: str, w: NDArray[np.float32], factor: float) -> None:
    scale2 = float(fp4linear.quantize(w).scale2) * factor
    plain = fp4linear.quantize(w, scale2=scale2)
    searched = fp4linear.quantize(w, method=method, scale2=scale2)
    assert float(searched.scale2) == float(np.float32(scale2))
    assert (block_errors(w, searched) <= block_errors(w, plain) * (1 + 1e-9)).all()


@each_method
@given(seed=seeds)
def test_what_nvfp4_can_express_comes_back(method: str, seed: int) -> None:
    """Weights that are NVFP4 already, each block with a 6 in it, under the scale2 they were made with."""
    random = np.random.default_rng(seed)
    code = random.integers(0, 16, (7, 96)).astype(np.uint8)
    code[:, ::16] = random.choice(np.array([7, 15], np.uint8), (7, 6))
    scales = random.integers(0x08, 0x7F, (7, 6), dtype=np.uint8)
    w = reference.dequantize(reference.pack(code), scales, 2.0**-5)
    q = fp4linear.quantize(w.astype(np.float32), method=method, scale2=2.0**-5)
    assert (reference.dequantize(q.b, q.scales, q.scale2) == w).all()
    if method == "max_abs":
        assert_same_bits(q.scales, scales)
        assert_same_bits(reference.E2M1[reference.codes(q.b)] + 0.0, reference.E2M1[code] + 0.0)


@each_method
def test_zeros(method: str) -> None:
    for w in (np.zeros((3, 32), np.float32), -np.zeros((3, 32), np.float32), np.zeros((0, 32), np.float32)):
        q = fp4linear.quantize(w, method=method)
        assert np.isfinite(float(q.scale2)) and float(q.scale2) != 0
        assert (reference.dequantize(q.b, q.scales, q.scale2) == 0).all()
    assert fp4linear.quantize(np.zeros((3, 0), np.float32), method=method).b.shape == (3, 0)


@each_method
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite(method: str, bad: float) -> None:
    w = np.ones((4, 32), np.float32)
    w[2, 17] = bad
    with pytest.raises(ValueError, match=r"\bw\b"):
        fp4linear.quantize(w, method=method)


@each_method
@pytest.mark.parametrize("magnitude", [2.0**-149, 2.0**-140, 1e-38, 3e38])
def test_extreme_magnitudes(method: str, magnitude: float) -> None:
    w = (np.array([[1.0, -1.0, 0.5, 0.0] * 8]) * magnitude).astype(np.float32)
    q = fp4linear.quantize(w, method=method)
    assert np.isfinite(float(q.scale2)) and float(q.scale2) > 0 and (q.scales < 0x7F).all()
    if magnitude > 1e-37:
        assert (np.abs(reference.dequantize(q.b, q.scales, q.scale2) - w) <= 0.1 * np.abs(w)).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_weight_types(dtype: Any) -> None:
    w = np.random.default_rng(1).standard_normal((5, 48)).astype(dtype)
    got, want = fp4linear.quantize(w), fp4linear.quantize(w.astype(np.float32))
    assert_same_bits(got.b, want.b)
    assert_same_bits(got.scales, want.scales)
    assert float(got.scale2) == float(want.scale2)


def test_strided_weights() -> None:
    held = np.random.default_rng(1).standard_normal((10, 96)).astype(np.float32)
    for view in (held[::2, ::3], held[::-1, ::-1], held.T, held[:, 1:33]):
        got, want = fp4linear.quantize(view), fp4linear.quantize(view.copy())
        assert_same_bits(got.b, want.b)
        assert_same_bits(got.scales, want.scales)


BAD: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "1-D": (np.ones(32, np.float32), {}, ValueError, "w"),
    "3-D": (np.ones((1, 2, 32), np.float32), {}, ValueError, "w"),
    "odd K": (np.ones((2, 31), np.float32), {}, ValueError, "w"),
    "integers": (np.ones((2, 32), np.int32), {}, TypeError, "w"),
    "list": ([[1.0, 2.0]], {}, TypeError, "w"),
    "method": (np.ones((2, 32), np.float32), {"method": "best"}, ValueError, "method"),
    "scale2 0": (np.ones((2, 32), np.float32), {"scale2": 0.0}, ValueError, "scale2"),
    "scale2 NaN": (np.ones((2, 32), np.float32), {"scale2": float("nan")}, ValueError, "scale2"),
    "scale2 inf": (np.ones((2, 32), np.float32), {"scale2": float("inf")}, ValueError, "scale2"),
    "scale2 str": (np.ones((2, 32), np.float32), {"scale2": "1"}, TypeError, "scale2"),
}


@pytest.mark.parametrize("kind", list(BAD))
def test_bad_arguments(kind: str) -> None:
    w, options, error, name = BAD[kind]
    with pytest.raises(error, match=rf"\b{name}\b"):
        fp4linear.quantize(w, **options)


@given(w=weights())
def test_max_abs_error_is_at_most_half_a_step_of_the_format(w: NDArray[np.float32]) -> None:
    """|w - q| <= half the widest gap of E2M1 (2) times the block scale, plus what the scale's own rounding clips."""
    q = fp4linear.quantize(w)
    step = np.repeat(reference.E4M3[q.scales] * float(q.scale2), 16, axis=1)[:, : w.shape[1]]
    amax = np.repeat(np.abs(blocks_of(w)).max(-1), 16, axis=1)[:, : w.shape[1]]
    clipped = np.maximum(amax - 6 * step, 0)
    assert (np.abs(w - reference.dequantize(q.b, q.scales, q.scale2)) <= step + clipped + 1e-6 * amax).all()

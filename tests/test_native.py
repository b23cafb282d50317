"""The native path's arithmetic on the host: activations to NVFP4, and layers that multiply them."""

from __future__ import annotations

import copy
import doctest
import pickle
import re
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

import fp4linear
from fp4linear import _activations, _core
from fp4linear._reference import reference_activations
from tests import reference
from tests.strategies import DTYPES, LAYOUTS, LayerCase, activations, dtype_names, laid_out, layers, seeds
from tests.tolerance import assert_same_bits, assert_within_contract

BF16 = DTYPES["bfloat16"]
E4M3_EXACT = [Fraction(float(v)) for v in reference.E4M3[:0x7F]]
E2M1_EXACT = [Fraction(float(v)) for v in reference.E2M1[:8]]
GREATEST = float(np.finfo(np.float32).max)
LEAST = 2.0**-149

global_scales = st.one_of(
    st.sampled_from([1.0, 1.0, 3.0, 448.0, float(np.float32(0.37)), 2.0**-10, LEAST, GREATEST]),
    st.floats(LEAST, GREATEST, width=32),
    st.floats(-20, 20).map(lambda power: float(np.float32(2.0**power))),
)
native_layers = layers(block_sizes=st.just(16))


def unpacked(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return reference.codes(codes)


def blocks_of(x: NDArray) -> NDArray:
    """[..., K] -> [..., blocks, 16], the last block filled up."""
    k = x.shape[-1]
    blocks = -(-k // 16)
    padded = np.zeros((*x.shape[:-1], blocks * 16), x.dtype)
    padded[..., :k] = x
    return padded.reshape(*x.shape[:-1], blocks, 16)


def by_midpoints(values: NDArray, table: NDArray) -> NDArray[np.uint8]:
    """Index of the nearest entry of an ascending table, the even one of two."""
    middle = (table[1:] + table[:-1]) / 2
    below = np.searchsorted(middle, values, side="left")
    tie = np.append(middle, np.inf)[below] == values
    return (below + (tie & (below % 2 == 1))).astype(np.uint8)


def expected_quantised(x: NDArray, g: float) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Codes [..., K] and scales. In fp64 x * g is exact, and its quotient is a midpoint only where that is exact."""
    with np.errstate(all="ignore"):
        scaled = blocks_of(x.astype(np.float64) * np.float64(g))
        finite = np.isfinite(scaled).all(-1)
        scaled[~finite] = 0.0
        scales = by_midpoints(np.abs(scaled).max(-1, initial=0.0) / 6, reference.E4M3[:0x7F])
        divisor = np.where(scales == 0, 1.0, reference.E4M3[scales])[..., None]
        codes = by_midpoints(np.abs(scaled) / divisor, reference.E2M1[:8]) | (np.signbit(scaled) * 8).astype(np.uint8)
    codes[(scales == 0) | ~finite] = 0
    scale_bytes = np.where(finite, scales, np.uint8(0x7F))
    return codes.reshape(*x.shape[:-1], 16 * scales.shape[-1])[..., : x.shape[-1]], scale_bytes


def nearest_even(value: Fraction, table: list[Fraction]) -> int:
    """By rational arithmetic: nothing is rounded before the decision."""
    value = min(value, table[-1])
    distances = [abs(value - entry) for entry in table]
    near = [index for index, distance in enumerate(distances) if distance == min(distances)]
    return next(index for index in near if len(near) == 1 or index % 2 == 0)


def rational_block(x: list[float], g: float) -> tuple[int, list[int]]:
    exact = [Fraction(v) * Fraction(g) for v in x]
    scale = nearest_even(max(abs(v) for v in exact) / 6, E4M3_EXACT)
    if scale == 0:
        return 0, [0] * len(x)
    signs = [8 if np.signbit(v) else 0 for v in x]
    return scale, [
        sign | nearest_even(abs(v) / E4M3_EXACT[scale], E2M1_EXACT) for sign, v in zip(signs, exact, strict=True)
    ]


def with_specials(x: NDArray, random: np.random.Generator) -> NDArray:
    """A copy in which a few values are infinite, NaN, zero or at the ends of the range."""
    x = x.copy()
    info = ml_dtypes.finfo(x.dtype)
    specials = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, float(info.max), float(info.smallest_subnormal)])
    if x.size:
        at = random.integers(0, x.size, min(x.size, 5))
        x.reshape(-1)[at] = random.choice(specials, at.shape).astype(x.dtype)
    return x


# The quantiser


@given(data=st.data(), half_k=st.integers(0, 60), g=global_scales, special=st.booleans(), seed=seeds)
def test_codes_and_scales(data: st.DataObject, half_k: int, g: float, special: bool, seed: int) -> None:
    x = data.draw(activations(2 * half_k)).x
    if special:
        x = with_specials(np.ascontiguousarray(x), np.random.default_rng(seed))
    before = x.copy()
    q = fp4linear.quantize_activations(x, global_scale=g)
    codes, scales = expected_quantised(x, g)
    assert q.codes.shape == (*x.shape[:-1], half_k) and q.codes.dtype == np.uint8
    assert_same_bits(q.scales, scales)
    assert_same_bits(unpacked(q.codes), codes)
    assert_same_bits(q.global_scale, np.array(g, np.float32))
    assert_same_bits(x, before)
    public = reference_activations(x, input_global_scale=g)
    assert_same_bits(public[0], codes)
    assert_same_bits(public[1], scales)


@given(
    x=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=16).filter(
        lambda values: len(values) % 2 == 0
    ),
    g=global_scales,
)
@example(x=[6.0 * 1.0625, 1.0], g=1.0)  # amax / 6 halfway between two scales
@example(x=[33.0, 2.5 * 5.5], g=1.0)  # a code at a midpoint of a scale that has no exact reciprocal
@example(x=[11.0, 2.5 * 5.5 / 3, 11.0 / 6, -0.0], g=3.0)
@example(x=[GREATEST, -GREATEST], g=GREATEST)
@example(x=[LEAST, -LEAST], g=LEAST)
def test_a_block_by_rational_arithmetic(x: list[float], g: float) -> None:
    values = np.array([x], np.float32)
    q = fp4linear.quantize_activations(values, global_scale=g)
    scale, codes = rational_block(values[0].tolist(), g)
    assert int(q.scales[0, 0]) == scale
    assert unpacked(q.codes)[0].tolist() == codes


@pytest.mark.parametrize("dtype", [np.float16, BF16])
@pytest.mark.parametrize("g", [1.0, 3.0])
def test_every_16_bit_value(dtype: Any, g: float) -> None:
    """Each alone in its block, where it makes the scale, and beside 1, which then makes it for the smaller half."""
    values = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    for other in (0.0, 1.0):
        x = np.stack([values, np.full_like(values, other)], axis=-1)
        q = fp4linear.quantize_activations(x, global_scale=g)
        codes, scales = expected_quantised(x, g)
        assert_same_bits(q.scales, scales)
        assert_same_bits(unpacked(q.codes), codes)
        assert (q.scales == 0x7F).sum() == (~np.isfinite(values.astype(np.float32))).sum()


def test_the_rules_one_by_one() -> None:
    def quantised(*x: float, g: float = 1.0) -> tuple[int, list[int]]:
        q = fp4linear.quantize_activations(np.array(x, np.float32), global_scale=g)
        return int(q.scales[0]), unpacked(q.codes).tolist()

    assert quantised(6, -3, 0.25, -0.0) == (0x38, [7, 13, 0, 8])  # scale 1; 0.25 is a tie and goes to 0; -0 stays
    assert quantised(6, 0.75, 2.5, 3.5) == (0x38, [7, 2, 4, 6])  # ties, to the even code
    assert quantised(6, np.nextafter(np.float32(2.5), 3), 1, 1) == (0x38, [7, 5, 2, 2])
    assert quantised(1, 1) == (0x23, [7, 7])  # E4M3(1/6) = 0.171875: ones do not survive
    assert quantised(6 * 2.0**-10, -1e-4) == (
        0,
        [0, 0],
    )  # the scale's tie between 0 and 2^-9 goes to 0: zeros, no signs
    assert quantised(np.nextafter(np.float32(6 * 2.0**-10), 1), 0) == (1, [5, 0])  # 2^-9, of which it is 3
    assert quantised(2688, -1e6) == (0x7E, [7, 15])  # 448, saturated twice
    assert quantised(0, -0.0) == (0, [0, 0])
    for bad in (np.inf, -np.inf, np.nan):
        assert quantised(1, bad) == (0x7F, [0, 0])  # NaN, and no code that a reader could take for a number
    assert quantised(6, 3, g=2.0) == (0x40, [7, 5])  # scale 2 (12 / 6); the values are 6 * 2 / 2
    assert quantised(6, 3, g=448.0) == (0x7E, [7, 5])


def test_the_example_of_the_docstring() -> None:
    result = doctest.testmod(_activations)
    assert result.attempted > 0 and result.failed == 0


# Global scales


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_both_conventions(dtype: str) -> None:
    x = np.random.default_rng(0).standard_normal((5, 48)).astype(DTYPES[dtype])
    amax = np.float32(np.abs(x.astype(np.float32)).max())
    modelopt, reciprocal = amax / np.float32(2688), np.float32(1) / (amax / np.float32(2688))
    by_factor = fp4linear.quantize_activations(x, global_scale=float(reciprocal))
    for number in (modelopt, float(modelopt), np.array(modelopt), np.array([modelopt])):
        q = fp4linear.quantize_activations(x, input_scale=number)
        for a, b in zip(q, by_factor, strict=True):
            assert_same_bits(a, b)
    assert int(q.scales.max()) == 0x7E  # the whole range is used
    swapped = fp4linear.quantize_activations(x, global_scale=float(modelopt))
    assert not swapped.scales.any()  # what the wrong convention would do: x is gone


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_the_dynamic_global_scale(dtype: str) -> None:
    x = np.random.default_rng(1).standard_normal((9, 50)).astype(DTYPES[dtype])
    x[3, 7] = -8.5
    dynamic = fp4linear.quantize_activations(x, global_scale="dynamic")
    assert float(dynamic.global_scale) == float(np.float32(2688) / np.float32(8.5))
    fixed = fp4linear.quantize_activations(x, global_scale=float(dynamic.global_scale))
    for a, b in zip(dynamic, fixed, strict=True):
        assert_same_bits(a, b)
    # What is not finite spoils its own block and not the scale of the others.
    x[0, 0], x[1, 1] = np.inf, np.nan
    with_bad = fp4linear.quantize_activations(x, global_scale="dynamic")
    assert float(with_bad.global_scale) == float(dynamic.global_scale)
    assert np.argwhere(with_bad.scales == 0x7F).tolist() == [[0, 0], [1, 0]]
    for empty in (np.zeros((3, 16), x.dtype), x[:0], np.full((1, 2), np.nan).astype(x.dtype)):
        assert float(fp4linear.quantize_activations(empty, global_scale="dynamic").global_scale) == 1.0


def test_the_dynamic_global_scale_stays_finite() -> None:
    for amax, g in [(LEAST, GREATEST), (GREATEST, np.float32(2688) / np.float32(GREATEST))]:
        x = np.array([amax, 0], np.float32)
        assert float(fp4linear.quantize_activations(x, global_scale="dynamic").global_scale) == float(g)


# Arrays


@pytest.mark.parametrize(("rows", "k"), [(1, 2), (33, 64), (128, 66), (129, 160), (0, 32), (3, 0)])
def test_swizzled_scales(rows: int, k: int) -> None:
    x = np.random.default_rng(rows).standard_normal((rows, k)).astype(np.float16)
    plain = fp4linear.quantize_activations(x)
    swizzled = fp4linear.quantize_activations(x, swizzled=True)
    blocks = -(-k // 16)
    wanted = np.zeros(-(-rows // 128) * 128 * (-(-blocks // 4) * 4), np.uint8)
    for row in range(rows):
        for block in range(blocks):
            wanted[reference.swizzle_offset(row, block, blocks)] = plain.scales[row, block]
    assert swizzled.scales.shape == (-(-rows // 128) * 128, -(-blocks // 4) * 4)
    assert_same_bits(swizzled.scales.reshape(-1), wanted)
    assert_same_bits(swizzled.codes, plain.codes)


@pytest.mark.parametrize(("n", "k"), [(1, 2), (1, 16), (33, 64), (128, 66), (129, 144), (300, 256)])
def test_the_weight_as_tensor_cores_read_it(n: int, k: int) -> None:
    """Their scales have no sign: the codes of a block whose scale has one take it, and nothing changes its value."""
    random = np.random.default_rng(n)
    b = random.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scales = random.integers(0, 256, (n, -(-k // 16)), dtype=np.uint8)
    codes, swizzled = _core.native_weight(b, scales)
    blocks = scales.shape[1]
    wanted = np.zeros(-(-n // 128) * 128 * (-(-blocks // 4) * 4), np.uint8)
    for row in range(n):
        for block in range(blocks):
            wanted[reference.swizzle_offset(row, block, blocks)] = scales[row, block] & 0x7F
    assert_same_bits(swizzled.reshape(-1), wanted)
    flipped = np.repeat(scales >> 7 << 3, 16, axis=1)[:, :k]
    assert_same_bits(unpacked(codes), unpacked(b) ^ flipped)
    with pytest.raises(ValueError, match="scales: got shape"):
        _core.native_weight(b, scales[:, :-1])


def test_leading_axes() -> None:
    x = np.random.default_rng(2).standard_normal((2, 3, 40)).astype(np.float32)
    q, flat = fp4linear.quantize_activations(x), fp4linear.quantize_activations(x.reshape(6, 40))
    assert q.codes.shape == (2, 3, 20) and q.scales.shape == (2, 3, 3)
    assert_same_bits(q.codes.reshape(6, 20), flat.codes)
    one = fp4linear.quantize_activations(x[1, 2])
    assert one.codes.shape == (20,) and one.scales.shape == (3,)
    assert_same_bits(one.codes, flat.codes[5])
    assert fp4linear.quantize_activations(x, swizzled=True).scales.shape == (128, 4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_layouts(layout: str, dtype: str) -> None:
    x = laid_out(np.random.default_rng(3).standard_normal((6, 50)).astype(DTYPES[dtype]), layout)
    for a, b in zip(fp4linear.quantize_activations(x), fp4linear.quantize_activations(x.copy()), strict=True):
        assert_same_bits(a, b)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_tensors_of_torch(dtype: str) -> None:
    import torch

    values = np.random.default_rng(4).standard_normal((4, 36)).astype(DTYPES[dtype])
    x = torch.from_numpy(values.astype(np.float32)).to(getattr(torch, dtype)).T.contiguous().T
    q = fp4linear.quantize_activations(x, input_scale=torch.tensor(0.01))
    for a, b in zip(q, fp4linear.quantize_activations(values, input_scale=0.01), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"x": np.ones((2, 3), np.float32)}, ValueError, "x: K must be even"),
    ({"x": np.ones((), np.float32)}, ValueError, "x: expected shape [..., K]"),
    ({"x": np.ones((2, 4), np.float64)}, TypeError, "x: expected float16, bfloat16 or float32, got float64"),
    ({"x": np.ones((2, 4), np.int8)}, TypeError, "x: expected float16, bfloat16 or float32, got int8"),
    ({"x": "abc"}, TypeError, "x"),
    ({"global_scale": 1.0, "input_scale": 1.0}, ValueError, "at most one of both"),
    ({"global_scale": "dynamics"}, ValueError, "global_scale: expected a number (2688 / amax) or 'dynamic'"),
    ({"input_scale": "dynamic"}, ValueError, "input_scale: expected a number (amax / 2688), got 'dynamic'"),
    ({"input_scale": "0.5"}, ValueError, "input_scale: expected a number"),
    ({"global_scale": True}, TypeError, "global_scale: expected a number"),
    ({"global_scale": [1.0]}, TypeError, "global_scale: expected a number"),
    ({"global_scale": 0.0}, ValueError, "global_scale"),
    ({"global_scale": -1.0}, ValueError, "global_scale"),
    ({"global_scale": float("nan")}, ValueError, "finite and > 0"),
    ({"global_scale": 1e39}, ValueError, "finite and > 0"),
    ({"global_scale": 10**400}, ValueError, "beyond float32"),
    ({"global_scale": 1e-50}, ValueError, "finite and > 0"),
    ({"input_scale": np.ones(2, np.float32)}, ValueError, "expected a number (amax / 2688), got shape [2]"),
    ({"input_scale": np.ones(1, np.int32)}, TypeError, "input_scale: expected a number"),
    ({"input_scale": 1e-40}, ValueError, "1 / input_scale is beyond float32"),
    ({"stream": 0}, ValueError, "stream: x is quantised on the CPU, which has none"),
])  # fmt: skip
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    keywords: dict[str, Any] = {"x": np.ones((2, 4), np.float32)} | arguments
    with pytest.raises(error, match=re.escape(message)):
        fp4linear.quantize_activations(keywords.pop("x"), **keywords)


# The path native_emulated


def emulated(case: LayerCase, **options: Any) -> fp4linear.Fp4Linear:
    return fp4linear.Fp4Linear(case.b, case.scales, case.scale2, case.bias, path="native_emulated", **options)


def expected_y(x: NDArray, case: LayerCase, g: float) -> NDArray:
    """y bit by bit: a block's sum is exact, fp32 additions of blocks in order of K, the rest in fp64, one rounding."""
    codes, scales = expected_quantised(x.reshape(int(np.prod(x.shape[:-1])), x.shape[-1]), g)
    weight = blocks_of(reference.E2M1[reference.codes(case.b)])
    activation = blocks_of(reference.E2M1[codes])
    sums = np.zeros((len(codes), case.out_features), np.float32)
    with np.errstate(all="ignore"):
        for c in range(scales.shape[-1]):
            dot = activation[:, c] @ weight[:, c].T
            part = dot * reference.E4M3[scales[:, c, None]] * reference.E4M3[case.scales[None, :, c]]
            sums = sums + part.astype(np.float32)
            assert sums.dtype == np.float32
        scale2 = np.asarray(case.scale2, np.float32).astype(np.float64)
        y = sums.astype(np.float64) * scale2 / np.float64(g)
        if case.bias is not None:
            y = y + case.bias.astype(np.float64)
        return y.astype(np.float32).astype(x.dtype).reshape(*x.shape[:-1], case.out_features)


def assert_same_y(y: NDArray, expected: NDArray) -> None:
    """Equal bits, of whatever NaN."""
    nan = np.isnan(expected)
    assert (np.isnan(y) == nan).all()
    assert_same_bits(np.where(nan, y.dtype.type(0), y), np.where(nan, y.dtype.type(0), expected))


@given(
    data=st.data(), case=native_layers, g=global_scales, special=st.booleans(), seed=seeds, threads=st.integers(1, 3)
)
def test_y_bit_by_bit(data: st.DataObject, case: LayerCase, g: float, special: bool, seed: int, threads: int) -> None:
    x = data.draw(activations(case.in_features)).x
    if special:
        x = with_specials(np.ascontiguousarray(x), np.random.default_rng(seed))
    layer = emulated(case, input_global_scale=g, threads=threads)
    y = layer.forward(x)
    assert y.dtype == x.dtype and y.shape == (*x.shape[:-1], case.out_features)
    if not case.in_features:
        assert_within_contract(y, case.expected(x))
        return
    assert_same_y(y, expected_y(x, case, g))
    if y.size:
        assert layer.last_path == "native_emulated"


@given(data=st.data(), case=native_layers, g=st.floats(2.0**-8, 2.0**12, width=32), dynamic=st.booleans())
def test_y_against_the_quantised_reference(data: st.DataObject, case: LayerCase, g: float, dynamic: bool) -> None:
    """Within the contract of a layer whose x is the quantised one; the public reference is the same number."""
    x = data.draw(activations(case.in_features)).x
    scale: Any = "dynamic" if dynamic else g
    y = emulated(case, input_global_scale=scale).forward(x)
    q = fp4linear.quantize_activations(x, global_scale=scale)
    factors = np.repeat(reference.E4M3[q.scales], 16, axis=-1)[..., : case.in_features]
    x_quantised = reference.E2M1[unpacked(q.codes)] * factors / np.float64(q.global_scale)
    expected = case.expected(x_quantised)
    assert_within_contract(y, expected)
    public = fp4linear.reference_native(x, case.b, case.scales, case.scale2, case.bias, input_global_scale=scale)
    np.testing.assert_allclose(public, expected.y, rtol=1e-10, atol=1e-12 * expected.magnitude.max(initial=0.0))


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_row_depends_on_nothing_but_itself(dtype: str) -> None:
    random = np.random.default_rng(5)
    b, scales = reference.make(37, 112, 5)
    x = random.standard_normal((150, 112)).astype(DTYPES[dtype])
    layers_ = [
        fp4linear.Fp4Linear(b, scales, 0.3, path="native_emulated", input_scale=0.002, threads=t, batch_invariant=t > 1)
        for t in (1, 2, 5)
    ]
    whole = layers_[0].forward(x)
    for layer in layers_:
        assert_same_bits(layer.forward(x), whole)
        for rows in (slice(0, 1), slice(63, 66), slice(7, 150)):
            assert_same_bits(layer.forward(x[rows]), whole[rows])
    bad = x.copy()
    bad[20, 3], bad[64, 111] = np.nan, -np.inf
    y = layers_[1].forward(bad)
    assert np.isnan(y[[20, 64]]).all()
    kept = np.delete(np.arange(150), [20, 64])
    assert_same_bits(y[kept], whole[kept])


def test_ones_do_not_survive() -> None:
    b, scales = np.full((3, 8), 0x22, np.uint8), np.full((3, 1), 0x38, np.uint8)
    x = np.ones((2, 16), np.float32)
    native = fp4linear.Fp4Linear(b, scales, 1.0, path="native_emulated")
    assert (native.forward(x) == 16 * 6 * 0.171875).all()  # 16.5
    assert (fp4linear.Fp4Linear(b, scales, 1.0).forward(x) == 16).all()
    # With 2688 as the global scale a block of ones becomes 448 * 6: exact.
    assert (fp4linear.Fp4Linear(b, scales, 1.0, path="native_emulated", input_global_scale=2688).forward(x) == 16).all()


@pytest.mark.parametrize("mode", ["zero", "propagate"])
def test_nan_scales_of_the_weight(mode: str) -> None:
    b, scales = reference.make(5, 64, 6)
    scales[3, 2] = 0xFF
    x = reference.x_of(4, 64, 7)
    y = fp4linear.Fp4Linear(b, scales, 1.0, path="native_emulated", nan_scales=mode).forward(x)
    scales[3, 2] = 0
    without = fp4linear.Fp4Linear(b, scales, 1.0, path="native_emulated").forward(x)
    if mode == "propagate":
        assert np.isnan(y[:, 3]).all()
        y[:, 3] = without[:, 3]
    assert_same_bits(y, without)


def test_out_and_one_axis() -> None:
    b, scales = reference.make(9, 48, 8)
    layer = fp4linear.Fp4Linear(b, scales, 0.5, np.arange(9.0, dtype=np.float32), path="native_emulated")
    x = reference.x_of(3, 48, 9)
    out = np.full((3, 9), np.nan, np.float16)
    assert layer.forward(x, out=out) is out
    assert_same_bits(out, layer.forward(x))
    assert_same_bits(layer.forward(x[1]), out[1])
    assert_same_bits(layer.forward(np.broadcast_to(x[2], (4, 48))), np.stack([out[2]] * 4))


# Options


def test_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    b, scales = reference.make(16, 64, 10)
    monkeypatch.setenv("FP4LINEAR_NATIVE_NVFP4", "1")  # lets Blackwell do it: not this CPU
    layer = fp4linear.Fp4Linear(b, scales, 1.0, input_global_scale="dynamic")
    assert layer.plan(1).path == "cpu_gemv" and layer.plan(4096).path == "cpu_gemm"
    monkeypatch.setenv("FP4LINEAR_PATH", "native_emulated")
    layer = fp4linear.Fp4Linear(b, scales, 1.0)
    layer.forward(np.ones((2, 64), np.float16))
    assert layer.last_path == layer.plan(2).path == "native_emulated"


@pytest.mark.parametrize(("options", "reason"), [
    ({"block_size": 32}, "needs block_size 16, got 32"),
    ({"batch_invariant": True, "input_global_scale": "dynamic"}, "batch_invariant is set"),
])  # fmt: skip
def test_unmet_conditions(options: dict[str, Any], reason: str) -> None:
    b, scales = reference.make(4, 64, 11)
    block_size = options.get("block_size", 16)
    layer = fp4linear.Fp4Linear(b, scales[:, :: block_size // 16], 1.0, path="native_emulated", **options)
    with pytest.raises(ValueError, match=f"path='native_emulated' can't run: .*{reason}"):
        layer.forward(np.ones((2, 64), np.float16))
    assert layer.plan(2).path is None and reason in layer.plan(2).reasons["native_emulated"]


def test_the_planner_for_gpus() -> None:
    def forced(**options: Any) -> fp4linear.Plan:
        return _core.plan(64, 64, 9, device="sm90", path="native_emulated", **options)

    assert forced().path == "native_emulated"
    assert "float32" in forced(dtype="float32").reasons["native_emulated"]
    assert "block_size" in forced(block_size=8).reasons["native_emulated"]
    assert "no kernel" in forced(kernels=["gemm_fused"]).reasons["native_emulated"]


@pytest.mark.parametrize(("options", "g"), [
    ({}, 1.0),
    ({"input_global_scale": 3.5}, 3.5),
    ({"input_scale": np.float32(0.001)}, float(np.float32(1) / np.float32(0.001))),
    ({"input_global_scale": "dynamic"}, "dynamic"),
])  # fmt: skip
def test_copies_keep_the_global_scale_of_x(options: dict[str, Any], g: Any) -> None:
    b, scales = reference.make(8, 32, 12)
    layer = fp4linear.Fp4Linear(b, scales, 1.0, path="native_emulated", **options)
    x = reference.x_of(3, 32, 13)
    for other in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.input_global_scale == g
        assert_same_bits(other.forward(x), layer.forward(x))


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"input_scale": 1.0, "input_global_scale": 1.0}, ValueError, "at most one of both"),
    ({"input_global_scale": "auto"}, ValueError, "input_global_scale: expected a number (2688 / amax) or 'dynamic'"),
    ({"input_scale": 0}, ValueError, "input_scale"),
    ({"input_scale": float("inf")}, ValueError, "finite and > 0"),
    ({"input_scale": [1]}, TypeError, "input_scale: expected a number"),
])  # fmt: skip
def test_bad_scales_of_a_layer(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    b, scales = reference.make(8, 32, 14)
    with pytest.raises(error, match=re.escape(message)):
        fp4linear.Fp4Linear(b, scales, 1.0, **arguments)


@pytest.mark.parametrize("bad", [
    {"input_scale": 1.0, "input_global_scale": 1.0}, {"input_global_scale": 0.0}, {"input_scale": 0.0},
])  # fmt: skip
def test_bad_scales_of_the_reference(bad: dict[str, Any]) -> None:
    b, scales = reference.make(8, 32, 15)
    with pytest.raises(ValueError, match=r"global scale of x|at most one"):
        fp4linear.reference_native(np.ones((1, 32)), b, scales, 1.0, **bad)
    with pytest.raises(ValueError, match="x: expected shape"):
        fp4linear.reference_native(np.float32(1), b, scales, 1.0)


@given(dtype=dtype_names, seed=seeds, g=global_scales)
def test_quantised_values_come_back(dtype: str, seed: int, g: float) -> None:
    """A block of E2M1 multiples of an E4M3 scale, whose greatest code is 6, is its own quantisation."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 16, (8, 16), dtype=np.uint8)
    codes[:, 0] = 7
    scales = random.integers(1, 0x7F, (8, 1), dtype=np.uint8)
    power = 2.0 ** np.floor(np.log2(min(max(g, 1.0), 2.0**4)))  # of two, so that x is exact in every type
    x = (reference.E2M1[codes] * reference.E4M3[scales] / power).astype(DTYPES[dtype])
    assert (x.astype(np.float64) * power == reference.E2M1[codes] * reference.E4M3[scales]).all()
    q = fp4linear.quantize_activations(x, global_scale=power)
    assert_same_bits(q.scales, scales)
    assert_same_bits(unpacked(q.codes), codes)

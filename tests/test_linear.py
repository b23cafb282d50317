"""Forward against float64 on every path and instruction set of the host."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fp4linear
from fp4linear import _core
from tests import reference
from tests.backends import ALL_ISAS, BACKENDS, CPU_PATHS, ISAS, Backend, check_that_it_ran, each_backend
from tests.strategies import (
    DTYPES,
    LAYOUTS,
    NAN_BYTES,
    LayerCase,
    activations,
    block_sizes,
    in_features,
    laid_out,
    layers,
    layers_with_nan_scales,
    out_features,
    seeds,
)  # fmt: skip
from tests.tolerance import assert_same_bits, assert_within_contract

backends = st.sampled_from(BACKENDS)


@each_backend
@given(data=st.data(), case=layers())
def test_forward(backend: Backend, data: st.DataObject, case: LayerCase) -> None:
    x = data.draw(activations(case.in_features)).x
    before = x.copy()
    layer = backend.layer(case.b, case.scales, case.scale2, case.bias, block_size=case.block_size)
    y = layer.forward(x)
    assert isinstance(y, np.ndarray)
    assert y.dtype == x.dtype and y.shape == (*x.shape[:-1], case.out_features)
    assert y.flags.c_contiguous and y.flags.writeable
    assert_within_contract(y, case.expected(x))
    assert_same_bits(layer(x), y)
    assert_same_bits(x, before)
    if y.size and case.in_features:
        check_that_it_ran(layer, backend)


@given(data=st.data(), case=layers(), backend=backends)
def test_a_strided_x_gives_the_bits_of_its_copy(data: st.DataObject, case: LayerCase, backend: Backend) -> None:
    x = data.draw(activations(case.in_features)).x
    layer = backend.layer(case.b, case.scales, case.scale2, case.bias, block_size=case.block_size)
    assert_same_bits(layer.forward(x), layer.forward(np.ascontiguousarray(x)))


@given(data=st.data(), case=layers_with_nan_scales(), backend=backends)
def test_nan_scales(data: st.DataObject, case: LayerCase, backend: Backend) -> None:
    x = data.draw(activations(case.in_features)).x
    bad = np.argwhere(np.isnan(reference.E4M3[case.scales]))
    with pytest.raises(ValueError) as refused:
        backend.layer(case.b, case.scales, case.scale2, case.bias, block_size=case.block_size)
    message = str(refused.value)
    assert "scales" in message and "NaN" in message
    for number in (len(bad), *bad[0]):
        assert str(number) in message

    propagate = backend.layer(
        case.b, case.scales, case.scale2, case.bias, block_size=case.block_size, nan_scales="propagate"
    )
    assert_within_contract(propagate.forward(x), case.expected(x), nan_at=np.isin(case.scales, NAN_BYTES).any(axis=1))
    zero = backend.layer(case.b, case.scales, case.scale2, case.bias, block_size=case.block_size, nan_scales="zero")
    assert_within_contract(zero.forward(x), case.expected(x, nan_scales="zero"))
    for layer in (propagate, zero):  # what was given comes back, NaN bytes and all
        b, scales, _ = layer.canonical()
        assert_same_bits(b, case.b)
        assert_same_bits(scales, case.scales)


@given(case=layers(), backend=backends)
def test_canonical_and_dequantize(case: LayerCase, backend: Backend) -> None:
    layer = backend.layer(case.b, case.scales, case.scale2, case.bias, block_size=case.block_size)
    b, scales, scale2 = layer.canonical()
    assert_same_bits(b, case.b)
    assert_same_bits(scales, case.scales)
    assert isinstance(scale2, np.ndarray | np.float32)
    given_scale2 = np.asarray(case.scale2, np.float32)
    if case.out_features == 1:
        given_scale2 = given_scale2.reshape(())  # one factor and one a row are the same there
    assert_same_bits(np.asarray(scale2), given_scale2)
    with np.errstate(over="ignore"):
        want = reference.dequantize(case.b, case.scales, case.scale2, case.block_size).astype(np.float32)
    assert_same_bits(layer.dequantize(), want)
    assert (layer.out_features, layer.in_features, layer.block_size) == (*want.shape, case.block_size)


def test_rows_for_a_gradient_are_of_layers_on_a_gpu() -> None:
    layer = fp4linear.Fp4Linear(*reference.make(4, 32, 1), 1.0, device="cpu")
    with pytest.raises(ValueError, match="on the CPU"):
        fp4linear._core.dequantize_rows(layer, 0, np.zeros((4, 32), np.float16))


@each_backend
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@given(n=out_features, k=in_features, m=st.sampled_from([1, 2, 3, 8, 9, 17, 40]), block_size=block_sizes, seed=seeds)
def test_numbers_that_fit_are_exact(
    backend: Backend, dtype: str, n: int, k: int, m: int, block_size: int, seed: int
) -> None:
    """Every partial sum is a small multiple of 1/8: exact in fp32 in any order. What is left is one rounding."""
    random = np.random.default_rng(seed)
    b = random.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scales = random.choice(np.array([0x30, 0x38, 0x40, 0xB8, 0x00], np.uint8), (n, -(-k // block_size)))
    scale2 = random.choice([0.5, 1.0, -2.0, 4.0], n).astype(np.float32)
    bias = random.integers(-64, 65, n).astype(np.float32)
    x = random.integers(-16, 17, (m, k)).astype(DTYPES[dtype])
    want = reference.linear(x, b, scales, scale2, bias, block_size=block_size)
    assert np.abs(want.magnitude).max(initial=0) < 2**20
    y = backend.layer(b, scales, scale2, bias, block_size=block_size).forward(x)
    assert_same_bits(y, want.y.astype(np.float32).astype(DTYPES[dtype]), zero_signs=False)


@each_backend
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_bias_comes_before_the_rounding(backend: Backend, dtype: str) -> None:
    """A sum just above a tie that the bias takes to the other side: rounding first would show."""
    step = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    x = np.zeros((1, 16), DTYPES[dtype])
    x[0, :2] = [1.0, step]
    b, scales = np.full((3, 8), 0x12, np.uint8), np.full((3, 1), 0x38, np.uint8)  # w = 1, 0.5, 1, ...
    bias = np.array([step / 8, -step / 8, 0.0], np.float32)
    y = backend.layer(b, scales, 1.0, bias).forward(x)
    assert y.astype(np.float64)[0].tolist() == [1.0 + step, 1.0, 1.0]  # the tie itself goes to even


@each_backend
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("m", [1, 5, 24])
def test_one_hot_x_reads_single_weights(backend: Backend, dtype: str, m: int) -> None:
    """Each x row picks one k: any permutation or dropped tail shows. K and N on no boundary."""
    n, k = 37, 154
    random = np.random.default_rng(5)
    b = random.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scales = random.integers(0x30, 0x48, (n, -(-k // 16)), dtype=np.uint8)
    w = reference.products(b, scales)
    layer = backend.layer(b, scales, 1.0)
    for first in range(0, k, m):
        x = np.eye(k, dtype=np.float64)[first : first + m].astype(DTYPES[dtype])
        assert_same_bits(layer.forward(x), w.T[first : first + m].astype(DTYPES[dtype]), zero_signs=False)


@each_backend
@pytest.mark.parametrize("m", [1, 9, 20])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_scale_byte(backend: Backend, dtype: str, m: int) -> None:
    finite = np.array([byte for byte in range(256) if byte not in NAN_BYTES], np.uint8)
    b = np.random.default_rng(1).integers(0, 256, (finite.size, 16), dtype=np.uint8)
    scales = np.stack([finite, finite[::-1]], axis=1)
    x = np.random.default_rng(2).standard_normal((m, 32)).astype(DTYPES[dtype])
    y = backend.layer(b, scales, 0.25).forward(x)
    assert_within_contract(y, reference.linear(x, b, scales, 0.25))


@each_backend
@pytest.mark.parametrize("m", [1, 9])
@pytest.mark.parametrize(("dtype", "x_exponent", "scale2_exponent"), [
    ("bfloat16", -130, 100), ("float32", -130, 100), ("float32", -149, 120), ("float16", -24, 0), ("float16", -20, 10),
])  # fmt: skip
def test_subnormal_x_counts(backend: Backend, dtype: str, x_exponent: int, scale2_exponent: int, m: int) -> None:
    b, scales = reference.make(20, 64, 3)
    x = np.full((m, 64), 2.0**x_exponent).astype(DTYPES[dtype])
    assert (x.astype(np.float64) == 2.0**x_exponent).all()
    y = backend.layer(b, scales, 2.0**scale2_exponent).forward(x)
    assert_within_contract(y, reference.linear(x, b, scales, 2.0**scale2_exponent))


@each_backend
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("m", [1, 9])
def test_overflow_gives_a_signed_infinity(backend: Backend, dtype: str, m: int) -> None:
    b = np.array([[0x77] * 16, [0xFF] * 16, [0x00] * 16], np.uint8)
    scales = np.full((3, 2), 0x7E, np.uint8)
    scale2 = 1.0 if dtype == "float16" else 3e38
    y = backend.layer(b, scales, scale2).forward(np.ones((m, 32), DTYPES[dtype])).astype(np.float64)
    assert (y[:, 0] == np.inf).all() and (y[:, 1] == -np.inf).all() and (y[:, 2] == 0).all()


@each_backend
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_not_finite_x_follows_ieee_and_stays_in_its_row(backend: Backend, dtype: str) -> None:
    b, scales = reference.make(33, 96, 8)
    x = reference.x_of(12, 96, 9).astype(DTYPES[dtype])
    layer = backend.layer(b, scales, 0.5)
    clean = layer.forward(x)
    x[5, 3], x[7, 0], x[9, 95] = np.nan, np.inf, -np.inf
    y = layer.forward(x)
    others = [0, 1, 2, 3, 4, 6, 8, 10, 11]
    assert_same_bits(y[others], clean[others])
    assert np.isnan(y[5].astype(np.float32)).all()
    want = reference.linear(x, b, scales, 0.5)
    assert_within_contract(y, want, nan_at=np.isnan(want.y))


@each_backend
def test_large_layer(backend: Backend) -> None:
    """More rows and columns than any tile or thread's share, on no boundary."""
    n, k, m = 611, 2050, 70
    random = np.random.default_rng(10)
    b = random.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scales = random.integers(0x20, 0x59, (n, -(-k // 16)), dtype=np.uint8)
    bias = random.standard_normal(n).astype(np.float16)
    layer = backend.layer(b, scales, 2.0**-6, bias)
    for dtype in DTYPES.values():
        x = random.standard_normal((m, k)).astype(dtype)
        want = reference.linear(x, b, scales, 2.0**-6, bias)
        assert_within_contract(layer.forward(x), want)
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 15, 16, 17, 33):
            part = layer.forward(x[:rows])
            assert_within_contract(part, reference.Expected(want.y[:rows], want.magnitude[:rows]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@given(case=layers(n=st.integers(1, 40), k=st.integers(1, 150).map(lambda half: 2 * half)), seed=seeds)
def test_batch_invariant_rows_do_not_depend_on_m(isa: str, dtype: str, case: LayerCase, seed: int) -> None:
    layer = fp4linear.Fp4Linear(
        case.b, case.scales, case.scale2, case.bias, block_size=case.block_size, isa=isa, batch_invariant=True
    )
    x = np.random.default_rng(seed).standard_normal((40, case.in_features)).astype(DTYPES[dtype])
    y = layer.forward(x)
    for first, last in ((0, 1), (0, 2), (1, 4), (5, 12), (7, 24), (39, 40)):
        assert_same_bits(layer.forward(x[first:last]), y[first:last])


@given(data=st.data(), case=layers(n=st.integers(1, 40), k=st.integers(1, 60).map(lambda half: 2 * half)))
def test_out(data: st.DataObject, case: LayerCase) -> None:
    x = data.draw(activations(case.in_features, m=st.integers(1, 12))).x
    backend = data.draw(backends)
    layer = backend.layer(case.b, case.scales, case.scale2, case.bias, block_size=case.block_size)
    y = layer.forward(x)
    out = np.full(y.shape, np.nan, y.dtype)
    assert layer.forward(x, out=out) is out
    assert_same_bits(out, y)


def test_isas_are_listed_best_first() -> None:
    listed = _core.isas()
    assert [isa["name"] for isa in listed] == ALL_ISAS and ALL_ISAS[-1] == "portable"
    assert listed[-1]["runs_here"]
    assert [isa["name"] for isa in listed if isa["selected"]] == ISAS[:1]
    assert fp4linear.Fp4Linear(*reference.make(1, 16, 0), 1.0).isa == ISAS[0]


@pytest.mark.parametrize("name", [name for name in ALL_ISAS if name not in ISAS] or [None])
def test_an_isa_that_does_not_run_here_is_refused(name: str | None) -> None:
    if name is None:
        pytest.skip("every instruction set runs here")
    with pytest.raises(ValueError, match=name):
        fp4linear.Fp4Linear(*reference.make(1, 16, 0), 1.0, isa=name)


@pytest.mark.parametrize("path", CPU_PATHS)
def test_last_path_is_the_calling_thread_s(path: str) -> None:
    layer = fp4linear.Fp4Linear(*reference.make(8, 32, 0), 1.0, path=path)
    assert layer.last_path is None
    layer.forward(np.ones((2, 32), np.float16))
    assert layer.last_path == path


@given(layers(n=st.just(0)), seeds)
def test_no_outputs(case: LayerCase, seed: int) -> None:
    for dtype in DTYPES.values():
        layer = fp4linear.Fp4Linear(case.b, case.scales, case.scale2, case.bias, block_size=case.block_size)
        assert layer.forward(np.ones((3, case.in_features), dtype)).shape == (3, 0)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("m", [0, 1, 9])
def test_no_inputs_gives_the_bias(dtype: str, m: int) -> None:
    b, scales = np.zeros((5, 0), np.uint8), np.zeros((5, 0), np.uint8)
    x = np.zeros((m, 0), DTYPES[dtype])
    bias = np.array([1.0, -2.5, 0.1, 3e4, 0.0], np.float32)
    assert (fp4linear.Fp4Linear(b, scales, 1.0).forward(x).astype(np.float32) == 0).all()
    y = fp4linear.Fp4Linear(b, scales, 1.0, bias).forward(x)
    assert_same_bits(y, np.broadcast_to(bias.astype(DTYPES[dtype]), (m, 5)))


@pytest.mark.parametrize("layout", sorted(set(LAYOUTS)))
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@each_backend
def test_each_layout(backend: Backend, dtype: str, layout: str) -> None:
    b, scales = reference.make(19, 80, 4)
    values = reference.x_of(11, 80, 5).astype(DTYPES[dtype])
    x = laid_out(values, layout, 3)
    assert_within_contract(backend.layer(b, scales, 0.125).forward(x), reference.linear(np.array(x), b, scales, 0.125))


def test_the_tolerance_can_fail() -> None:
    """The judge itself: what it must refuse."""
    want = reference.Expected(np.array([1.0, 70000.0, 2.0**-20]), np.array([1.0, 70000.0, 2.0**-20]))
    good = np.array([1.0, np.inf, 2.0**-20], np.float16)
    assert_within_contract(good, want)
    for at, value in ((0, np.nan), (0, 1.002), (0, np.inf), (1, 65504.0), (1, -np.inf), (2, 2.0**-19)):
        bad = good.copy()
        bad[at] = value
        with pytest.raises(AssertionError):
            assert_within_contract(bad, want)
    with pytest.raises(AssertionError):
        assert_within_contract(good, want, nan_at=np.array([True, False, False]))
    with pytest.raises(AssertionError):
        assert_within_contract(np.array([1.02], ml_dtypes.bfloat16), reference.Expected(np.ones(1), np.ones(1)))

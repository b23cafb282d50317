"""Each GPU path, forced, against fp64: random shapes and values, every scale byte, every position of a weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fp4linear
from tests import reference
from tests.gpu.device import (
    CUBLAS,
    DEVICE,
    FUSED,
    LAYOUTS,
    PATHS,
    PREPACKED,
    SCALAR,
    TENSOR_CORE,
    TORCH_DTYPES,
    assert_ran,
    each_dtype,
    each_path,
    expected_on_device,
    forward,
    laid_out,
    make_layer,
    out_features,
    poisoned,
    to_device,
    to_host,
    torch,
)
from tests.strategies import DTYPES, FINITE_BYTES, VALUE_KINDS, LayerCase, layers, seeds, x_values
from tests.tolerance import assert_same_bits, assert_within_contract

pytestmark = pytest.mark.gpu

ROWS = {
    "gemv_tensor_core": (1, 2, 3, 8),
    "gemv_scalar": (1, 2, 3, 8),
    "gemm_fused": (1, 9, 17, 40, 64, 100, 257),
    "dequant_cublas": (1, 8, 64),
}
path_and_m = pytest.mark.parametrize(("path", "m"), [(path, m) for path, rows in ROWS.items() for m in rows])


def random_case(n: int, k: int, seed: int = 0, **changes: Any) -> LayerCase:
    """An everyday layer: blocks of 16, scales about 1."""
    b, scales = reference.make(n, k, seed)
    return replace(LayerCase(b, scales, 2.0**-6), **changes)


def random_x(m: int, k: int, dtype: str, seed: int = 1) -> Any:
    return to_device(np.random.default_rng(seed).standard_normal((m, k)).astype(DTYPES[dtype]))


def check(case: LayerCase, x: Any, path: str) -> None:
    """A forward within the contract."""
    assert_within_contract(forward(make_layer(case, path), x, path), case.expected(to_host(x)))


@each_dtype
@each_path
@given(data=st.data(), seed=seeds)
def test_against_fp64(path: str, dtype: str, data: st.DataObject, seed: int) -> None:
    takes = PATHS[path]
    case = data.draw(layers(out_features, takes.in_features, takes.block_sizes))
    m = data.draw(takes.row_counts)
    kind, layout = data.draw(st.sampled_from(VALUE_KINDS)), data.draw(st.sampled_from(LAYOUTS))
    values = x_values(np.random.default_rng(seed), kind, (m, case.in_features), DTYPES[dtype])
    x = laid_out(values, layout, data.draw(st.integers(1, 9)))
    shape = data.draw(st.sampled_from(["2-D", "2-D", "1-D", "3-D"]))
    if shape == "1-D":
        x = x[m - 1]
    elif shape == "3-D":
        x = x[:, None] if m % 2 else x.unflatten(0, (2, m // 2))
    check(case, x, path)


@each_dtype
@given(data=st.data(), seed=seeds)
def test_nan_scales_against_fp64(dtype: str, data: st.DataObject, seed: int) -> None:
    """The layer holds them in the canonical form, which two paths read."""
    takes = data.draw(st.sampled_from([SCALAR, CUBLAS]))
    case = data.draw(layers(st.integers(1, 40), takes.in_features, takes.block_sizes))
    scales = case.scales.copy()
    for at in data.draw(st.lists(st.integers(0, scales.size - 1), min_size=1, max_size=4)):
        scales.reshape(-1)[at] = data.draw(st.sampled_from([0x7F, 0xFF]))
    case = replace(case, scales=scales)
    values = np.random.default_rng(seed).standard_normal((data.draw(takes.row_counts), case.in_features))
    x = to_device(values.astype(DTYPES[dtype]))
    nan_rows = np.isnan(reference.E4M3[scales]).any(axis=1)
    y = forward(make_layer(case, takes.name, nan_scales="propagate"), x, takes.name)
    assert_within_contract(y, case.expected(to_host(x)), nan_at=nan_rows[None, :])
    y = forward(make_layer(case, takes.name, nan_scales="zero"), x, takes.name)
    assert_within_contract(y, case.expected(to_host(x), "zero"))


@pytest.mark.parametrize(
    ("n", "k"),
    [(2113, 256), (4111, 4096), (9001, 2048), (2129, 8192), (170_003, 128), (70_000, 64), (3, 16_384), (33, 17_408)],
)
@pytest.mark.parametrize("m", [1, 5, 8, 33])
@each_dtype
def test_more_tiles_than_blocks(dtype: str, m: int, n: int, k: int) -> None:
    """The ladder's own choice where a block walks many tiles, N is above 65535, or K above what a block takes."""
    case = random_case(n, k, scale2=2.0**-8)
    layer = make_layer(case)
    x = random_x(m, k, dtype)
    path = layer.plan(m, dtype).path
    assert path is not None
    assert_within_contract(forward(layer, x, path), expected_on_device(case, x))


@pytest.mark.parametrize(
    ("n", "k", "m"),
    [
        (3979, 192, 1000), (3979, 192, 1300), (3979, 1280, 2100), (6200, 4096, 512), (2113, 4096, 333),
        (385, 2048, 1025), (513, 1024, 129), (4111, 320, 4100), (1000, 14_400, 50), (500, 2048, 100),
        (8100, 192, 385), (5172, 4096, 385), (10_975, 1088, 90), (10_975, 1088, 160), (10_975, 2112, 250),
        (12_200, 2048, 100), (8203, 4160, 150), (6091, 4160, 64), (10_975, 1088, 64), (1536, 5120, 48),
        (24_570, 1536, 40), (68_200, 8192, 20), (39_000, 20_480, 9),
    ],
)  # fmt: skip
@each_dtype
@pytest.mark.parametrize("path", [FUSED.name])
def test_large_tiles(path: str, dtype: str, n: int, k: int, m: int) -> None:
    """Tiles of up to 256 tokens: whole, shared along K by blocks, helpers or clusters, by pairs; the bits stay.

    The last two leave the streaming kernels no room for their sums.
    """
    case = random_case(n, k, scale2=2.0**-8)
    layer, x = make_layer(case, path), random_x(m, k, dtype)
    y = forward(layer, x, path)
    assert_within_contract(y, expected_on_device(case, x))
    for _ in range(3):
        assert_same_bits(forward(layer, x, path), y)


# One row has one scale byte and all 256 bytes of codes.
ALL_CODES = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
ALL_SCALES = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 512 // 16, axis=1)
NAN_ROWS = [0x7F, 0xFF]


@each_dtype
@path_and_m
def test_every_code_with_every_scale_byte(path: str, m: int, dtype: str) -> None:
    """Unit vectors give the columns of the weight, to the bit: 2^-10 to 2688 are exact in both types."""
    b, scales = ALL_CODES, ALL_SCALES
    options = {"nan_scales": "propagate"}
    if path in PREPACKED:
        b, scales, options = b[FINITE_BYTES], scales[FINITE_BYTES], {}
    layer = make_layer(LayerCase(b, scales), path, **options)
    want = reference.products(b, scales)
    got = np.empty_like(want)
    unit = torch.eye(512, dtype=TORCH_DTYPES[dtype], device=DEVICE)
    for first in range(0, 512, m):
        x = unit[first : first + m]
        y = layer.forward(x, out=poisoned((len(x), len(b)), x.dtype))
        assert_ran(layer, path)
        got[:, first : first + m] = to_host(y).astype(np.float64).T
    nan = np.isnan(want).any(axis=1)
    assert nan.sum() == (0 if path in PREPACKED else 2)
    assert np.isnan(got[nan]).all()
    differ = np.argwhere(got[~nan] != want[~nan])
    assert differ.size == 0, f"{len(differ)} weights differ, the first at row, K {differ[0].tolist()}"


@each_dtype
@path_and_m
@pytest.mark.parametrize(("n", "k"), [(17, 128), (40, 384), (33, 2048), (19, 4096), (8, 8192)])
def test_unit_vectors_give_columns(path: str, m: int, dtype: str, n: int, k: int) -> None:
    """A wrong lane, warp, slice or split of K would show another column."""
    case = random_case(n, k, scale2=1.0)
    layer = make_layer(case, path)
    want = to_device(reference.products(case.b, case.scales).T.astype(DTYPES[dtype]))  # [K, N], exact
    unit = torch.zeros((k + m, k), dtype=want.dtype, device=want.device)
    unit.view(-1)[:: k + 1][:k] = 1
    got = poisoned((k, n), want.dtype)
    for first in range(0, k, m):
        rows = min(m, k - first)
        layer.forward(unit[first : first + rows], out=got[first : first + rows])
    assert_ran(layer, path)
    wrong = (got != want).nonzero().cpu().numpy()
    assert len(wrong) == 0, f"{len(wrong)} weights differ, the first at K, row {wrong[0].tolist()}"


@each_dtype
@path_and_m
def test_one_weight_that_is_not_zero(path: str, m: int, dtype: str) -> None:
    """w[n, k] = 1 alone: y is x[:, k] in column n, and zero elsewhere. Every position of a 16 x 64 unit, and edges."""
    n, k = 35, 256
    values = np.array([[(column * 7 + row) % 251 + 1 for column in range(k)] for row in range(m)])  # exact integers
    x = to_device(values.astype(DTYPES[dtype]))
    positions = [(row, column) for row in range(16) for column in range(64)]
    positions += [(row, column) for row in (16, 31, 32, 34) for column in (0, 63, 64, 127, 128, 200, 255)]
    if path != "gemv_tensor_core" and (path, m) != ("gemm_fused", 9):
        positions = positions[::17]
    for row, column in positions:
        code = np.zeros((n, k), np.uint8)
        code[row, column] = 2
        layer = make_layer(LayerCase(reference.pack(code), np.full((n, k // 16), 0x38, np.uint8)), path)
        y = layer.forward(x, out=poisoned((m, n), x.dtype))
        want = torch.zeros_like(y)
        want[:, row] = x[:, column]
        assert torch.equal(y, want), f"weight at row {row}, K {column}"
    assert_ran(layer, path)


RANGES = {
    # kind: (types, exponents of |x|, scale2). Sums stay in the fp32 range, results in that of the type.
    "subnormal fp16": ("float16", (-24, -15), 2.0**12),
    "large fp16": ("float16", (10, 15), 2.0**-20),
    "subnormal bf16": ("bfloat16", (-133, -127), 2.0**100),
    "tiny bf16": ("bfloat16", (-126, -100), 2.0**90),
    "large bf16": ("bfloat16", (60, 100), 2.0**-60),
    "wide bf16": ("bfloat16", (-100, 100), 2.0**-60),
    "subnormal fp16 results": ("float16", (-2, 2), 2.0**-26),
    "subnormal bf16 results": ("bfloat16", (-2, 2), 2.0**-135),
    "tiny scale2": ("bfloat16", (20, 30), 2.0**-149),
    "huge scale2": ("bfloat16", (-40, -30), 2.0**127),
}


def values_between(exponents: tuple[int, int], shape: tuple[int, int], dtype: str) -> np.ndarray:
    random = np.random.default_rng(5)
    values = random.choice([-1.0, 1.0], shape) * random.uniform(1, 1.98, shape)
    values *= 2.0 ** random.integers(exponents[0], exponents[1] + 1, shape).astype(np.float64)
    rounded = values.astype(DTYPES[dtype])
    assert np.isfinite(rounded.astype(np.float64)).all()
    return rounded


@path_and_m
@pytest.mark.parametrize("kind", list(RANGES))
def test_range_of_x_and_scale2(path: str, m: int, kind: str) -> None:
    dtype, exponents, scale2 = RANGES[kind]
    for k in (128, 1024):
        for factor in (scale2, np.full(40, scale2, np.float32)):
            case = random_case(40, k, scale2=factor)
            check(case, to_device(values_between(exponents, (m, k), dtype)), path)


@path_and_m
@pytest.mark.parametrize("k", [128, 1024, 4096])
def test_sums_beyond_fp32_that_scale2_brings_back(path: str, m: int, k: int) -> None:
    """|x| up to 3.3e38 with weights up to 2688: in range again through scale2, if no sum is lost to infinity."""
    if path == "dequant_cublas":
        pytest.skip("cuBLAS sums in fp32: what leaves its range is infinite")
    b, _ = reference.make(40, k, 3)
    scales = np.full((40, k // 16), 0x7E, np.uint8)
    x = values_between((120, 127), (m, k), "bfloat16")
    x[:, ::5] = np.float64(2.0**127 * 1.9921875)
    check(LayerCase(b, scales, 2.0**-40), to_device(x), path)


@pytest.mark.parametrize("path", [FUSED.name])
@pytest.mark.parametrize(("n", "k", "m"), [(3979, 192, 1000), (3979, 192, 1300), (4111, 320, 100), (300, 192, 300)])
def test_sums_beyond_fp32_in_large_tiles(path: str, n: int, k: int, m: int) -> None:
    """Every warp of a warpgroup stores a part of the others' rows there, and each repairs its own behind that."""
    b, _ = reference.make(n, k, 3)
    case = LayerCase(b, np.full((n, k // 16), 0x7E, np.uint8), 2.0**-40)
    x = to_device(np.full((m, k), np.float64(2.0**127 * 1.9921875)).astype(DTYPES["bfloat16"]))
    assert_within_contract(forward(make_layer(case, path), x, path), case.expected(to_host(x)))


@path_and_m
def test_x_from_the_least_to_the_largest(path: str, m: int) -> None:
    """Huge x meets zero weights only: the tiny rest of the row decides, and none of it may be lost."""
    k = 1024
    code = reference.codes(random_case(40, k).b)
    code[:, ::3] = 0
    x = values_between((-133, -120), (m, k), "bfloat16")
    x[:, ::3] = values_between((100, 127), (m, k), "bfloat16")[:, ::3]
    check(LayerCase(reference.pack(code), random_case(40, k).scales, 2.0**100), to_device(x), path)


@each_dtype
@path_and_m
def test_sum_above_the_range_of_the_result(path: str, m: int, dtype: str) -> None:
    """B3, B4: 6 * 448 * 4096 is 11,010,048; scale2 acts in fp32, before the rounding."""
    b, scales = np.full((3, 2048), 0x77, np.uint8), np.full((3, 256), 0x7E, np.uint8)
    x = to_device(np.ones((m, 4096), DTYPES[dtype]))
    for scale2, want in ((2.0**-12, 2688), (float(np.float32(1 / 3584)), 3072)):
        assert (forward(make_layer(LayerCase(b, scales, scale2), path), x, path).astype(np.float64) == want).all()


@each_dtype
@each_path
@pytest.mark.parametrize("m", [2, 8, 12, 70])
def test_bad_rows_stay_alone(path: str, m: int, dtype: str) -> None:
    if m > PATHS[path].most_rows:
        pytest.skip(f"the path takes {PATHS[path].most_rows} rows")
    case = random_case(40, 256)
    layer = make_layer(case, path)
    x = random_x(m, 256, dtype)
    clean = forward(layer, x, path)
    for bad in (float("nan"), float("inf"), -float("inf")):
        for row in {0, m - 1, m // 2}:
            for column in (0, 3, 64, 255):
                spoilt = x.clone()
                spoilt[row, column] = bad
                y = forward(layer, spoilt, path)
                assert not np.isfinite(y[row].astype(np.float64)).any()
                assert np.isnan(y[row].astype(np.float64)).all() or not np.isnan(bad)
                assert_same_bits(np.delete(y, row, axis=0), np.delete(clean, row, axis=0))


@each_dtype
@path_and_m
@pytest.mark.parametrize("bias", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("scale2", ["one", "rows", "zero", "negative"])
def test_bias_and_factors(path: str, m: int, dtype: str, bias: str, scale2: str) -> None:
    random = np.random.default_rng(8)
    factors = {"one": 0.01, "rows": random.standard_normal(67).astype(np.float32), "zero": 0.0, "negative": -0.125}
    values = (30 * random.standard_normal(67)).astype(DTYPES[bias])
    case = random_case(67, 256, scale2=factors[scale2], bias=values)
    x = random_x(m, 256, dtype)
    y = forward(make_layer(case, path), x, path)
    assert_within_contract(y, case.expected(to_host(x)))
    if scale2 == "zero":
        assert (y == values.astype(np.float32).astype(DTYPES[dtype])).all()


@each_dtype
@pytest.mark.parametrize("m", range(1, 9))
@pytest.mark.parametrize("bias", [False, True])
def test_row_tilings_of_gemv_scalar_are_bit_identical(
    monkeypatch: pytest.MonkeyPatch, bias: bool, m: int, dtype: str
) -> None:
    n, k = 2200, 1056  # so many columns that an H200 shares weights among rows
    values = np.random.default_rng(2).standard_normal(n).astype(np.float32)
    case = random_case(n, k, scale2=values if bias else 0.1, bias=values if bias else None)
    x = random_x(m, k, dtype)
    results = {}
    for tiling in ("0", "1"):
        monkeypatch.setenv("FP4LINEAR_GEMV_ROW_TILING", tiling)
        layer = make_layer(case, "gemv_scalar")
        results[tiling] = layer.plan(m, dtype).rows_per_block, forward(layer, x, "gemv_scalar")
    assert results["0"][0] == 1 and results["1"][0] == (1 if m == 1 else 2 if m < 4 else 4)
    assert_same_bits(results["0"][1], results["1"][1])
    monkeypatch.delenv("FP4LINEAR_GEMV_ROW_TILING")
    # A row alone gives the bits that it gives among others.
    alone = forward(make_layer(case, "gemv_scalar"), x[m - 1 : m], "gemv_scalar")
    assert_same_bits(alone[0], results["1"][1][m - 1])
    assert_within_contract(results["1"][1], case.expected(to_host(x)))


@pytest.mark.parametrize(("n", "k"), [(300, 1024), (4096, 4096), (512, 2048), (2048, 8192), (130, 96), (2200, 1056)])
@each_dtype
def test_batch_invariant(tensor_core_kernels: bool, dtype: str, n: int, k: int) -> None:
    """The bits of a row are the same alone, first, last and among others, whatever M is."""
    case = random_case(n, k, scale2=2.0**-8)
    layer = make_layer(case, batch_invariant=True)
    path = FUSED.name if k % 64 == 0 and tensor_core_kernels else SCALAR.name
    row = random_x(1, k, dtype)
    alone = forward(layer, row, path)
    assert_within_contract(alone, case.expected(to_host(row)))
    for m in (2, 7, 8, 9, 16, 17, 33, 48, 50, 64, 65, 128, 130, 256, 300, 513):
        x = random_x(m, k, dtype, seed=m)
        for at in {0, m // 2, m - 1}:
            x[at] = row[0]
        y = forward(layer, x, path)
        for at in {0, m // 2, m - 1}:
            assert_same_bits(y[at], alone[0])
    assert fp4linear.Fp4Linear(case.b, case.scales, 1.0, device=DEVICE).plan(1).path != FUSED.name


def test_batch_invariant_says_what_it_cannot_do() -> None:
    layer = make_layer(random_case(33, 48), batch_invariant=True)
    with pytest.raises(ValueError, match="batch_invariant"):
        layer.forward(random_x(3, 48, "bfloat16"))


@pytest.mark.parametrize("path", ["gemm_fused", "dequant_cublas"])
@pytest.mark.parametrize(("m", "n", "k"), [(66_000, 33_000, 64), (17, 140_000, 128), (70_000, 40, 192)])
def test_sizes_beyond_32_bits_and_16_bits(path: str, m: int, n: int, k: int) -> None:
    """M x N above 2^31, N and M above 65535: rows and columns at the edges, and some between."""
    case = random_case(n, k, scale2=2.0**-6)
    layer = make_layer(case, path)
    x = torch.randn((m, k), generator=torch.Generator(DEVICE).manual_seed(1), dtype=torch.bfloat16, device=DEVICE)
    y = layer.forward(x, out=poisoned((m, n), x.dtype))
    assert_ran(layer, path)
    rows = sorted({0, 1, m // 3, 65_535 % m, 65_536 % m, m - 2, m - 1, (2**31 // n) % m, (2**31 // n + 1) % m})
    columns = sorted({0, 1, n // 3, 65_535 % n, 65_536 % n, n - 2, n - 1})
    some = replace(case, b=case.b[columns], scales=case.scales[columns])
    assert_within_contract(to_host(y[rows][:, columns]), some.expected(to_host(x[rows])))
    assert not torch.isnan(y).any()  # nothing of the poison is left


@each_dtype
@path_and_m
def test_fifty_calls_give_the_same_bits(path: str, m: int, dtype: str) -> None:
    layer = make_layer(random_case(3001, 4096, scale2=2.0**-8), path)
    x = random_x(m, 4096, dtype)
    first = layer.forward(x)
    for _ in range(50):
        y = layer.forward(x, out=poisoned((m, 3001), x.dtype))
        assert torch.equal(y.view(torch.int16), first.view(torch.int16))
    assert_ran(layer, path)


@each_path
@pytest.mark.parametrize(("n", "k"), [(1, 128), (17, 128), (256, 512), (33, 2048), (130, 4096)])
def test_canonical_comes_back_bit_for_bit(path: str, n: int, k: int) -> None:
    """Also the signs of scales and of zeros, which the prepacked form moves into the codes."""
    random = np.random.default_rng(n)
    b = random.integers(0, 256, (n, k // 2), dtype=np.uint8)
    for scales in (random.choice(FINITE_BYTES, (n, k // 16)), random.integers(0, 256, (n, k // 16), dtype=np.uint8)):
        for mode in ("error",) if np.isin(scales, FINITE_BYTES).all() else ("zero", "propagate"):
            for scale2 in (-0.5, random.standard_normal(n).astype(np.float32)):
                layer = make_layer(LayerCase(b, scales, scale2), path, nan_scales=mode)
                back = layer.canonical()
                assert_same_bits(back[0], b)
                assert_same_bits(back[1], scales)
                assert_same_bits(np.asarray(back[2]), np.asarray(scale2, np.float32).reshape(back[2].shape))
                host = fp4linear.Fp4Linear(b, scales, scale2, nan_scales=mode, device="cpu").dequantize()
                np.testing.assert_array_equal(layer.dequantize(), host)


@pytest.mark.parametrize("k", [2, 14, 48, 232, 3420])
@pytest.mark.parametrize("block_size", [16, 5, 32])
def test_canonical_of_shapes_that_are_not_prepacked(k: int, block_size: int) -> None:
    random = np.random.default_rng(k)
    b = random.integers(0, 256, (19, k // 2), dtype=np.uint8)
    scales = random.choice(FINITE_BYTES, (19, -(-k // block_size)))
    layer = make_layer(LayerCase(b, scales, 0.5, block_size=block_size))
    assert_same_bits(layer.canonical()[0], b)
    assert_same_bits(layer.canonical()[1], scales)
    want = reference.dequantize(b, scales, 0.5, block_size).astype(np.float32)
    np.testing.assert_array_equal(layer.dequantize(), want)


@each_dtype
@pytest.mark.parametrize(("path", "n", "k", "block_size"), [
    ("auto", 130, 512, 16), ("gemv_scalar", 130, 512, 16), ("auto", 19, 48, 16), ("auto", 19, 232, 5),
])  # fmt: skip
def test_dequantized_rows(path: str, n: int, k: int, block_size: int, dtype: str) -> None:
    random = np.random.default_rng(n)
    b = random.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scales = random.choice(FINITE_BYTES, (n, -(-k // block_size)))
    factors = random.standard_normal(n).astype(np.float32)
    layer = make_layer(LayerCase(b, scales, factors, block_size=block_size), path)
    single = make_layer(LayerCase(b, scales, 0.3, block_size=block_size), path)
    want = reference.dequantize(b, scales, 1.0, block_size)
    for first, count in [(0, n), (0, 1), (7, 11), (n - 1, 1), (n, 0), (3, 16 if n > 19 else 5)]:
        for held, given_factors in ((layer, True), (layer, False), (single, False)):
            out = poisoned((count, k), TORCH_DTYPES[dtype])
            scale2 = poisoned((count,), torch.float32) if given_factors else None
            fp4linear._core.dequantize_rows(held, first, out, scale2)
            np.testing.assert_array_equal(to_host(out).astype(np.float64), want[first : first + count])
            if scale2 is not None:
                assert_same_bits(to_host(scale2), factors[first : first + count])


def test_dequantized_rows_are_refused_where_they_do_not_fit() -> None:
    layer = make_layer(random_case(32, 64))
    out = poisoned((4, 64), torch.bfloat16)
    core = fp4linear._core
    for first in (-1, 29, 1 << 40):
        with pytest.raises(ValueError, match="rows"):
            core.dequantize_rows(layer, first, out)
    with pytest.raises(ValueError, match="one scale2"):
        core.dequantize_rows(layer, 0, out, poisoned((4,), torch.float32))
    with pytest.raises(ValueError, match=r"out: expected shape.*K = 64"):
        core.dequantize_rows(layer, 0, poisoned((4, 63), torch.bfloat16))
    with pytest.raises(ValueError, match="C-contiguous"):
        core.dequantize_rows(layer, 0, poisoned((4, 128), torch.bfloat16)[:, ::2])
    with pytest.raises(TypeError, match="float32"):
        core.dequantize_rows(layer, 0, poisoned((4, 64), torch.float32))
    assert torch.isnan(out).all()


@pytest.mark.parametrize("path", ["auto", *PATHS])
def test_a_layer_holds_one_form_of_its_weight(path: str) -> None:
    n, k = 1024, 2048
    held = n * k // 2 + n * k // 16
    plain = make_layer(random_case(n, k), path)
    assert held <= plain.nbytes <= held + 64
    rich = make_layer(random_case(n, k, scale2=np.ones(n, np.float32), bias=np.ones(n, np.float16)), path)
    assert held + 8 * n <= rich.nbytes <= held + 8 * n + 64  # factors and bias in fp32


@each_dtype
@pytest.mark.parametrize(("path", "m", "k", "block_size", "why"), [
    ("gemv_tensor_core", 9, 128, 16, "M = 9"), ("gemv_tensor_core", 1, 96, 16, "K = 96"),
    ("gemm_fused", 64, 96, 16, "K = 96"), ("gemm_fused", 64, 128, 32, "block_size"),
    ("gemv_tensor_core", 1, 128, 32, "block_size"), ("gemv_scalar", 9, 128, 16, "M = 9"),
    ("gemv_scalar", 1, 48, 16, "K = 48"), ("gemv_scalar", 1, 128, 8, "block_size"),
    ("native_nvfp4", 16, 128, 16, "native_nvfp4"), ("cpu_gemv", 1, 128, 16, "GPU"),
])  # fmt: skip
def test_a_forced_path_that_cannot_run(path: str, m: int, k: int, block_size: int, why: str, dtype: str) -> None:
    random = np.random.default_rng(0)
    b = random.integers(0, 256, (32, k // 2), dtype=np.uint8)
    case = LayerCase(b, np.full((32, k // block_size), 0x38, np.uint8), block_size=block_size)
    x = random_x(m, k, dtype)
    with pytest.raises(ValueError, match=path) as error:
        make_layer(case, path).forward(x)
    assert why in str(error.value)
    layer = make_layer(case)
    chosen = layer.plan(m, dtype).path
    assert chosen is not None
    assert_within_contract(forward(layer, x, chosen), case.expected(to_host(x)))


@pytest.mark.parametrize("m", [1, 8, 9, 64, 300])
@each_dtype
@pytest.mark.parametrize("k", [2, 30, 48, 64, 96, 128, 192, 232, 464, 2736, 3420])
def test_the_ladder_keeps_its_word(tensor_core_kernels: bool, k: int, dtype: str, m: int) -> None:
    """Every K has a path, the planned one runs, and the plan says why the rungs above do not."""
    random = np.random.default_rng(k)
    b = random.integers(0, 256, (33, k // 2), dtype=np.uint8)
    scales = random.integers(0x20, 0x59, (33, -(-k // 16)), dtype=np.uint8)
    case = LayerCase(b, scales, 0.25)
    layer = make_layer(case)
    plan = layer.plan(m, dtype)
    x = random_x(m, k, dtype)
    assert plan.path is not None
    assert_within_contract(forward(layer, x, plan.path), case.expected(to_host(x)))
    assert all(plan.reasons.values())
    if k % 64 == 0 and tensor_core_kernels:
        assert plan.path == (TENSOR_CORE.name if m <= 8 else FUSED.name)
    elif k % 16 == 0:
        assert plan.path == (SCALAR.name if k % 32 == 0 and m <= 8 else CUBLAS.name)


def test_the_tensor_core_path_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, tensor_core_kernels: bool) -> None:
    if not tensor_core_kernels:
        pytest.skip("this build has none for this GPU")
    monkeypatch.setenv("FP4LINEAR_GEMV_TENSOR_CORE", "0")
    case = random_case(33, 256)
    layer = make_layer(case)
    x = random_x(4, 256, "bfloat16")
    assert_within_contract(forward(layer, x, "gemv_scalar"), case.expected(to_host(x)))
    assert "FP4LINEAR_GEMV_TENSOR_CORE" in layer.plan(4).reasons["gemv_tensor_core"]


@each_dtype
@pytest.mark.parametrize("path", ["auto", *PATHS])
def test_nothing_to_compute(path: str, dtype: str) -> None:
    bias = np.arange(5, dtype=np.float32)
    for n, k, m in ((5, 0, 3), (5, 0, 0), (0, 128, 3), (5, 128, 0), (0, 0, 0)):
        case = LayerCase(np.zeros((n, k // 2), np.uint8), np.zeros((n, k // 16), np.uint8), 1.0, bias[:n])
        layer = make_layer(case, path)
        y = layer.forward(torch.zeros((m, k), dtype=TORCH_DTYPES[dtype], device=DEVICE))
        assert tuple(y.shape) == (m, n) and layer.last_path is None
        assert (to_host(y) == bias[:n]).all()

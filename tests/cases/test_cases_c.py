"""C. Shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fp4linear
from tests import reference
from tests.backends import Backend, each_backend
from tests.cases.conventions import check, each_dtype, each_run, equal, published, rows
from tests.strategies import DTYPES
from tests.tolerance import assert_same_bits, assert_within_contract

C1 = reference.make(48, 96, 7)
C1_X = reference.x_of(257, 96, 1007)


@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257])
@each_dtype
@each_backend
def test_C1_m_sweep(backend: Backend, dtype: str, m: int) -> None:
    layer = backend.layer(*C1, 2.0**-6)
    x = C1_X[:m].astype(DTYPES[dtype])
    y = check(layer, x, *C1, 2.0**-6)
    assert_same_bits(layer.forward(x), y)


def test_C1_published_numbers() -> None:
    y = reference.linear(C1_X, *C1, 2.0**-6).y
    for at, number in (((0, 0), 0.101010), ((7, 47), -5.101481), ((8, 0), 1.123579), ((256, 47), 4.155913)):
        published(y[at], number)


@each_dtype
@each_backend
def test_C3_batch_dims_and_empties(backend: Backend, dtype: str) -> None:
    bias = np.linspace(-1, 1, 48).astype(np.float32)
    for layer, at_zero in ((backend.layer(*C1, 1.0), 0), (backend.layer(*C1, 1.0, bias), bias.astype(DTYPES[dtype]))):
        for lead in ((2, 3, 1), (2, 0, 3), (0,), (5, 1), (), (1,), (0, 0), (1, 1, 1, 1, 1, 1, 2)):
            x = rows(C1_X, max(int(np.prod(lead)), 1)).astype(DTYPES[dtype])[: int(np.prod(lead))].reshape(*lead, 96)
            y = layer.forward(x)
            assert y.shape == (*lead, 48) and y.dtype == DTYPES[dtype] and y.flags.c_contiguous
            flat = layer.forward(x.reshape(-1, 96))
            assert_same_bits(y.reshape(-1, 48), flat)
            out = np.full(y.shape, np.nan, DTYPES[dtype])
            assert_same_bits(layer.forward(x, out=out), y)
        equal(layer.forward(np.zeros((9, 96), DTYPES[dtype])), at_zero)
    x = C1_X[:9].astype(DTYPES[dtype])
    check(backend.layer(*C1, 1.0), x, *C1, 1.0)


C4 = {
    16: -3.568344, 32: 20.246582, 48: 337.217407, 64: -82.693340, 80: 247.159298, 96: -201.242065, 112: -0.064731,
    128: 91.382973, 144: -305.388940, 160: 182.213492,
}  # fmt: skip


@each_run
@pytest.mark.parametrize("k", list(C4))
def test_C4_k_in_steps_of_16(backend: Backend, dtype: str, m: int, k: int) -> None:
    b, scales = reference.make(5, k, 100 + k // 16)
    x = reference.x_of(2, k, 200 + k // 16)
    published(reference.linear(x, b, scales, 1.0).y[0, 0], C4[k])
    check(backend.layer(b, scales, 1.0), rows(x, m).astype(DTYPES[dtype]), b, scales, 1.0)


C5 = [
    (40, 464, 12, 0.726434, 18.056536),  # Nemotron, 4 ways
    (40, 2736, 13, 5.714610, -10.751557),  # GLM-4.5-Air, 4 ways
    (40, 3696, 14, -51.950415, -10.588479),  # Qwen2.5-VL-72B, 8 ways
    (33, 4304, 11, -6.292805, 19.685812),  # Qwen3-VL vision fc2
    (17, 1856, 15, -1.434576, -21.816670),
]


@each_run
@pytest.mark.parametrize(("n", "k", "seed", "first", "last"), C5, ids=lambda value: str(value))
def test_C5_real_k_that_is_no_multiple_of_32(
    backend: Backend, dtype: str, m: int, n: int, k: int, seed: int, first: float, last: float
) -> None:
    b, scales = reference.make(n, k, seed)
    x = reference.x_of(3, k, seed + 1000)
    y = reference.linear(x, b, scales, 2.0**-6).y
    published(y[0, 0], first)
    published(y[2, n - 1], last)
    check(backend.layer(b, scales, 2.0**-6), rows(x, m).astype(DTYPES[dtype]), b, scales, 2.0**-6)


@each_run
@pytest.mark.parametrize("k", [3420, 232, 7688])
def test_C6_k_that_is_no_multiple_of_16(backend: Backend, dtype: str, m: int, k: int) -> None:
    """Fully supported: the last block is short and counts."""
    random = np.random.default_rng(k)
    b = random.integers(0, 256, (4, k // 2), dtype=np.uint8)
    scales = random.integers(0x20, 0x59, (4, -(-k // 16)), dtype=np.uint8)
    layer = backend.layer(b, scales, 2.0**-6)
    check(layer, rows(reference.x_of(3, k, 5), m).astype(DTYPES[dtype]), b, scales, 2.0**-6)
    tail = np.zeros((m, k), DTYPES[dtype])
    tail[:, k // 16 * 16 :] = 1  # nothing but the short block: dropping it gives 0
    y = check(layer, tail, b, scales, 2.0**-6)
    assert (y != 0).any()
    with pytest.raises(ValueError, match=rf"scales.*{-(-k // 16)}.*{k // 16}"):
        backend.layer(b, scales[:, :-1], 1.0)


@each_run
def test_C8_n_above_65535(backend: Backend, dtype: str, m: int) -> None:
    n = np.arange(70000)
    scales = (0x20 + n % 89).astype(np.uint8)[:, None]
    y = backend.layer(np.full((70000, 8), 0x22, np.uint8), scales, 1.0).forward(np.ones((m, 16), DTYPES[dtype]))
    want = 16 * reference.E4M3[scales[:, 0]]
    assert (want[65535], want[65536], want[69999]) == (30, 32, 104)
    equal(y, want)


@each_dtype
@each_backend
def test_C8_m_above_65535(backend: Backend, dtype: str) -> None:
    column = (np.arange(70000) % 251 / 256).astype(DTYPES[dtype])
    layer = backend.layer(np.full((16, 8), 0x22, np.uint8), np.full((16, 1), 0x38, np.uint8), 1.0)
    want = np.arange(70000)[:, None] % 251 / 16
    assert (want[65535], want[65536], want[69999]) == (1.5, 1.5625, 13.8125)
    equal(layer.forward(np.repeat(column[:, None], 16, axis=1)), want)
    equal(layer.forward(np.broadcast_to(column[:, None], (70000, 16))), want)


C10_B, C10_SCALES = reference.make(160, 96, 3)
C10_X = reference.x_of(2, 96, 4)


@each_dtype
@pytest.mark.parametrize("columns", [48, 112, 192])
def test_C10_x_that_does_not_fit(dtype: str, columns: int) -> None:
    layer = fp4linear.Fp4Linear(C10_B, C10_SCALES, 1.0)
    for shape in ((2, columns), (columns,), (2, 1, columns)):
        with pytest.raises(ValueError, match=rf"x.*96.*{columns}"):
            layer.forward(np.ones(shape, DTYPES[dtype]))
    check(layer, C10_X.astype(DTYPES[dtype]), C10_B, C10_SCALES, 1.0)


@pytest.mark.parametrize("shape", [(160, 7), (6, 160), (960,), (256, 8), (161, 6), (160, 5), (1, 160, 6)])
def test_C10_scales_that_do_not_fit(shape: tuple[int, ...]) -> None:
    got = ", ".join(map(str, shape))
    with pytest.raises(ValueError, match=rf"scales.*\[160, 6\].*\[{got}\]"):
        fp4linear.Fp4Linear(C10_B, np.full(shape, 0x38, np.uint8), 1.0)


@pytest.mark.parametrize("b", [C10_B.reshape(-1), C10_B[None], C10_B[:, :, None]], ids=lambda b: str(b.shape))
def test_C10_b_that_is_not_2_d(b: Any) -> None:
    with pytest.raises(ValueError, match=r"b.*" + ", ".join(map(str, b.shape))):
        fp4linear.Fp4Linear(b, C10_SCALES, 1.0)


@each_run
def test_C10_an_odd_number_of_bytes_a_row_is_supported(backend: Backend, dtype: str, m: int) -> None:
    """K/2 odd: K = 98 is even and no multiple of 4 or 16."""
    random = np.random.default_rng(9)
    b = random.integers(0, 256, (5, 49), dtype=np.uint8)
    scales = random.integers(0x20, 0x59, (5, 7), dtype=np.uint8)
    x = random.standard_normal((m, 98)).astype(DTYPES[dtype])
    assert_within_contract(backend.layer(b, scales, 1.0).forward(x), reference.linear(x, b, scales, 1.0))

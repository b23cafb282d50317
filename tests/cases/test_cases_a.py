"""A. Decoding."""

from __future__ import annotations

import numpy as np
import pytest

from tests import reference
from tests.backends import Backend, each_backend
from tests.cases.conventions import each_dtype, each_m, each_run, equal, rows
from tests.strategies import DTYPES

A1_B = np.array([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], np.uint8)
A1_Y = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


@each_run
def test_A1_nibble_table_and_order(backend: Backend, dtype: str, m: int) -> None:
    layer = backend.layer(A1_B, np.array([[0x38]], np.uint8), 1.0)
    equal(layer.forward(np.eye(16, dtype=DTYPES[dtype])), np.array(A1_Y)[:, None])
    repeated = layer.forward(np.repeat(np.eye(16, dtype=DTYPES[dtype]), m, axis=0))
    equal(repeated, np.repeat(A1_Y, m)[:, None])


def a3_weight() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    b, scales, x = np.full((8, 32), 0x22, np.uint8), np.full((8, 4), 0x38, np.uint8), np.ones(64)
    scales[3, 2] = 0x7F
    x[32:48] = 0
    return b, scales, x


@each_run
@pytest.mark.parametrize("codes", [0x22, 0x00])
def test_A3_one_nan_scale_byte_propagates(backend: Backend, dtype: str, m: int, codes: int) -> None:
    """Row 3 is NaN although its x block is zero; also where all codes of the block are 0, as in a real file."""
    b, scales, x = a3_weight()
    b[3, 16:24] = codes
    y = backend.layer(b, scales, 1.0, nan_scales="propagate").forward(rows(x, m).astype(DTYPES[dtype]))
    assert np.isnan(y[:, 3].astype(np.float64)).all()
    equal(np.delete(y, 3, axis=1), 48)


@each_run
def test_A3_one_nan_scale_byte_as_zero(backend: Backend, dtype: str, m: int) -> None:
    b, scales, _ = a3_weight()
    y = backend.layer(b, scales, 1.0, nan_scales="zero").forward(np.ones((m, 64), DTYPES[dtype]))
    equal(y, [64, 64, 64, 48, 64, 64, 64, 64])


@each_backend
def test_A3_one_nan_scale_byte_is_an_error_by_default(backend: Backend) -> None:
    b, scales, _ = a3_weight()
    with pytest.raises(ValueError, match=r"scales.*1.*NaN.*row 3, block 2"):
        backend.layer(b, scales, 1.0)


@each_run
def test_A4_zeros(backend: Backend, dtype: str, m: int) -> None:
    x = rows(reference.x_of(3, 32, 1), m).astype(DTYPES[dtype])
    sixes, no_scale = np.full((3, 16), 0x77, np.uint8), np.zeros((3, 2), np.uint8)
    one = np.full((3, 2), 0x38, np.uint8)
    zero_scales = backend.layer(sixes, no_scale, 1.0)
    equal(zero_scales.forward(x), 0)  # (a)
    x[0, 0] = np.inf
    y = zero_scales.forward(x)
    assert np.isnan(y[0].astype(np.float64)).all()
    equal(y[1:], 0)
    equal(
        backend.layer(np.full((3, 16), 0x88, np.uint8), one, 1.0).forward(np.full((m, 32), -1, DTYPES[dtype])), 0
    )  # (b)
    equal(backend.layer(np.zeros((3, 16), np.uint8), one, 1.0).forward(np.full((m, 32), 3, DTYPES[dtype])), 0)  # (c)


@each_run
def test_A6_scale_goes_to_the_right_row_and_block(backend: Backend, dtype: str, m: int) -> None:
    bytes_of_rows = np.array([0x38, 0x40, 0x48, 0x50], np.uint8)
    by_row = backend.layer(np.full((4, 32), 0x22, np.uint8), np.repeat(bytes_of_rows[:, None], 4, axis=1), 1.0)
    equal(by_row.forward(np.ones((m, 64), DTYPES[dtype])), [64, 128, 256, 512])
    by_block = backend.layer(np.full((1, 32), 0x22, np.uint8), bytes_of_rows[None], 1.0)
    for block, want in enumerate([16, 32, 64, 128]):
        x = np.zeros((m, 64), DTYPES[dtype])
        x[:, 16 * block : 16 * block + 16] = 1
        equal(by_block.forward(x), want)


@each_backend
@each_dtype
@each_m
def test_A6_one_block_at_a_time_with_block_sizes(backend: Backend, dtype: str, m: int) -> None:
    """The same with other block sizes, the last block short."""
    for block_size in (1, 3, 8, 31, 32, 40):
        k = 66
        blocks = -(-k // block_size)
        scales = (0x30 + 8 * (np.arange(blocks) % 4)).astype(np.uint8)[None]  # 0.5, 1, 2, 4
        layer = backend.layer(np.full((1, k // 2), 0x22, np.uint8), scales, 1.0, block_size=block_size)
        for block in range(0, blocks, max(1, blocks // 5)):
            x = np.zeros((m, k), DTYPES[dtype])
            x[:, block * block_size : (block + 1) * block_size] = 1
            size = min(block_size, k - block * block_size)
            equal(layer.forward(x), size * 2.0 ** (block % 4 - 1))

"""Nibbles, tables and the swizzle, through the module's own functions, against ml_dtypes and the published formula."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

import fp4linear
from fp4linear import _core
from tests import reference
from tests.strategies import LayerCase, layers, seeds
from tests.tolerance import assert_same_bits


def test_reference_tables_are_those_of_ml_dtypes() -> None:
    e2m1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    e4m3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert_same_bits(reference.E2M1, e2m1)
    assert_array_equal(np.signbit(reference.E4M3[~np.isnan(e4m3)]), np.signbit(e4m3[~np.isnan(e4m3)]))
    assert_array_equal(reference.E4M3, e4m3)
    assert np.flatnonzero(np.isnan(e4m3)).tolist() == [0x7F, 0xFF]


def test_low_nibble_is_even_k() -> None:
    b = np.array([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], np.uint8)
    w = fp4linear.dequantize(b, np.array([[0x38]], np.uint8), 1.0)
    assert w.dtype == np.float32
    assert_same_bits(w, reference.E2M1[None].astype(np.float32))


def test_every_scale_byte_times_every_code() -> None:
    b = np.tile(np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], np.uint8), (256, 1))
    scales = np.arange(256, dtype=np.uint8)[:, None]
    w = fp4linear.dequantize(b, scales, 1.0)
    e4m3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    e2m1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    nan = np.isnan(e4m3)
    assert np.isnan(w[nan]).all()
    assert_same_bits(w[~nan], e4m3[~nan, None] * e2m1)


@given(layers())
def test_dequantize(case: LayerCase) -> None:
    w = fp4linear.dequantize(case.b, case.scales, case.scale2, block_size=case.block_size)
    with np.errstate(over="ignore"):
        want = reference.dequantize(case.b, case.scales, case.scale2, case.block_size).astype(np.float32)
    assert_same_bits(w, want)


@given(st.integers(0, 300), st.integers(0, 40), seeds)
def test_swizzle(rows: int, blocks: int, seed: int) -> None:
    plain = np.random.default_rng(seed).integers(1, 256, (rows, blocks), dtype=np.uint8)
    swizzled = np.asarray(_core.swizzle_scales(plain))
    assert swizzled.dtype == np.uint8
    assert swizzled.size == -(-rows // 128) * 128 * (-(-blocks // 4) * 4)
    want = np.zeros(swizzled.size, np.uint8)
    for row in range(rows):
        for block in range(blocks):
            want[reference.swizzle_offset(row, block, blocks)] = plain[row, block]
    assert_array_equal(swizzled.reshape(-1), want)
    assert_same_bits(np.asarray(_core.unswizzle_scales(swizzled, rows, blocks)), plain)


def test_swizzle_of_a_strided_array() -> None:
    held = np.arange(200 * 12, dtype=np.uint32).astype(np.uint8).reshape(200, 12)
    for view in (held[::2, 1::2], held[::-1], held.T.copy().T):
        assert_array_equal(_core.swizzle_scales(view), _core.swizzle_scales(np.ascontiguousarray(view)))


@pytest.mark.parametrize("size", [0, 511, 513, 1024])
def test_unswizzle_refuses_a_wrong_size(size: int) -> None:
    with pytest.raises(ValueError, match=r"512"):
        _core.unswizzle_scales(np.zeros(size, np.uint8), 100, 4)

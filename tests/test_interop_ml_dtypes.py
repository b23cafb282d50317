"""Cross-checks with ml_dtypes' casts: float4_e2m1fn and float8_e4m3fn."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import fp4linear
from fp4linear import Fp4Linear
from tests import reference

float4 = getattr(ml_dtypes, "float4_e2m1fn", None)
needs_float4 = pytest.mark.skipif(float4 is None, reason="this ml_dtypes has no float4_e2m1fn (0.5 has)")


def test_every_e4m3_byte() -> None:
    scales = np.arange(256, dtype=np.uint8).reshape(256, 1)
    w = fp4linear.dequantize(np.full((256, 1), 0x22, np.uint8), scales, 1.0)
    expected = np.broadcast_to(scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32), w.shape)
    assert np.isnan(expected).sum() == 4
    assert np.array_equal(w, expected, equal_nan=True)
    assert np.array_equal(np.signbit(w[~np.isnan(w)]), np.signbit(expected[~np.isnan(w)]))


@needs_float4
def test_every_e2m1_code() -> None:
    codes = np.arange(16, dtype=np.uint8)
    w = fp4linear.dequantize(reference.pack(codes.reshape(1, 16)), np.array([[0x38]], np.uint8), 1.0)
    assert w.tobytes() == codes.view(float4).astype(np.float32).tobytes()


@needs_float4
def test_codes_round_as_their_cast_does() -> None:
    # 6 in every block and a global scale of 1 make the block's scale 1, so the codes are casts of the values.
    random = np.random.default_rng(1)
    w = random.uniform(-6, 6, (500, 16)).astype(np.float32)
    w[:250] = np.round(w[:250] * 8) / 8  # ties and their neighbours
    w[::2] = np.nextafter(w[::2], np.float32(0))
    w[:, 5] = 6
    q = fp4linear.quantize(w, scale2=1.0)
    assert (q.scales == 0x38).all()
    assert np.array_equal(reference.codes(q.b), w.astype(float4).view(np.uint8))


@pytest.mark.parametrize("scale2", [1.0, 2.0**-12])
def test_scales_round_as_their_cast_does(scale2: float) -> None:
    random = np.random.default_rng(2)
    wanted = np.exp2(random.uniform(-10, np.log2(448), 4000)).astype(np.float32)
    wanted = (wanted.view(np.uint32) & np.uint32(0xFFFFF000)).view(np.float32)  # so that 6 * wanted is exact
    values = np.sort(reference.E4M3[:0x7F]).astype(np.float32)
    wanted = np.concatenate([wanted, (values[1:] + values[:-1]) / 2, values])  # ties
    w = np.zeros((wanted.size, 16), np.float32)
    w[:, 7] = 6 * wanted * np.float32(scale2)
    q = fp4linear.quantize(w, scale2=scale2)
    assert np.array_equal(q.scales[:, 0], wanted.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


@needs_float4
def test_arrays_of_their_types_are_taken() -> None:
    b, scales = reference.make(5, 48, 3)
    typed = Fp4Linear(reference.codes(b).view(float4), scales.view(ml_dtypes.float8_e4m3fn), 0.5)
    assert np.array_equal(typed.canonical()[0], b)
    assert np.array_equal(typed.canonical()[1], scales)

"""The public reference against the tests' own, which shares no code with it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

import fp4linear
from tests import reference
from tests.strategies import DTYPES, LayerCase, activations, layers


@given(st.data(), layers())
def test_reference(data: st.DataObject, case: LayerCase) -> None:
    x = data.draw(activations(case.in_features)).x
    y = fp4linear.reference(x, case.b, case.scales, case.scale2, case.bias, block_size=case.block_size)
    want = case.expected(x)
    assert isinstance(y, np.ndarray) and y.dtype == np.float64 and y.shape == want.y.shape
    assert np.all(np.abs(y - want.y) <= 2.0**-45 * (want.magnitude + np.abs(want.y)))


def test_reference_matches_a_published_number() -> None:
    b, scales = reference.make(48, 96, 7)
    y = fp4linear.reference(reference.x_of(257, 96, 1007), b, scales, 2.0**-6)
    assert_allclose([y[0, 0], y[7, 47], y[8, 0], y[256, 47]], [0.101010, -5.101481, 1.123579, 4.155913], atol=5e-7)


def test_reference_propagates_nan() -> None:
    b, scales = np.full((2, 8), 0x22, np.uint8), np.array([[0x38], [0x7F]], np.uint8)
    y = fp4linear.reference(np.ones((1, 16)), b, scales, 1.0)
    assert y[0, 0] == 16.0 and np.isnan(y[0, 1])


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_scale2_is_rounded_to_fp32(dtype: str) -> None:
    b, scales = np.full((1, 8), 0x22, np.uint8), np.full((1, 1), 0x38, np.uint8)
    y = fp4linear.reference(np.ones(16, DTYPES[dtype]), b, scales, 0.1)
    assert y.shape == (1,) and y[0] == 16.0 * float(np.float32(0.1))


def test_reference_names_what_does_not_fit() -> None:
    b, scales = np.full((1, 8), 0x22, np.uint8), np.full((1, 1), 0x38, np.uint8)
    with pytest.raises(ValueError, match=r"x.*16|16.*x"):
        fp4linear.reference(np.ones((1, 17)), b, scales, 1.0)
    with pytest.raises(ValueError, match="scales"):
        fp4linear.reference(np.ones((1, 16)), b, np.full((1, 2), 0x38, np.uint8), 1.0)

"""The forms of units that fp4linear.jax passes weights in: where every code and scale lies, and back bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fp4linear import _core
from tests import reference
from tests.strategies import LayerCase, layers

FORMS = ["tiled", "prepacked"]
each_form = pytest.mark.parametrize("form", FORMS)
whole_units = layers(k=st.integers(1, 6).map(lambda unit: 64 * unit), block_sizes=st.just(16))
tileable = layers(block_sizes=st.integers(1, 6).map(lambda groups: 16 * groups))


def prepacked_element(unit: NDArray[np.uint8], row: int, k: int) -> tuple[int, int]:
    """(code, scale byte) of an element of a unit, as docs/layouts.md and cuda/prepacked.h describe it."""
    slice_, column = k // 16, k % 16
    lane, pair, half = row % 8 * 4 + column % 8 // 2, row // 8 + 2 * (column // 8), column % 2
    word = int(unit[16 * lane + 4 * slice_ : 16 * lane + 4 * slice_ + 4].view("<u4")[0]) >> 16 * half
    sign, magnitude = word >> (15, 12, 14, 13)[pair] & 1, word >> (6, 3, 0, 9)[pair] & 7
    scale = int(unit[512 + row % 8 * 8 + 2 * slice_ + row // 8])
    return (sign ^ scale >> 7) << 3 | magnitude, scale


def tiled_element(unit: NDArray[np.uint8], row: int, k: int) -> tuple[int, int]:
    """The same of a tiled unit, as cpp/cpu/layout.h describes it."""
    vector, within = k // 8, k % 8
    lane = int(unit[64 * vector + 4 * row : 64 * vector + 4 * row + 4].view("<u4")[0])
    code = lane >> (16 * (within % 2) + 4 * (within // 2)) & 15
    block = k // 16
    return code, int(unit[512 + 2 * (16 * (block // 2) + row) + block % 2])


def pack(case: LayerCase, form: str) -> NDArray[np.uint8]:
    return _core.pack_weight(case.b, case.scales, case.out_features, case.in_features, case.block_size, form)


@each_form
def test_where_every_element_lies(form: str) -> None:
    n, k = 37, 192
    random = np.random.default_rng(5)
    b = random.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scales = random.integers(0, 256, (n, k // 16), dtype=np.uint8)
    codes = reference.codes(b)
    units = _core.pack_weight(b, scales, n, k, 16, form)
    assert units.shape == (3, 3, 576) and units.dtype == np.uint8
    element = prepacked_element if form == "prepacked" else tiled_element
    for row in range(48):
        for column in range(k):
            got = element(units[row // 16, column // 64], row % 16, column % 64)
            want = (codes[row, column], scales[row, column // 16]) if row < n else (0, 0)
            assert got == want, (row, column)


@given(case=whole_units)
def test_prepacked_and_back(case: LayerCase) -> None:
    units = pack(case, "prepacked")
    b, scales = _core.unpack_weight(units, case.out_features, case.in_features, 16, "prepacked")
    assert (b == case.b).all() and (scales == case.scales).all()


@given(case=tileable)
def test_tiled_and_back(case: LayerCase) -> None:
    units = pack(case, "tiled")
    b, scales = _core.unpack_weight(units, case.out_features, case.in_features, case.block_size, "tiled")
    assert (b == case.b).all() and (scales == case.scales).all()


def test_strided_arrays_are_packed_as_they_read() -> None:
    b, scales = reference.make(32, 128, 3)
    wide = np.repeat(b, 2, axis=1)
    assert (
        _core.pack_weight(wide[:, ::2], scales, 32, 128, 16, "tiled")
        == _core.pack_weight(b, scales, 32, 128, 16, "tiled")
    ).all()


def test_what_is_refused() -> None:
    b, scales = reference.make(16, 64, 3)
    good = (b, scales, 16, 64, 16)
    for arguments, message in [
        ((*good, "canonical"), "form"),
        ((*good, "wgmma"), "form"),
        ((b, scales, 16, 64, 0, "tiled"), "block_size"),
        ((b, scales, 16, 62, 16, "prepacked"), "K = 62"),
        ((b, scales, 16, 64, 32, "prepacked"), "block_size 32"),
        ((b, scales, 16, 64, 7, "tiled"), "block_size"),
        ((b[:, 1:], scales, 16, 64, 16, "tiled"), "b: expected uint8"),
        ((b, scales[1:], 16, 64, 16, "tiled"), "scales: expected uint8"),
        ((b.astype(np.int16), scales, 16, 64, 16, "tiled"), "b: expected uint8"),
    ]:
        with pytest.raises(ValueError, match=message):
            _core.pack_weight(*arguments)
    units = _core.pack_weight(*good, "tiled")
    with pytest.raises(ValueError, match="weight: expected uint8"):
        _core.unpack_weight(units[:, :, 1:], 16, 64, 16, "tiled")
    with pytest.raises(ValueError, match="weight: expected uint8"):
        _core.unpack_weight(units, 17, 64, 16, "tiled")


def test_the_form_for_a_platform() -> None:
    for platform, k, block_size, nan, want in [
        ("cpu", 130, 16, False, "tiled"),
        ("cpu", 130, 16, True, "tiled"),
        ("cpu", 128, 48, False, "tiled"),
        ("cpu", 12, 13, False, "tiled"),
        ("cpu", 128, 8, False, "canonical"),
        ("gpu", 130, 16, False, "canonical"),
        ("gpu", 128, 16, True, "canonical"),
        ("gpu", 128, 32, False, "canonical"),
    ]:
        assert _core.weight_form(platform, k, block_size, nan) == want

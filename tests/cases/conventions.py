"""How the cases are run: on every path and instruction set of the host, in every type of x, at M = 1, 8, 9, 64 by
repeating the rows (paths differ by M). Each case is named by its id.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import fp4linear
from tests import reference
from tests.backends import each_backend
from tests.strategies import DTYPES
from tests.tolerance import assert_within_contract

ROW_COUNTS = [1, 8, 9, 64]

each_m = pytest.mark.parametrize("m", ROW_COUNTS)
each_dtype = pytest.mark.parametrize("dtype", sorted(DTYPES))
each_16_bit_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


def each_run(test: Any) -> Any:
    """Every backend, type of x and M."""
    return each_backend(each_dtype(each_m(test)))


def rows(x: NDArray, m: int) -> NDArray:
    """x [R, K] or [K] with its rows repeated to m of them."""
    x = np.atleast_2d(x)
    return x[np.arange(m) % len(x)]


def equal(y: NDArray, want: Any) -> None:
    """The same numbers in every row; +0 equals -0, NaN equals nothing."""
    got = np.asarray(y).astype(np.float64)
    assert (got == np.broadcast_to(np.asarray(want, np.float64), got.shape)).all(), f"{got}\nwanted\n{want}"


def check(layer: fp4linear.Fp4Linear, x: NDArray, b: NDArray, scales: NDArray, scale2: Any) -> NDArray:
    """Forward within the contract."""
    y = layer.forward(x)
    assert_within_contract(y, reference.linear(np.array(x), b, scales, scale2))
    return y


def published(value: float, number: float, digits: int = 6) -> None:
    """A float64 value rounds to the published number."""
    assert abs(value - number) <= 0.51 * 10.0**-digits, f"{value!r} is not {number}"


def write_safetensors(path: Path, tensors: dict[str, tuple[str, NDArray]]) -> None:
    """A safetensors file, by its specification: length, JSON header, bytes. tensors: name -> (type, array)."""
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        held = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(held)]}
        data += held
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)

"""E. Types."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fp4linear
from tests import reference
from tests.backends import Backend, each_backend
from tests.cases.conventions import check, each_dtype, each_m, each_run, equal
from tests.strategies import DTYPES
from tests.tolerance import assert_same_bits

B, SCALES = reference.make(20, 64, 5)
X = reference.x_of(12, 64, 6)

WRONG: dict[str, Any] = {
    "float64": X.astype(np.float64),
    "float8_e4m3fn": X.astype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": X.astype(ml_dtypes.float8_e5m2),
    "int8": X.astype(np.int8),
    "bool": X.astype(bool),
    "complex64": X.astype(np.complex64),
    "uint16": X.view(np.uint16),
}


@pytest.mark.parametrize("kind", list(WRONG))
@each_m
def test_E1_wrong_type_of_x(kind: str, m: int) -> None:
    layer = fp4linear.Fp4Linear(B, SCALES, 1.0)
    with pytest.raises(TypeError, match=r"\bx\b.*float16.*bfloat16"):
        layer.forward(WRONG[kind][np.arange(m) % 12])
    check(layer, X, B, SCALES, 1.0)


def test_E1_a_list_is_no_array() -> None:
    with pytest.raises(TypeError, match=r"\bx\b.*list"):
        fp4linear.Fp4Linear(B, SCALES, 1.0).forward(X.tolist())


@each_m
@each_backend
def test_E1_float32_gives_float32(backend: Backend, m: int) -> None:
    y = check(backend.layer(B, SCALES, 1.0), X[np.arange(m) % 12].astype(np.float32), B, SCALES, 1.0)
    assert y.dtype == np.float32


@pytest.mark.parametrize("m", [12, 8, 64])
@each_dtype
@each_backend
def test_E2_bad_rows_stay_alone(backend: Backend, dtype: str, m: int) -> None:
    layer = backend.layer(B, SCALES, 1.0)
    x = X[np.arange(m) % 12].astype(DTYPES[dtype])
    clean = layer.forward(x)
    x[5, 3], x[7, 0] = np.nan, np.inf
    y = layer.forward(x)
    assert np.isnan(y[5].astype(np.float64)).all()
    assert not np.isfinite(y[7].astype(np.float64)).any()
    others = [row for row in range(m) if row not in (5, 7)]
    assert_same_bits(y[others], clean[others])


@each_run
def test_E5_output(backend: Backend, dtype: str, m: int) -> None:
    layer = backend.layer(B, SCALES, 1.0)
    x = X[np.arange(m) % 12].astype(DTYPES[dtype])
    y = layer.forward(x)
    assert type(y) is np.ndarray and y.dtype == x.dtype and y.flags.c_contiguous and y.flags.writeable
    assert not np.shares_memory(y, x)
    kept = y.copy()
    layer.forward(-2 * x)
    assert_same_bits(y, kept)
    y[...] = 0  # the caller's own: scratch of the layer it is not
    assert_same_bits(layer.forward(x), kept)


@pytest.mark.torch
def test_E5_output_of_torch() -> None:
    torch = pytest.importorskip("torch")
    layer = fp4linear.Fp4Linear(B, SCALES, 1.0)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = torch.from_numpy(X).to(dtype)
        with torch.autocast("cpu", dtype=torch.float16):
            y = layer.forward(x)
        assert type(y) is torch.Tensor and y.dtype == dtype and y.is_contiguous()
        kept = y.clone()
        layer.forward(-2 * x)
        assert torch.equal(y, kept)


@pytest.mark.jax
def test_E5_output_of_jax() -> None:
    jax = pytest.importorskip("jax")
    layer = fp4linear.Fp4Linear(B, SCALES, 1.0)
    for dtype in DTYPES.values():
        x = jax.numpy.asarray(X.astype(dtype))
        y = layer.forward(x)
        assert isinstance(y, jax.Array) and y.dtype == dtype and y.devices() == x.devices()


@each_m
@each_backend
def test_E6_numpy_bf16(backend: Backend, m: int) -> None:
    x = X[np.arange(m) % 12].astype(ml_dtypes.bfloat16)
    with pytest.raises(BufferError):
        x.__dlpack__()
    y = check(backend.layer(B, SCALES, 1.0), x, B, SCALES, 1.0)
    assert y.dtype == ml_dtypes.bfloat16
    ones = backend.layer(np.full((3, 16), 0x22, np.uint8), np.full((3, 2), 0x38, np.uint8), 1.0)
    equal(ones.forward(np.ones((m, 32), ml_dtypes.bfloat16)), 32)

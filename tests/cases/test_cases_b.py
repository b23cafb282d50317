"""B. Global scale and range."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fp4linear
from tests.backends import Backend, each_backend
from tests.cases.conventions import each_16_bit_dtype, each_dtype, each_m, each_run, equal, write_safetensors
from tests.strategies import DTYPES
from tests.tolerance import assert_same_bits

ONE = np.full((1, 8), 0x22, np.uint8), np.full((1, 1), 0x38, np.uint8)  # w = 1, K = 16


@each_run
@pytest.mark.parametrize("scale2", [
    0.5, np.float32(0.5), np.float64(0.5), np.float16(0.5), np.array(0.5), np.array(0.5, np.float32),
    np.array([0.5], np.float32), np.array([0.5]),
], ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}-{getattr(value, 'shape', '')}")  # fmt: skip
def test_B1_forms_of_scale2(backend: Backend, dtype: str, m: int, scale2: Any) -> None:
    equal(backend.layer(*ONE, scale2).forward(np.ones((m, 16), DTYPES[dtype])), 8)


@each_run
@pytest.mark.parametrize("scale2", [1, np.int64(1), np.uint8(1)], ids=repr)
def test_B1_an_integer_scale2(backend: Backend, dtype: str, m: int, scale2: Any) -> None:
    equal(backend.layer(*ONE, scale2).forward(np.ones((m, 16), DTYPES[dtype])), 16)


@each_run
def test_B1_one_factor_a_row(backend: Backend, dtype: str, m: int) -> None:
    b, scales = np.full((3, 8), 0x22, np.uint8), np.full((3, 1), 0x38, np.uint8)
    layer = backend.layer(b, scales, np.array([0.5, -1, 2], np.float32))
    equal(layer.forward(np.ones((m, 16), DTYPES[dtype])), [8, -16, 32])


@pytest.mark.parametrize("scale2", [np.ones(2, np.float32), np.ones((1, 2), np.float32), np.ones(0, np.float32)])
def test_B1_a_shape_that_is_neither_one_nor_a_row_each(scale2: Any) -> None:
    b, scales = np.full((3, 8), 0x22, np.uint8), np.full((3, 1), 0x38, np.uint8)
    with pytest.raises(ValueError, match="scale2"):
        fp4linear.Fp4Linear(b, scales, scale2)


@pytest.mark.parametrize("scale2", ["1.0", None])
def test_B1_no_number(scale2: Any) -> None:
    with pytest.raises(TypeError, match="scale2"):
        fp4linear.Fp4Linear(*ONE, scale2)


@pytest.mark.torch
def test_B1_torch_scalars() -> None:
    torch = pytest.importorskip("torch")
    for scale2 in (torch.tensor(0.5), torch.tensor([0.5]), torch.tensor(0.5, dtype=torch.float64)):
        equal(fp4linear.Fp4Linear(*ONE, scale2).forward(np.ones((1, 16), np.float16)), 8)


@pytest.mark.jax
def test_B1_jax_scalars() -> None:
    jnp = pytest.importorskip("jax.numpy")
    for scale2 in (jnp.float32(0.5), jnp.array([0.5])):
        equal(fp4linear.Fp4Linear(*ONE, scale2).forward(np.ones((1, 16), np.float16)), 8)


@each_run
def test_B3_an_fp32_sum_above_65504_with_a_result_in_range(backend: Backend, dtype: str, m: int) -> None:
    b, scales = np.full((3, 2048), 0x77, np.uint8), np.full((3, 256), 0x7E, np.uint8)
    equal(backend.layer(b, scales, 2.0**-12).forward(np.ones((m, 4096), DTYPES[dtype])), 2688)


@each_backend
@each_m
def test_B4_scale2_stays_fp32(backend: Backend, m: int) -> None:
    b, scales = np.full((3, 2048), 0x77, np.uint8), np.full((3, 256), 0x7E, np.uint8)
    equal(backend.layer(b, scales, np.float32(1 / 3584)).forward(np.ones((m, 4096), np.float16)), 3072)


@each_16_bit_dtype
@each_m
@pytest.mark.parametrize("source", ["file", "mapping"])
def test_B6_compressed_tensors_divisor(tmp_path: Path, source: str, dtype: str, m: int) -> None:
    tensors = {
        "p.weight_packed": ("U8", ONE[0]),
        "p.weight_scale": ("F8_E4M3", ONE[1]),
        "p.weight_global_scale": ("F32", np.array([3584.0], np.float32)),
    }
    write_safetensors(tmp_path / "model.safetensors", tensors)
    held = tmp_path / "model.safetensors" if source == "file" else {name: array for name, (_, array) in tensors.items()}
    y = fp4linear.load(held, "p").forward(np.ones((m, 16), DTYPES[dtype]))
    want = np.array(np.float32(16) * np.float32(1 / 3584)).astype(DTYPES[dtype])
    assert abs(float(want) - {"float16": 0.004463, "bfloat16": 0.00445557}[dtype]) < 1e-6
    assert_same_bits(y, np.broadcast_to(want, (m, 1)))


@each_run
def test_B6_the_divisor_given_as_a_factor_is_legal(backend: Backend, dtype: str, m: int) -> None:
    y = backend.layer(*ONE, 3584.0).forward(np.ones((m, 16), DTYPES[dtype]))
    equal(y, 57344)


@pytest.mark.parametrize("scale2", [float("nan"), float("inf"), float("-inf")])
def test_B7_scale2_that_is_not_finite(scale2: float) -> None:
    for form in (scale2, np.float32(scale2), np.array([scale2], np.float32)):
        with pytest.raises(ValueError, match=r"scale2.*finite"):
            fp4linear.Fp4Linear(*ONE, form)


@each_run
def test_B7_zero_and_negative_scale2(backend: Backend, dtype: str, m: int) -> None:
    x = np.ones((m, 16), DTYPES[dtype])
    for zero in (0.0, -0.0, 0):
        equal(backend.layer(*ONE, zero).forward(x), 0)
    equal(backend.layer(*ONE, -0.5).forward(x), -8)


@pytest.mark.parametrize("stored", [0.0, float("nan"), float("inf")])
def test_B7_a_stored_divisor_of_zero(tmp_path: Path, stored: float) -> None:
    """Never 1/0 = inf silently."""
    write_safetensors(tmp_path / "model.safetensors", {
        "p.weight_packed": ("U8", ONE[0]),
        "p.weight_scale": ("F8_E4M3", ONE[1]),
        "p.weight_global_scale": ("F32", np.array([stored], np.float32)),
    })  # fmt: skip
    with pytest.raises(ValueError, match="weight_global_scale"):
        fp4linear.load(tmp_path / "model.safetensors", "p")


@pytest.mark.gpu
@each_dtype
def test_B1_a_cuda_scalar(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    layer = fp4linear.Fp4Linear(*ONE, torch.tensor([0.5], device="cuda"), device="cuda")
    if dtype != "float32":
        y = layer.forward(torch.ones(1, 16, dtype=getattr(torch, dtype), device="cuda"))
        assert (y == 8).all()

"""D. Strides and alignment."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

import fp4linear
from tests import reference
from tests.backends import Backend, each_backend
from tests.cases.conventions import check, each_dtype, each_m, published
from tests.strategies import DTYPES
from tests.tolerance import assert_same_bits, assert_within_contract

B, SCALES = reference.make(24, 64, 41)
BASE = np.random.default_rng(42).standard_normal((6, 140)).astype(np.float16)
XT = np.random.default_rng(43).standard_normal((64, 6)).astype(np.float16)
BUFFER = np.random.default_rng(45).standard_normal(385).astype(np.float16)


def check_view(backend: Backend, x: NDArray) -> None:
    """Within the contract, and bit-equal to the contiguous copy."""
    layer = backend.layer(B, SCALES, 0.125)
    assert_same_bits(check(layer, x, B, SCALES, 0.125), layer.forward(np.ascontiguousarray(x)))


def numbers(x: NDArray, first: float, last: float) -> None:
    y = reference.linear(x, B, SCALES, 0.125).y
    published(y[0, 0], first)
    published(y[5, 23], last)


@each_dtype
@each_backend
def test_D1_strided_x(backend: Backend, dtype: str) -> None:
    numbers(BASE[:, 0:128:2], 3.976025, 2.224850)
    numbers(BASE[:, 3:67], 1.977467, -5.797368)
    base = BASE.astype(DTYPES[dtype])
    check_view(backend, base[:, 0:128:2])
    check_view(backend, base[:, 3:67])
    for m in (1, 8, 9, 64):
        check_view(backend, np.tile(base, (11, 1))[:m, 3:67])


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_D1_strided_x_of_torch(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    layer = fp4linear.Fp4Linear(B, SCALES, 0.125)
    base = torch.from_numpy(BASE).to(getattr(torch, dtype))
    for x in (base[:, 0:128:2], base[:, 3:67]):
        assert not x.is_contiguous()
        y = layer.forward(x)
        assert torch.equal(y, layer.forward(x.contiguous()))
        if dtype == "float16":
            assert_within_contract(y.numpy(), reference.linear(x.numpy(), B, SCALES, 0.125))


@each_dtype
@each_backend
def test_D2_transposed_x(backend: Backend, dtype: str) -> None:
    numbers(XT.T, -3.968730, 1.959264)
    check_view(backend, XT.astype(DTYPES[dtype]).T)


@each_dtype
@each_backend
def test_D3_size_1_and_expanded_dims(backend: Backend, dtype: str) -> None:
    x = BASE[:, :64].astype(DTYPES[dtype]).copy()
    size = x.dtype.itemsize
    strided = np.lib.stride_tricks.as_strided
    layer = backend.layer(B, SCALES, 0.125)
    one = layer.forward(x[:1])
    for strides in ((7 * size, size), (0, size), (7, size)):
        assert_same_bits(layer.forward(strided(x, (1, 64), strides)), one)
    middle = strided(x, (6, 1, 64), (64 * size, 3 * size, size))
    assert_same_bits(layer.forward(middle), layer.forward(x)[:, None])
    expanded = layer.forward(strided(x, (6, 64), (0, size)))
    assert_same_bits(expanded, layer.forward(np.repeat(x[:1], 6, axis=0)))
    assert_same_bits(expanded, np.repeat(expanded[:1], 6, axis=0))
    one_column = strided(x, (6, 64), (64 * size, 0))
    assert_same_bits(layer.forward(one_column), layer.forward(np.repeat(x[:, :1], 64, axis=1)))


@each_dtype
@each_backend
def test_D5_offset_storage(backend: Backend, dtype: str) -> None:
    numbers(BUFFER[1:].reshape(6, 64), -5.783011, 4.126711)
    held = np.concatenate([BUFFER, BUFFER[:7]]).astype(DTYPES[dtype])
    for offset in range(1, 8):
        check_view(backend, held[offset : offset + 384].reshape(6, 64))


@each_dtype
@each_m
@each_backend
def test_D5_odd_address(backend: Backend, dtype: str, m: int) -> None:
    x = reference.x_of(m, 64, 46).astype(DTYPES[dtype])
    for offset in (1, 3, 5):
        held = (
            np.frombuffer(b"\xff" * offset + x.view(np.uint8).tobytes(), np.uint8)[offset:].view(x.dtype).reshape(m, 64)
        )
        assert held.__array_interface__["data"][0] % 2 == 1
        check_view(backend, held)


@each_dtype
@each_m
@each_backend
def test_D7_non_contiguous_b_and_scales(backend: Backend, dtype: str, m: int) -> None:
    b, scales = reference.make(24, 128, 48)
    x = reference.x_of(9, 64, 49)
    y = reference.linear(x, b[:, :32], scales[:, :4], 0.125).y
    published(y[0, 0], 1.381012)
    published(y[8, 23], 1.023071)
    x = x[np.arange(m) % 9].astype(DTYPES[dtype])
    layer = backend.layer(b[:, :32], scales[:, :4], 0.125)
    y = check(layer, x, b[:, :32], scales[:, :4], 0.125)
    for other in (
        backend.layer(b[:, :32], np.asfortranarray(scales[:, :4]), 0.125),
        backend.layer(b[:, :32].T.copy().T, scales[:, :4].copy(), 0.125),
        backend.layer(np.asfortranarray(b[:, :32]), scales[:, :4].T.copy().T, 0.125),
    ):
        assert_same_bits(other.forward(x), y)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_D2_transposed_x_right_after_an_unfinished_producer(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    layer = fp4linear.Fp4Linear(B, SCALES, 0.125, device="cuda")
    values = torch.from_numpy(XT).to("cuda", getattr(torch, dtype))
    xt = torch.full_like(values, 7)
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    xt.copy_(values)
    y = layer.forward(xt.t())
    assert torch.equal(y, layer.forward(values.t().contiguous()))

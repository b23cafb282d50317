"""F. DLPack and frameworks."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fp4linear
from tests import reference
from tests.backends import Backend, each_backend
from tests.cases.conventions import check, each_dtype, each_m, equal
from tests.dlpack_producer import CUDA, CUDA_HOST, CUDA_MANAGED, Producer, values_of
from tests.strategies import DTYPES
from tests.tolerance import assert_same_bits

B, SCALES = reference.make(20, 64, 5)
ONES = np.full((3, 16), 0x22, np.uint8), np.full((3, 2), 0x38, np.uint8)


@each_dtype
@each_m
def test_F1_read_only_inputs(tmp_path: Path, dtype: str, m: int) -> None:
    x = reference.x_of(m, 64, 7).astype(DTYPES[dtype])
    x.flags.writeable = False
    B.tofile(tmp_path / "b")
    mapped = np.memmap(tmp_path / "b", np.uint8, "r", shape=B.shape)
    from_bytes = np.frombuffer(SCALES.tobytes(), np.uint8).reshape(SCALES.shape)
    assert not mapped.flags.writeable and not from_bytes.flags.writeable
    kept = x.copy()
    check(fp4linear.Fp4Linear(mapped, from_bytes, 1.0), x, B, SCALES, 1.0)
    assert_same_bits(x, kept)
    assert (tmp_path / "b").read_bytes() == B.tobytes()


@pytest.mark.jax
def test_F1_jax_arrays_are_only_read() -> None:
    jnp = pytest.importorskip("jax.numpy")
    b, scales, x = jnp.asarray(B), jnp.asarray(SCALES), jnp.asarray(reference.x_of(9, 64, 7))
    y = fp4linear.Fp4Linear(b, scales, 1.0).forward(x)
    assert_same_bits(np.asarray(y), fp4linear.Fp4Linear(B, SCALES, 1.0).forward(reference.x_of(9, 64, 7)))
    assert_same_bits(np.asarray(b), B)
    assert_same_bits(np.asarray(scales), SCALES)
    assert_same_bits(np.asarray(x), reference.x_of(9, 64, 7))


@each_m
@each_backend
def test_F2_bf16_of_numpy_and_of_any_producer(backend: Backend, m: int) -> None:
    layer = backend.layer(*ONES, 1.0)
    x = np.ones((m, 32), ml_dtypes.bfloat16)
    for given in (x, Producer(x, versioned=False), Producer(x, versioned=True)):
        y = values_of(layer.forward(given))
        assert y.dtype == ml_dtypes.bfloat16
        equal(y, 32)


@pytest.mark.torch
@each_m
def test_F2_bf16_of_torch(m: int) -> None:
    torch = pytest.importorskip("torch")
    y = fp4linear.Fp4Linear(*ONES, 1.0).forward(torch.ones(m, 32, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16 and (y == 32).all()


@pytest.mark.jax
@each_m
def test_F2_bf16_of_jax(m: int) -> None:
    jnp = pytest.importorskip("jax.numpy")
    y = fp4linear.Fp4Linear(*ONES, 1.0).forward(jnp.ones((m, 32), jnp.bfloat16))
    assert y.dtype == jnp.bfloat16 and (y == 32).all()


@each_dtype
@pytest.mark.parametrize("versioned", [False, True])
def test_F4_null_strides(versioned: bool, dtype: str) -> None:
    x = reference.x_of(3, 64, 8).astype(DTYPES[dtype])
    layer = fp4linear.Fp4Linear(B, SCALES, 1.0)
    y = layer.forward(Producer(x, versioned=versioned, null_strides=True))
    assert_same_bits(values_of(y), layer.forward(x))


@pytest.mark.parametrize("versioned", [False, True])
@pytest.mark.parametrize("options", [{"ndim": 0}, {"ndim": 9}, {"dtype": (2, 16, 2)}, {"device": (CUDA, 99)}], ids=str)
def test_F4_tensors_that_do_not_fit(versioned: bool, options: dict[str, Any]) -> None:
    layer = fp4linear.Fp4Linear(B, SCALES, 1.0)
    x = reference.x_of(3, 64, 8)
    producer = Producer(x, versioned=versioned, null_strides=True, **options)
    with pytest.raises((ValueError, TypeError, BufferError), match=r"\bx\b"):
        layer.forward(producer)
    gc.collect()
    assert producer.deletions in ([], [1])
    check(layer, x, B, SCALES, 1.0)


@pytest.mark.parametrize("index", [0, 1])
def test_F6_a_cuda_x_with_host_weights(index: int) -> None:
    layer = fp4linear.Fp4Linear(B, SCALES, 1.0)
    with pytest.raises((ValueError, BufferError), match=rf"\bx\b.*cuda:{index}"):
        layer.forward(Producer(reference.x_of(3, 64, 8), device=(CUDA, index)))
    check(layer, reference.x_of(3, 64, 8), B, SCALES, 1.0)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7"])
def test_F6_a_cuda_request_without_a_gpu(device: str) -> None:
    if fp4linear._core.cuda_info()["devices"]:
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=rf"device.*{device}"):
        fp4linear.Fp4Linear(B, SCALES, 1.0, device=device)


def test_F6_pinned_and_managed_memory() -> None:
    layer = fp4linear.Fp4Linear(B, SCALES, 1.0)
    x = reference.x_of(3, 64, 8)
    assert_same_bits(values_of(layer.forward(Producer(x, device=(CUDA_HOST, 0)))), layer.forward(x))
    with pytest.raises((ValueError, BufferError), match=r"\bx\b.*managed"):
        layer.forward(Producer(x, device=(CUDA_MANAGED, 0)))


@each_backend
def test_F7a_built_from_temporaries(backend: Backend) -> None:
    b, scales = reference.make(200, 512, 9)
    layer = backend.layer(b.copy(), scales.copy(), np.full(200, 0.5, np.float32), np.ones(200, np.float16))
    rubbish = [np.full(size, 0xEE, np.uint8) for size in (b.size, scales.size, 800, 400) for _ in range(20)]
    x = reference.x_of(9, 512, 10)
    want = reference.linear(x, b, scales, 0.5, np.ones(200))
    from tests.tolerance import assert_within_contract

    assert_within_contract(layer.forward(x), want)
    del rubbish


@pytest.mark.parametrize("versioned", [False, True])
def test_F7b_the_deleter_runs_once(versioned: bool) -> None:
    layer = fp4linear.Fp4Linear(B, SCALES, 1.0)
    good = Producer(reference.x_of(3, 64, 8), versioned=versioned)
    y = layer.forward(good)
    assert good.deletions == [1]
    bad = [
        Producer(reference.x_of(3, 62, 8), versioned=versioned),
        Producer(reference.x_of(3, 64, 8).astype(np.float64), versioned=versioned),
        Producer(reference.x_of(3, 64, 8), versioned=versioned, ndim=9),
    ]
    for producer in bad:
        with pytest.raises((ValueError, TypeError)):
            layer.forward(producer)
    weights = [Producer(B, versioned=versioned), Producer(SCALES, versioned=versioned)]
    made = fp4linear.Fp4Linear(*weights, 1.0)
    wrong = [Producer(B, versioned=versioned), Producer(SCALES[:, :1].copy(), versioned=versioned)]
    with pytest.raises(ValueError):
        fp4linear.Fp4Linear(*wrong, 1.0)
    del y, made
    gc.collect()
    for producer in (good, *bad, *weights, *wrong):
        assert producer.deletions == [1]


@pytest.mark.parametrize("versioned", [False, True])
def test_F7c_a_capsule_used_twice(versioned: bool) -> None:
    layer = fp4linear.Fp4Linear(B, SCALES, 1.0)
    producer = Producer(reference.x_of(3, 64, 8))
    capsule = producer.capsule(versioned)
    layer.forward(capsule)
    for _ in range(2):
        with pytest.raises(BufferError, match=r"\bx\b"):
            layer.forward(capsule)
    assert producer.deletions == [1]


@pytest.mark.gpu
def test_F6_devices_that_differ() -> None:
    torch = pytest.importorskip("torch")
    on_gpu = fp4linear.Fp4Linear(B, SCALES, 1.0, device="cuda:0")
    x = torch.from_numpy(reference.x_of(3, 64, 8))
    with pytest.raises((ValueError, BufferError), match=r"\bx\b.*cpu"):
        on_gpu.forward(x)
    with pytest.raises((ValueError, BufferError), match=r"\bx\b.*cuda:0"):
        fp4linear.Fp4Linear(B, SCALES, 1.0, device="cpu").forward(x.cuda())
    if torch.cuda.device_count() > 1:
        with pytest.raises((ValueError, BufferError), match=r"\bx\b.*cuda:1"):
            on_gpu.forward(x.to("cuda:1"))
    assert torch.equal(on_gpu.forward(x.cuda()), on_gpu.forward(x.cuda()))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 64])
def test_F7d_x_dropped_right_after_an_asynchronous_forward(m: int) -> None:
    torch = pytest.importorskip("torch")
    b, scales = reference.make(4096, 4096, 9)
    layer = fp4linear.Fp4Linear(b, scales, 2.0**-10, device="cuda")
    values = torch.from_numpy(reference.x_of(m, 4096, 10)).cuda()
    want = layer.forward(values)
    for _ in range(20):
        x = values.clone()
        torch.cuda._sleep(10_000_000)
        y = layer.forward(x)
        del x
        torch.full((m, 4096), float("nan"), dtype=torch.float16, device="cuda")
        assert torch.equal(y, want)


@pytest.mark.gpu
@each_m
def test_F2_bf16_on_the_gpu(m: int) -> None:
    torch = pytest.importorskip("torch")
    y = fp4linear.Fp4Linear(*ONES, 1.0, device="cuda").forward(torch.ones(m, 32, dtype=torch.bfloat16, device="cuda"))
    assert y.dtype == torch.bfloat16 and y.is_cuda and (y == 32).all()

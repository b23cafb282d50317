"""G. GPU behaviour."""

from __future__ import annotations

import numpy as np
import pytest

import fp4linear
from tests import reference

pytestmark = pytest.mark.gpu

SPIN = 100_000_000  # clock cycles, about 50 ms


@pytest.fixture
def torch() -> object:
    return pytest.importorskip("torch")


@pytest.mark.parametrize("m", [1, 64])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_G1_stream_order(torch, dtype: str, m: int) -> None:  # type: ignore[no-untyped-def]
    b, scales = reference.make(64, 256, 1)
    layer = fp4linear.Fp4Linear(b, scales, 2.0**-6, device="cuda")
    x = torch.full((m, 256), 7.0, dtype=getattr(torch, dtype), device="cuda")
    want = layer.forward(torch.ones_like(x))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SPIN)
        x.fill_(1)
        y = layer.forward(x)
    side.synchronize()
    assert torch.equal(y, want)
    x.fill_(7)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):  # the same, the stream given by hand
        torch.cuda._sleep(SPIN)
        x.fill_(1)
        out = torch.full((m, 64), float("nan"), dtype=x.dtype, device="cuda")
        layer.forward(x, out=out, stream=side.cuda_stream)
    side.synchronize()
    assert torch.equal(out, want)


def test_G1_stream_order_of_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    b, scales = reference.make(64, 256, 1)
    layer = fp4linear.Fp4Linear(b, scales, 2.0**-6, device="cuda")
    want = layer.forward(cupy.ones((1, 256), cupy.float16)).get()
    spin = cupy.RawKernel(
        r'extern "C" __global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n) {} }',
        "spin",
    )
    for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.ptds):
        x = cupy.full((1, 256), 7, cupy.float16)
        cupy.cuda.Device().synchronize()
        with stream:
            spin((1,), (1,), (SPIN,))
            x.fill(1)
            y = layer.forward(x)
            stream.synchronize()
            assert (y.get() == want).all()


def test_G1_output_of_a_jitted_function() -> None:
    jax = pytest.importorskip("jax")
    b, scales = reference.make(64, 256, 1)
    layer = fp4linear.Fp4Linear(b, scales, 2.0**-6, device="cuda")
    big = jax.numpy.ones((4096, 4096), jax.numpy.float32)
    make_x = jax.jit(lambda big: ((big @ big @ big)[:1, :256] * 0 + 1).astype(jax.numpy.float16))
    y = layer.forward(make_x(big))
    want = fp4linear.Fp4Linear(b, scales, 2.0**-6, device="cpu").forward(np.ones((1, 256), np.float16))
    assert np.abs(np.asarray(y, np.float64) - want).max() <= 2.0**-10 * np.abs(want).max()


@pytest.mark.parametrize("m", [1, 64])
def test_G2_first_call_inside_a_capture(torch, m: int) -> None:  # type: ignore[no-untyped-def]
    b, scales = reference.make(256, 1024, 2)
    layer = fp4linear.Fp4Linear(b, scales, 2.0**-8, device="cuda")
    eager = fp4linear.Fp4Linear(b, scales, 2.0**-8, device="cuda")
    x = torch.zeros(m, 1024, dtype=torch.float16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer.forward(x)
    for seed in range(3):
        values = torch.from_numpy(reference.x_of(m, 1024, seed)).cuda()
        x.copy_(values)
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, eager.forward(values))


def test_G3_second_gpu(torch) -> None:  # type: ignore[no-untyped-def]
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    b, scales = reference.make(64, 256, 3)
    torch.cuda.set_device(0)
    layers = [fp4linear.Fp4Linear(b, scales, 2.0**-6, device=f"cuda:{index}") for index in (0, 1)]
    x = torch.from_numpy(reference.x_of(9, 256, 4))
    want = None
    for _ in range(3):
        for index, layer in enumerate(layers):
            y = layer.forward(x.to(f"cuda:{index}"))
            assert y.device == torch.device("cuda", index) and torch.cuda.current_device() == 0
            want = y.cpu() if want is None else want
            assert torch.equal(y.cpu(), want)


def test_G6_after_an_error(torch) -> None:  # type: ignore[no-untyped-def]
    b, scales = reference.make(48, 96, 7)
    layer = fp4linear.Fp4Linear(b, scales, 2.0**-6, device="cuda")
    values = reference.x_of(257, 96, 1007)[:9]
    x = torch.from_numpy(values).cuda()
    with pytest.raises(ValueError, match=r"\bx\b"):
        layer.forward(x[:, :48].contiguous())
    with pytest.raises((MemoryError, RuntimeError)):
        layer.forward(x[:1].expand(2**36, 96))
    y = layer.forward(x).cpu().numpy()
    torch.cuda.synchronize()
    want = reference.linear(values, b, scales, 2.0**-6)
    assert (np.abs(y - want.y) <= 2.0**-11 * np.abs(want.y) + 2.0**-15 * want.magnitude).all()

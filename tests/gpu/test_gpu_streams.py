"""Order on a GPU: behind what makes x, before what reads y, inside CUDA graphs, beside errors and other threads."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

import fp4linear
from tests import reference
from tests.child import run_child
from tests.gpu.device import PATHS, SPIN, TORCH_DTYPES, each_dtype, poisoned, to_device, to_host, torch
from tests.strategies import LayerCase
from tests.tolerance import assert_within_contract

pytestmark = pytest.mark.gpu

N, K = 64, 256
CASE = LayerCase(*reference.make(N, K, 1), scale2=2.0**-6)
each_m = pytest.mark.parametrize("m", [1, 8, 64])


def layer_on_gpu(case: LayerCase = CASE, path: str = "auto") -> fp4linear.Fp4Linear:
    return fp4linear.Fp4Linear(case.b, case.scales, case.scale2, case.bias, device="cuda", path=path)


# G1. x is written behind a spinning kernel: whoever does not wait for it sees the poison.


@each_dtype
@each_m
@pytest.mark.parametrize("view", ["contiguous", "strided"])
def test_behind_the_work_of_torchs_current_stream(view: str, m: int, dtype: str) -> None:
    layer = layer_on_gpu()
    held = torch.full((m, K if view == "contiguous" else 2 * K), 7.0, dtype=TORCH_DTYPES[dtype], device="cuda")
    x = held if view == "contiguous" else held[:, ::2]
    layer.forward(x)  # the driver loads a kernel at its first use, and waits for the GPU then
    want = layer.forward(torch.ones_like(x, memory_format=torch.contiguous_format))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SPIN)
        held.fill_(1)
        y = layer.forward(x)
        copy = y.clone()
    assert not side.query(), "the call waited for the GPU"
    side.synchronize()
    assert torch.equal(y, want) and torch.equal(copy, want)


@each_m
@pytest.mark.parametrize("form", ["int", "torch", "external", "cupy", "protocol"])
@pytest.mark.parametrize("view", ["contiguous", "strided"])
def test_the_stream_argument(view: str, form: str, m: int) -> None:
    layer = layer_on_gpu()
    held = torch.full((m, K if view == "contiguous" else 2 * K), 7.0, dtype=torch.float16, device="cuda")
    x = held if view == "contiguous" else held[:, ::2]
    want = layer.forward(torch.ones_like(x, memory_format=torch.contiguous_format))
    out = poisoned((m, N), x.dtype)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()

    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, side.cuda_stream

    if form == "cupy":
        stream = pytest.importorskip("cupy").cuda.ExternalStream(side.cuda_stream)
        if not hasattr(stream, "__cuda_stream__"):
            pytest.skip("this CuPy's streams lack the protocol")
    else:
        stream = {
            "int": side.cuda_stream,
            "torch": side,
            "external": torch.cuda.ExternalStream(side.cuda_stream),
            "protocol": Protocol(),
        }[form]
    with torch.cuda.stream(side):
        torch.cuda._sleep(SPIN)
        held.fill_(1)
    assert layer.forward(x, out=out, stream=stream) is out
    assert not side.query()
    side.synchronize()
    assert torch.equal(out, want)


def test_the_default_stream_by_number() -> None:
    """0 and 1 are the legacy default stream, 2 the thread's own."""
    layer = layer_on_gpu()
    x = to_device(reference.x_of(3, K, 1))
    want = layer.forward(x)
    torch.cuda.synchronize()
    for stream in (0, 1, 2):
        out = poisoned((3, N), x.dtype)
        torch.cuda.synchronize()
        layer.forward(x, out=out, stream=stream)
        torch.cuda.synchronize()
        assert torch.equal(out, want)


@each_m
def test_y_of_another_stream_takes_no_memory_that_is_in_use(m: int) -> None:
    """stream= without out=: y's memory may just have been freed behind work that still reads it on torch's stream."""
    layer = layer_on_gpu(LayerCase(*reference.make(4096, K, 1), scale2=1.0))
    x = to_device(reference.x_of(m, K, 1))
    side = torch.cuda.Stream()
    layer.forward(x, stream=side)  # what a first call makes is made
    torch.cuda.synchronize()
    old = torch.full((m, 4096), 3.0, dtype=torch.float16, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN)
    reader = old * 1
    del old
    y = layer.forward(x, stream=side)
    torch.cuda.synchronize()
    assert (reader == 3).all(), "y overwrote memory that a kernel before it had yet to read"
    assert torch.equal(y, layer.forward(x))


@pytest.mark.parametrize("kind", ["own", "default", "per thread"])
def test_behind_the_work_of_cupys_current_stream(kind: str) -> None:
    cupy = pytest.importorskip("cupy")
    spin = cupy.RawKernel(
        r'extern "C" __global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n) {} }',
        "spin",
    )
    layer = layer_on_gpu()
    want = layer.forward(cupy.ones((8, K), cupy.float16)).get()
    stream = {"own": lambda: cupy.cuda.Stream(non_blocking=True), "default": lambda: cupy.cuda.Stream.null,
              "per thread": lambda: cupy.cuda.Stream.ptds}[kind]()  # fmt: skip
    spin((1,), (1,), (1,))  # compiled here, not while the stream is watched
    for view in (slice(None), slice(None, None, 2)):
        held = cupy.full((8, K * (view.step or 1)), 7, cupy.float16)
        layer.forward(held[:, view]).copy()
        cupy.cuda.Device().synchronize()
        with stream:
            spin((1,), (1,), (SPIN,))
            held.fill(1)
            y = layer.forward(held[:, view])
            copy = y.copy()
            assert not stream.done
            stream.synchronize()
        assert (y.get() == want).all() and (copy.get() == want).all()


@pytest.fixture
def jax() -> Any:
    module = pytest.importorskip("jax")
    try:
        module.devices("gpu")
    except RuntimeError:
        pytest.skip("JAX sees no GPU")
    return module


def slow_ones(jax: Any, shape: tuple[int, int]) -> Any:
    """Ones that take JAX's stream some 50 ms to make."""
    numpy = jax.numpy
    big = jax.random.normal(jax.random.key(0), (6144, 6144), numpy.float32)

    @jax.jit
    def make(big: Any) -> Any:
        product = jax.lax.fori_loop(0, 8, lambda _, p: numpy.tanh(p @ big), big)
        return (product[: shape[0], : shape[1]] * 0 + 1).astype(numpy.float16)

    make(big).block_until_ready()  # compiled
    return make(big)


@each_m
def test_behind_the_output_of_a_jitted_function(jax: Any, m: int) -> None:
    layer = layer_on_gpu()
    want = to_host(layer.forward(torch.ones(m, K, dtype=torch.float16, device="cuda")))
    double = jax.jit(lambda y: y * 2)
    double(jax.numpy.zeros((m, N), jax.numpy.float16)).block_until_ready()
    y = layer.forward(slow_ones(jax, (m, K)))
    doubled = double(y)  # JAX's stream waits for this library's
    np.testing.assert_array_equal(np.asarray(doubled), 2 * want)
    np.testing.assert_array_equal(np.asarray(y), want)


def test_x_of_jax_that_goes_at_once(jax: Any) -> None:
    """F7d. x is dropped while the work that reads it waits on a spinning stream, and its memory is asked for again."""
    layer = layer_on_gpu()
    values = np.ones((64, K), np.float16)
    want = to_host(layer.forward(to_device(values)))
    gpu = jax.devices("gpu")[0]
    x = jax.device_put(values, gpu)
    x.block_until_ready()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SPIN)
    y = layer.forward(x, stream=side)
    del x
    gc.collect()
    junk = [jax.device_put(np.full((64, K), 7 + i, np.float16), gpu) for i in range(20)]
    for each in junk:
        each.block_until_ready()
    np.testing.assert_array_equal(np.asarray(y), want)


def test_y_of_jax_that_goes_while_it_is_read(jax: Any) -> None:
    """y is dropped while JAX's stream has yet to read it; the next call must not write to its memory."""
    layer = layer_on_gpu()
    x = [jax.device_put(np.full((64, K), value, np.float16), jax.devices("gpu")[0]) for value in (1, 3)]
    want = to_host(layer.forward(torch.ones(64, K, dtype=torch.float16, device="cuda")))
    big = jax.random.normal(jax.random.key(0), (6144, 6144), jax.numpy.float32)

    @jax.jit
    def slow_copy(big: Any, y: Any) -> Any:
        product = jax.lax.fori_loop(0, 8, lambda _, p: jax.numpy.tanh(p @ big), big)
        return y + (product[:64, :N] * 0).astype(y.dtype)

    slow_copy(big, jax.numpy.zeros((64, N), jax.numpy.float16)).block_until_ready()
    for each in x:
        each.block_until_ready()
    y = layer.forward(x[0])
    copied = slow_copy(big, y)
    del y
    gc.collect()
    later = [layer.forward(x[1]) for _ in range(8)]
    np.testing.assert_array_equal(np.asarray(copied), want)
    del later


def test_x_of_torch_that_goes_at_once() -> None:
    """F7d on one stream: the allocator gives x's memory to the next tensor of the stream."""
    layer = layer_on_gpu()
    values = reference.x_of(64, K, 3)
    want = layer.forward(to_device(values))
    torch.cuda.synchronize()
    for strided in (False, True):
        x = to_device(values)
        if strided:
            x = x.repeat_interleave(2, dim=1)[:, ::2]
        torch.cuda.synchronize()
        torch.cuda._sleep(SPIN)
        y = layer.forward(x)
        del x
        for value in range(5):
            torch.full((64, K * (1 + strided)), float(value), dtype=torch.float16, device="cuda")
        assert torch.equal(y, want)


# G2. CUDA graphs.


@each_dtype
@each_m
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_first_call_of_a_layer_inside_a_capture(layout: str, m: int, dtype: str) -> None:
    layer, eager = layer_on_gpu(), layer_on_gpu()
    held = torch.zeros((m, 2 * K), dtype=TORCH_DTYPES[dtype], device="cuda")
    x = held[:, ::2] if layout == "strided" else held[:, :K].contiguous()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer.forward(x)
    for seed in range(3):
        values = to_device(reference.x_of(m, K, seed)).to(x.dtype)
        x.copy_(values)
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, eager.forward(values))


def test_first_call_of_the_process_inside_a_capture() -> None:
    """No kernel is loaded yet, no work space made and no cuBLAS handle; in each order of M."""
    code = """
        import sys, torch, fp4linear
        from tests import reference
        b, scales = reference.make(256, 1024, 2)
        torch.zeros(1, device="cuda")
        rows = [int(m) for m in sys.argv[1].split(",")]
        layers = [fp4linear.Fp4Linear(b, scales, 2.0**-8, device="cuda") for _ in rows]
        inputs = [torch.zeros(m, 1024, dtype=torch.float16, device="cuda") for m in rows]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [layer.forward(x) for layer, x in zip(layers, inputs)]
        eager = fp4linear.Fp4Linear(b, scales, 2.0**-8, device="cuda")
        for seed in range(3):
            for m, x, y in zip(rows, inputs, results):
                x.copy_(torch.from_numpy(reference.x_of(m, 1024, seed)))
                y.fill_(float("nan"))
            graph.replay()
            for m, x, y in zip(rows, inputs, results):
                assert torch.equal(y, eager.forward(x)), (m, seed)
        print("done")
    """
    for rows in ("64,1,8", "1,8,64"):
        assert run_child(code, arguments=(rows,)).stdout == "done\n"


def test_a_chain_of_layers_in_a_graph() -> None:
    """Each launch may start before the one before it ends; the order of the data holds all the same."""
    shapes = [(4096, 512), (512, 4096)] * 3
    layers = [
        layer_on_gpu(LayerCase(*reference.make(n, k, seed), scale2=2.0**-10)) for seed, (n, k) in enumerate(shapes)
    ]
    for m in (1, 4, 8, 9, 24, 33, 64, 130, 300):
        x = torch.zeros((m, 512), dtype=torch.bfloat16, device="cuda")

        def chain(y: Any) -> Any:
            for layer in layers:
                y = layer.forward(y)
            return y

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = chain(x)
        for seed in range(3):
            x.copy_(to_device(reference.x_of(m, 512, seed)))
            graph.replay()
            stepwise = x
            for layer in layers:
                stepwise = layer.forward(stepwise)
                torch.cuda.synchronize()
            assert stepwise.isfinite().all() and stepwise.abs().max() > 0
            assert torch.equal(y, stepwise)
            eager = chain(x)
            assert torch.equal(eager, stepwise)


@each_m
def test_two_graphs_at_once(m: int) -> None:
    """Captured one after the other, so on the same stream of torch's; replayed side by side."""
    layers = [layer_on_gpu(LayerCase(*reference.make(2048, 2048, seed), scale2=2.0**-10)) for seed in (1, 2)]
    inputs = [to_device(reference.x_of(m, 2048, seed)) for seed in (3, 4)]
    wants = [layer.forward(x) for layer, x in zip(layers, inputs, strict=True)]
    graphs, results = [], []
    for layer, x in zip(layers, inputs, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append([layer.forward(x) for _ in range(20)])
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(5):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for want, each in zip(wants, results, strict=True):
            assert all(torch.equal(y, want) for y in each)


@pytest.mark.parametrize("m", [1, 8, 64])
def test_a_graph_of_cupy(m: int) -> None:
    cupy = pytest.importorskip("cupy")
    layer = layer_on_gpu()
    x, out = cupy.zeros((m, K), cupy.float16), cupy.full((m, N), cupy.nan, cupy.float16)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        layer.forward(x, out=out)
        graph = stream.end_capture()
    for seed in range(3):
        values = reference.x_of(m, K, seed)
        x.set(values)
        out.fill(cupy.nan)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert_within_contract(out.get(), CASE.expected(values))


def test_an_error_inside_a_capture_leaves_it_usable() -> None:
    layer = layer_on_gpu()
    x = to_device(reference.x_of(8, K, 1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ValueError, match=r"\bx\b"):
            layer.forward(x[:, :64])
        y = layer.forward(x)
    y.fill_(float("nan"))
    graph.replay()
    assert torch.equal(y, layer.forward(x))


# G6. After an error.


def check_c1() -> None:
    b, scales = reference.make(48, 96, 7)
    values = reference.x_of(257, 96, 1007)[:9]
    y = fp4linear.Fp4Linear(b, scales, 2.0**-6, device="cuda").forward(to_device(values))
    torch.cuda.synchronize()
    assert_within_contract(to_host(y), reference.linear(values, b, scales, 2.0**-6))


def test_out_of_memory_for_y() -> None:
    layer = layer_on_gpu()
    x = to_device(reference.x_of(1, K, 1))
    for _ in range(3):
        with pytest.raises((MemoryError, RuntimeError), match="memory"):
            layer.forward(x.expand(2**36, K))
    torch.cuda.synchronize()
    assert_within_contract(to_host(layer.forward(x)), CASE.expected(to_host(x)))
    check_c1()


def test_out_of_memory_for_a_copy_of_x() -> None:
    """y is there, the rows of x can't be gathered: 2^31 of 256 columns are 1 TiB."""
    case = LayerCase(*reference.make(1, K, 1))
    layer = layer_on_gpu(case)
    x = to_device(reference.x_of(1, K, 1))
    for _ in range(3):
        with pytest.raises((MemoryError, RuntimeError), match="memory"):
            layer.forward(x.expand(2**31, K))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert_within_contract(to_host(layer.forward(x)), case.expected(to_host(x)))
    check_c1()


def test_errors_do_not_stick() -> None:
    layer = layer_on_gpu()
    x = to_device(reference.x_of(9, K, 1))
    want = layer.forward(x)
    for bad, options in (
        (x[:, :64], {}),
        (x.float(), {}),
        (x.cpu(), {}),
        (x, {"out": torch.zeros(9, N - 1)}),
        (x, {"stream": "?"}),
        (3, {}),
    ):
        with pytest.raises((TypeError, ValueError)):
            layer.forward(bad, **options)
        torch.cuda.synchronize()
        assert torch.equal(layer.forward(x), want)
    with pytest.raises(ValueError, match="path"):
        layer_on_gpu(path="gemv_scalar").forward(x)
    check_c1()


def test_a_call_waits_for_nothing() -> None:
    """Neither the first call of a layer nor any other synchronises: the GPU is still spinning when it returns."""
    layers = {m: layer_on_gpu() for m in (1, 8, 64)}
    inputs = {m: to_device(reference.x_of(m, K, 1)) for m in layers}
    for m in layers:  # kernels are loaded, work space is made
        layer_on_gpu().forward(inputs[m])
    torch.cuda.synchronize()
    stream = torch.cuda.current_stream()
    for m, layer in layers.items():
        torch.cuda._sleep(2 * SPIN)
        y = layer.forward(inputs[m])
        strided = layer.forward(inputs[m].repeat(1, 2)[:, :K])
        assert not stream.query()
        assert torch.equal(y, strided)


def test_scratch_that_grows_call_by_call() -> None:
    """Blocks that a stream outgrows stay behind: all together they are less than the last one."""
    k, most = 8192, 1024
    layer = layer_on_gpu(LayerCase(*reference.make(16, k, 1), scale2=2.0**-6), "native_emulated")
    x = torch.zeros(most, k, dtype=torch.float16, device="cuda")
    out = poisoned((most, 16), x.dtype)
    layer.forward(x, out=out)  # on this stream: what the kernels need
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    for m in range(2, most + 1, 2):
        layer.forward(x[:m], out=out[:m], stream=stream)
    torch.cuda.synchronize()
    taken = before - torch.cuda.mem_get_info()[0]
    largest = most * (k // 2 + k // 16)  # x in 4 bits, and its scales
    assert taken < 8 * largest, f"{taken} bytes for {largest}"  # a block a call would be 256 times as much
    assert (out == 0).all()


# Threads.


@pytest.mark.parametrize("m", [1, 8, 64])
@pytest.mark.parametrize("path", ["auto", "gemv_scalar", "gemm_fused", "dequant_cublas"])
def test_threads_share_a_layer(path: str, m: int) -> None:
    """Eight threads on streams of their own, bit-equal to one thread."""
    if path == "gemv_scalar" and m > 8:
        pytest.skip("the path takes 8 rows")
    layer = layer_on_gpu(LayerCase(*reference.make(1024, 1024, 2), scale2=2.0**-9), path)
    inputs = [to_device(reference.x_of(m, 1024, seed)) for seed in range(8)]
    wants = [layer.forward(x) for x in inputs]
    torch.cuda.synchronize()
    start, failures = threading.Barrier(8), []

    def work(index: int) -> None:
        try:
            stream = torch.cuda.Stream()
            start.wait()
            with torch.cuda.stream(stream):
                results = [layer.forward(inputs[index]) for _ in range(40)]
                ran = layer.last_path
            stream.synchronize()
            assert ran == layer.plan(m, "float16").path
            assert all(torch.equal(y, wants[index]) for y in results)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_threads_make_layers_and_fail_beside_each_other() -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            case = LayerCase(*reference.make(100, 256, seed), scale2=2.0**-6)
            values = reference.x_of(1 + seed, 256, seed)
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(10):
                    layer = layer_on_gpu(case)
                    with pytest.raises(ValueError, match=r"\bx\b"):
                        layer.forward(to_device(values[:, :64]))
                    assert_within_contract(to_host(layer.forward(to_device(values))), case.expected(values))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


@pytest.mark.parametrize("m", [8, 64])
def test_threads_on_their_own_default_streams(m: int) -> None:
    """Stream number 2 is another stream in each thread, so nothing that belongs to a stream may be shared by number."""
    layers = [layer_on_gpu(LayerCase(*reference.make(1024, 1024, seed), scale2=2.0**-9)) for seed in range(8)]
    x = to_device(reference.x_of(m, 1024, 1))
    wants = [layer.forward(x) for layer in layers]
    outs = [[poisoned((m, 1024), x.dtype) for _ in range(40)] for _ in layers]
    layers[0].forward(x, stream=2)
    torch.cuda.synchronize()
    start, failures = threading.Barrier(8), []

    def work(index: int) -> None:
        try:
            start.wait()
            for out in outs[index]:
                layers[index].forward(x, out=out, stream=2)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not failures, failures[0]
    for want, mine in zip(wants, outs, strict=True):
        assert all(torch.equal(out, want) for out in mine)


@pytest.mark.parametrize("path", list(PATHS))
def test_a_call_right_after_construction(path: str) -> None:
    """On a stream that does not wait for the default one: the weight, its factors and the bias have arrived."""
    n, k = 4096, 2048
    factors = np.linspace(0.5, 1, n).astype(np.float32)
    case = LayerCase(*reference.make(n, k, 1), scale2=factors, bias=factors)
    x = to_device(reference.x_of(4, k, 1) / 64)
    want = layer_on_gpu(case, path).forward(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(10):
            y = layer_on_gpu(case, path).forward(x)
            assert torch.equal(y, want)

"""x quantised to NVFP4 on a GPU, and the path native_emulated there: the bits of the CPU, which tests/test_native.py
holds against a search in float64.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import fp4linear
from tests import reference
from tests.gpu.device import (
    DEVICE,
    LAYOUTS,
    SPIN,
    forward,
    laid_out,
    make_layer,
    out_features,
    to_device,
    to_host,
    torch,
)
from tests.strategies import DTYPES, VALUE_KINDS, LayerCase, layers, seeds, x_values
from tests.tolerance import assert_same_bits

pytestmark = pytest.mark.gpu

PATH = "native_emulated"
NAMES = ("codes", "scales", "global_scale")
GREATEST = float(np.finfo(np.float32).max)
each_x_dtype = pytest.mark.parametrize("dtype", list(DTYPES))
each_half = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
global_scales = st.one_of(
    st.sampled_from([1.0, 1.0, 3.0, 448.0, float(np.float32(0.37)), 2.0**-10, 2.0**-149, GREATEST, "dynamic"]),
    st.floats(-20, 20).map(lambda power: float(np.float32(2.0**power))),
)
# With whole blocks of 16 and without, and rows of one and of several units of the prepacked weight.
widths = st.one_of(
    st.sampled_from([2, 14, 16, 18, 48, 64, 80, 128, 178, 192, 320, 1024, 2112]),
    st.integers(1, 100).map(lambda i: 2 * i),
)


def soil(*shapes: tuple[int, ...]) -> None:
    """Leaves torch's allocator memory of these sizes full of 0xA5, for results to be made in."""
    dirty = [torch.full(shape, 0xA5, dtype=torch.uint8, device=DEVICE) for shape in shapes if np.prod(shape)]
    del dirty


def quantised(x: Any, **options: Any) -> Any:
    """The result on the device, as NumPy arrays. A second call gives the same bits."""
    first = fp4linear.quantize_activations(x, **options)
    for array in first:
        assert type(array) is torch.Tensor and array.device == x.device and array.is_contiguous()
    soil(*(tuple(array.shape) for array in first[:2]))
    second = fp4linear.quantize_activations(x, **options)
    for a, b in zip(first, second, strict=True):
        assert_same_bits(to_host(a), to_host(b))
    return fp4linear.QuantizedActivations(*(to_host(array) for array in first))


def check_quantised(x: Any, values: NDArray, **options: Any) -> Any:
    """Every byte is the CPU's; x is on the device, values are the same on the host."""
    got, want = quantised(x, **options), fp4linear.quantize_activations(values, **options)
    for name in NAMES:
        assert_same_bits(getattr(got, name), getattr(want, name))
    return got


def with_specials(values: NDArray, random: np.random.Generator) -> NDArray:
    """A copy in which some values are infinite, NaN, zero, or any bits at all."""
    values = values.copy()
    bits = values.reshape(-1).view(f"u{values.itemsize}")
    at = random.integers(0, max(bits.size, 1), min(bits.size, 5))
    bits[at] = random.integers(0, 1 << (8 * values.itemsize), at.shape, dtype=np.uint64).astype(bits.dtype)
    values.reshape(-1)[at[:2]] = np.array([np.inf, np.nan], np.float32).astype(values.dtype)[: len(at[:2])]
    return values


# The quantiser


@each_half
@pytest.mark.parametrize("g", [1.0, 3.0, 0.37, 2.0**-9, 448.0, "dynamic"])
def test_every_16_bit_value(g: Any, dtype: str) -> None:
    """Each pattern where it makes the scale of its block, and beside a number that makes it."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    random = np.random.default_rng(0)
    for other in (0.0, 1.0, 700.0):
        values = np.full((1 << 16, 16), other, np.float32).astype(DTYPES[dtype])
        values.view(np.uint16)[np.arange(1 << 16), random.integers(0, 16, 1 << 16)] = patterns
        got = check_quantised(to_device(values), values, global_scale=g)
        assert (got.scales == 0x7F).sum() == (~np.isfinite(patterns.view(DTYPES[dtype]).astype(np.float32))).sum()


@each_x_dtype
@given(data=st.data(), seed=seeds)
def test_codes_and_scales(dtype: str, data: st.DataObject, seed: int) -> None:
    random = np.random.default_rng(seed)
    m, k = data.draw(st.integers(1, 140)), data.draw(widths)
    values = x_values(random, data.draw(st.sampled_from(VALUE_KINDS)), (m, k), DTYPES[dtype])
    if data.draw(st.booleans()):
        values = with_specials(values, random)
    x = laid_out(values, data.draw(st.sampled_from(LAYOUTS)), data.draw(st.integers(1, 9)))
    held = to_host(x)  # what the layout made of the values: expanded rows are all the first
    check_quantised(x, held, global_scale=data.draw(global_scales), swizzled=data.draw(st.booleans()))


@each_x_dtype
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize(("m", "k"), [(1, 4096), (4099, 1024), (300, 8208), (2, 131_074), (40_000, 34), (129, 16)])
def test_more_blocks_than_threads(m: int, k: int, swizzled: bool, dtype: str) -> None:
    values = np.random.default_rng(m).standard_normal((m, k), np.float32).astype(DTYPES[dtype])
    for g in (1.7, "dynamic"):
        check_quantised(to_device(values), values, global_scale=g, swizzled=swizzled)


@each_x_dtype
def test_empty_and_odd_shapes(dtype: str) -> None:
    for shape in [(0, 32), (3, 0), (0,), (2,), (2, 3, 40), (1, 1, 1, 6)]:
        values = np.random.default_rng(1).standard_normal(shape).astype(DTYPES[dtype])
        for swizzled in (False, True):
            for g in (1.0, "dynamic"):
                check_quantised(to_device(values), values, global_scale=g, swizzled=swizzled)
    for shape, message in [((2, 3), "K must be even"), ((), r"expected shape \[..., K\]")]:
        with pytest.raises(ValueError, match=message):
            fp4linear.quantize_activations(to_device(np.ones(shape, DTYPES[dtype])))


@each_x_dtype
def test_the_dynamic_global_scale(dtype: str) -> None:
    values = np.random.default_rng(2).standard_normal((513, 272)).astype(DTYPES[dtype])
    for row, column in ((0, 0), (512, 271), (100, 131)):
        values[row, column] = -8.5
        got = check_quantised(to_device(values), values, global_scale="dynamic")
        assert got.global_scale == np.float32(2688) / np.float32(8.5) and got.global_scale.shape == ()
        values[row, column] = 1
    values[3, 3], values[5, 200], values[7, 1] = np.inf, np.nan, -9.5
    got = check_quantised(to_device(values), values, global_scale="dynamic")
    assert got.global_scale == np.float32(2688) / np.float32(9.5)
    assert np.argwhere(got.scales == 0x7F).tolist() == [[3, 0], [5, 12]]
    for all_alike in (0.0, np.nan, -np.inf):
        same = np.full((9, 64), all_alike, np.float32).astype(DTYPES[dtype])
        assert check_quantised(to_device(same), same, global_scale="dynamic").global_scale == 1.0


def test_it_waits_for_what_makes_x_and_not_for_the_gpu() -> None:
    x = torch.full((64, 256), 7.0, dtype=torch.bfloat16, device=DEVICE)
    options: dict[str, Any] = {"global_scale": "dynamic", "swizzled": True}
    fp4linear.quantize_activations(x, **options)  # kernels are loaded at their first use
    want = fp4linear.quantize_activations(torch.ones_like(x), **options)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SPIN)
        x.fill_(1)
        got = fp4linear.quantize_activations(x, **options)
    assert not side.query(), "the call waited for the GPU"
    side.synchronize()
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_the_stream_argument() -> None:
    x = torch.full((64, 256), 7.0, dtype=torch.float16, device=DEVICE)
    want = fp4linear.quantize_activations(torch.ones_like(x), global_scale=3.0)
    copies = [array.clone() for array in want]  # the driver loads a kernel at its first use, and waits for the GPU then
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SPIN)
        x.fill_(1)
    # torch's current stream is joined: it reads what the other one wrote.
    got = fp4linear.quantize_activations(x, global_scale=3.0, stream=side.cuda_stream)
    copies = [array.clone() for array in got]
    assert not side.query()
    torch.cuda.synchronize()
    for a, b in zip(copies, want, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(TypeError, match="stream: expected an integer"):
        fp4linear.quantize_activations(x, stream="side")


def test_a_graph_takes_the_dynamic_scale_of_each_replay() -> None:
    x = torch.zeros((130, 96), dtype=torch.bfloat16, device=DEVICE)
    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        fp4linear.quantize_activations(x, global_scale="dynamic", swizzled=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = fp4linear.quantize_activations(x, global_scale="dynamic", swizzled=True)
    for seed, size in enumerate([1.0, 1e-3, 1e4]):
        values = (np.random.default_rng(seed).standard_normal((130, 96)) * size).astype(DTYPES["bfloat16"])
        x.copy_(to_device(values))
        graph.replay()
        want = fp4linear.quantize_activations(values, global_scale="dynamic", swizzled=True)
        for a, b in zip(got, want, strict=True):
            assert_same_bits(to_host(a), b)


@pytest.mark.parametrize("library", ["cupy", "jax"])
def test_arrays_of_other_libraries(library: str) -> None:
    values = np.random.default_rng(3).standard_normal((33, 80)).astype(np.float16)
    want = fp4linear.quantize_activations(values, global_scale="dynamic")
    if library == "cupy":
        cupy = pytest.importorskip("cupy")
        got = fp4linear.quantize_activations(cupy.asarray(values), global_scale="dynamic")
        assert all(isinstance(array, cupy.ndarray) for array in got)
        arrays = [array.get() for array in got]
    else:
        jax = pytest.importorskip("jax")
        if not any(device.platform == "gpu" for device in jax.devices()):
            pytest.skip("JAX has no GPU here")
        got = fp4linear.quantize_activations(jax.device_put(values, jax.devices("gpu")[0]), global_scale="dynamic")
        assert all(isinstance(array, jax.Array) for array in got)
        arrays = [np.asarray(array) for array in got]
    for a, b in zip(arrays, want, strict=True):
        assert_same_bits(a, b)


# The path native_emulated


def on_the_cpu(case: LayerCase, values: NDArray, **options: Any) -> NDArray:
    layer = fp4linear.Fp4Linear(
        case.b, case.scales, case.scale2, case.bias, block_size=case.block_size, device="cpu", path=PATH, **options
    )
    return layer.forward(values)


def assert_same_y(y: NDArray, expected: NDArray) -> None:
    """Equal bits, of whatever NaN."""
    nan = np.isnan(expected)
    assert (np.isnan(y) == nan).all()
    assert_same_bits(np.where(nan, y.dtype.type(0), y), np.where(nan, y.dtype.type(0), expected))


def check_layer(case: LayerCase, x: Any, values: NDArray, **options: Any) -> None:
    assert_same_y(forward(make_layer(case, PATH, **options), x, PATH), on_the_cpu(case, values, **options))


@each_half
@given(data=st.data(), seed=seeds)
def test_y_has_the_bits_of_the_cpu(dtype: str, data: st.DataObject, seed: int) -> None:
    random = np.random.default_rng(seed)
    case = data.draw(layers(out_features, widths, st.just(16)))
    shape = (data.draw(st.integers(1, 140)), case.in_features)
    values = x_values(random, data.draw(st.sampled_from(VALUE_KINDS)), shape, DTYPES[dtype])
    if data.draw(st.booleans()):
        values = with_specials(values, random)
    x = laid_out(values, data.draw(st.sampled_from(LAYOUTS)), data.draw(st.integers(1, 9)))
    check_layer(case, x, to_host(x), input_global_scale=data.draw(global_scales))


@each_half
@pytest.mark.parametrize("mode", ["zero", "propagate"])
@pytest.mark.parametrize("k", [50, 192])
def test_nan_scales_of_the_weight(k: int, mode: str, dtype: str) -> None:
    random = np.random.default_rng(k)
    b = random.integers(0, 256, (70, k // 2), dtype=np.uint8)
    scales = random.integers(0x20, 0x59, (70, -(-k // 16)), dtype=np.uint8)
    scales[3, 2], scales[64, 0] = 0x7F, 0xFF
    values = random.standard_normal((9, k)).astype(DTYPES[dtype])
    values[4] = 0
    case, x = LayerCase(b, scales, 0.5), to_device(values)
    check_layer(case, x, values, nan_scales=mode)
    nan = np.isnan(to_host(make_layer(case, PATH, nan_scales=mode).forward(x)))
    assert np.flatnonzero(nan.any(0)).tolist() == ([3, 64] if mode == "propagate" else [])


@each_half
@pytest.mark.parametrize(("n", "k"), [(300, 1024), (33, 8256), (1, 64), (65, 50)])
@pytest.mark.parametrize("m", [1, 63, 64, 65, 300])
def test_whole_tiles_and_parts(m: int, n: int, k: int, dtype: str) -> None:
    random = np.random.default_rng(m)
    b = random.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scales = random.integers(0, 0x7F, (n, -(-k // 16)), dtype=np.uint8) | random.integers(0, 2, (n, 1), np.uint8) * 128
    scale2, bias = np.linspace(-1, 1, n).astype(np.float32), np.linspace(-9, 9, n).astype(np.float32)
    values = random.standard_normal((m, k)).astype(DTYPES[dtype])
    x = to_device(values)
    for case in (LayerCase(b, scales, 2.0**-9), LayerCase(b, scales, scale2, bias)):
        for g in (0.7, "dynamic"):
            check_layer(case, x, values, input_global_scale=g)


def test_a_weight_of_several_chunks() -> None:
    """More than 64 MiB: the canonical form of a prepacked weight is made in parts."""
    n, k = 32_768 + 40, 4096
    b, scales = reference.make(n, k, 3)
    values = np.random.default_rng(4).standard_normal((2, k)).astype(np.float16)
    scale2, bias = np.linspace(0.001, 0.002, n).astype(np.float32), np.linspace(-3, 3, n).astype(np.float32)
    check_layer(LayerCase(b, scales, scale2, bias), to_device(values), values, input_global_scale="dynamic")


@each_half
def test_a_row_depends_on_nothing_but_itself(dtype: str) -> None:
    b, scales = reference.make(70, 192, 5)
    x = to_device(np.random.default_rng(5).standard_normal((150, 192)).astype(DTYPES[dtype]))
    layer = fp4linear.Fp4Linear(b, scales, 0.3, device=DEVICE, path=PATH, input_scale=0.002, batch_invariant=True)
    whole = to_host(layer.forward(x))
    for rows in (slice(0, 1), slice(63, 66), slice(7, 150)):
        assert_same_bits(to_host(layer.forward(x[rows].contiguous())), whole[rows])
    refused = fp4linear.Fp4Linear(
        b, scales, 0.3, device=DEVICE, path=PATH, input_global_scale="dynamic", batch_invariant=True
    )
    with pytest.raises(ValueError, match="the global scale of x is that of the whole call"):
        refused.forward(x)


def test_a_graph_of_the_path() -> None:
    b, scales = reference.make(70, 192, 6)
    layer = fp4linear.Fp4Linear(b, scales, 0.3, device=DEVICE, path=PATH, input_global_scale="dynamic")
    x = torch.zeros((9, 192), dtype=torch.float16, device=DEVICE)
    out = torch.full((9, 70), float("nan"), dtype=torch.float16, device=DEVICE)
    layer.forward(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.forward(x, out=out)
    for seed, size in enumerate([1.0, 1e-3, 100.0]):
        values = (np.random.default_rng(seed).standard_normal((9, 192)) * size).astype(np.float16)
        x.copy_(to_device(values))
        graph.replay()
        want = on_the_cpu(LayerCase(b, scales, 0.3), values, input_global_scale="dynamic")
        assert_same_y(to_host(out), want)


def test_streams_do_not_share_their_scratch() -> None:
    """Four threads on streams of their own; each x has its own dynamic scale."""
    b, scales = reference.make(130, 1024, 7)
    case = LayerCase(b, scales, 0.01)
    layer = make_layer(case, PATH, input_global_scale="dynamic")
    values = [
        (np.random.default_rng(i).standard_normal((65, 1024)) * 10.0 ** (i - 2)).astype(np.float16) for i in range(4)
    ]
    want = [on_the_cpu(case, each, input_global_scale="dynamic") for each in values]
    failures: list[str] = []

    def work(index: int) -> None:
        try:
            x = to_device(values[index])
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                results = [layer.forward(x) for _ in range(20)]
                torch.cuda.current_stream().synchronize()
            for y in results:
                assert_same_y(to_host(y), want[index])
        except BaseException as error:
            failures.append(f"{index}: {error!r}")

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


# What native_nvfp4 reads


@pytest.mark.parametrize("k", [2, 16, 48, 64, 66, 192, 4096])
@pytest.mark.parametrize("n", [1, 31, 128, 129, 1000])
def test_the_weight_as_tensor_cores_read_it(n: int, k: int) -> None:
    """The kernels that a layer on a Blackwell GPU runs at its construction, which run anywhere: the host's bytes."""
    random = np.random.default_rng(n)
    b = random.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scales = random.integers(0, 256, (n, -(-k // 16)), dtype=np.uint8)
    want = fp4linear._core.native_weight(b, scales)
    for prepacked in (False, True) if k % 64 == 0 else (False,):
        got = fp4linear._core.native_weight(b, scales, device=0, prepacked=prepacked)
        for made, expected in zip(got, want, strict=True):
            assert_same_bits(made, expected)
    if k % 64 != 0:
        with pytest.raises(ValueError, match="multiple of 64"):
            fp4linear._core.native_weight(b, scales, device=0, prepacked=True)


def test_what_it_refuses() -> None:
    b, scales = reference.make(16, 64, 8)
    layer = fp4linear.Fp4Linear(b, scales, 1.0, device=DEVICE, path=PATH)
    assert layer.plan(3).path == PATH
    with pytest.raises(TypeError, match="x: expected float16 or bfloat16 on a GPU, got float32"):
        layer.forward(torch.ones((2, 64), device=DEVICE))
    eights = fp4linear.Fp4Linear(
        np.zeros((4, 16), np.uint8), np.zeros((4, 4), np.uint8), 1.0, block_size=8, device=DEVICE, path=PATH
    )
    with pytest.raises(ValueError, match="needs block_size 16, got 8"):
        eights.forward(torch.ones((2, 32), dtype=torch.float16, device=DEVICE))

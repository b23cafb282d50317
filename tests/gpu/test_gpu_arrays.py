"""Arrays of torch, CuPy and JAX on a GPU: what goes in comes back, what can't be is refused by name."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import fp4linear
from tests import reference
from tests.gpu.device import BFLOAT16, PATHS, TORCH_DTYPES, each_dtype, poisoned, to_device, to_host, torch
from tests.strategies import DTYPES, LayerCase
from tests.tolerance import assert_same_bits, assert_within_contract

pytestmark = pytest.mark.gpu

N, K = 40, 128
CASE = LayerCase(*reference.make(N, K, 41), scale2=0.125)
X = reference.x_of(9, K, 42)
each_m = pytest.mark.parametrize("m", [1, 8, 9])


class Torch:
    name = "torch"

    def make(self, values: NDArray) -> Any:
        return to_device(values)

    def host(self, array: Any) -> NDArray:
        assert type(array) is torch.Tensor
        return to_host(array)

    def device(self, array: Any) -> str:
        return str(array.device)


class Cupy:
    name = "cupy"

    def __init__(self) -> None:
        self.cupy = pytest.importorskip("cupy")

    def make(self, values: NDArray) -> Any:
        if values.dtype == BFLOAT16:
            return self.cupy.asarray(np.ascontiguousarray(values).view(np.uint16)).view(BFLOAT16)
        return self.cupy.asarray(np.ascontiguousarray(values))

    def host(self, array: Any) -> NDArray:
        assert type(array) is self.cupy.ndarray
        if array.dtype == BFLOAT16:
            return array.view(np.uint16).get().view(BFLOAT16)
        return array.get()

    def device(self, array: Any) -> str:
        return f"cuda:{array.device.id}"


class Jax:
    name = "jax"

    def __init__(self) -> None:
        self.jax = pytest.importorskip("jax")
        try:
            self.jax.devices("gpu")
        except RuntimeError:
            pytest.skip("JAX sees no GPU")

    def make(self, values: NDArray) -> Any:
        return self.jax.device_put(values, self.jax.devices("gpu")[0])

    def host(self, array: Any) -> NDArray:
        assert isinstance(array, self.jax.Array)
        return np.asarray(array)

    def device(self, array: Any) -> str:
        (device,) = array.devices()
        assert device.platform == "gpu"
        return f"cuda:{device.id}"


@pytest.fixture(params=[Torch, Cupy, Jax], ids=lambda library: library.name)
def library(request: pytest.FixtureRequest) -> Any:
    return request.param()


def layer_on(device: str = "cuda", case: LayerCase = CASE, **options: Any) -> fp4linear.Fp4Linear:
    return fp4linear.Fp4Linear(case.b, case.scales, case.scale2, case.bias, device=device, **options)


def check(library: Any, layer: fp4linear.Fp4Linear, values: NDArray) -> NDArray:
    x = library.make(values)
    y = layer.forward(x)
    got = library.host(y)
    assert library.device(y) == library.device(x) == layer.device
    assert got.dtype == values.dtype and got.shape == (*values.shape[:-1], layer.out_features)
    assert_within_contract(got, CASE.expected(values))
    assert_same_bits(library.host(x), values)
    return got


@each_dtype
@each_m
def test_what_goes_in_comes_back(library: Any, m: int, dtype: str) -> None:
    layer = layer_on()
    values = X[:m].astype(DTYPES[dtype])
    got = check(library, layer, values)
    assert_same_bits(got, to_host(layer.forward(to_device(values))))


@each_dtype
@pytest.mark.parametrize("lead", [(), (1,), (2, 3, 1), (5, 1), (1, 1, 1, 1, 1, 1, 2)], ids=str)
def test_leading_axes(library: Any, lead: tuple[int, ...], dtype: str) -> None:
    values = X[np.arange(int(np.prod(lead))) % len(X)].reshape(*lead, K).astype(DTYPES[dtype])
    check(library, layer_on(), values)


@each_dtype
@pytest.mark.parametrize("lead", [(0,), (2, 0, 3)], ids=str)
def test_empty_arrays(library: Any, lead: tuple[int, ...], dtype: str) -> None:
    layer = layer_on()
    y = layer.forward(library.make(np.zeros((*lead, K), DTYPES[dtype])))
    got = library.host(y)
    assert got.shape == (*lead, N) and got.dtype == DTYPES[dtype] and layer.last_path is None
    check(library, layer, X.astype(DTYPES[dtype]))  # no error is left behind


@each_dtype
def test_results_are_fresh(library: Any, dtype: str) -> None:
    layer = layer_on()
    values = X.astype(DTYPES[dtype])
    y = layer.forward(library.make(values))
    kept = library.host(y).copy()
    for _ in range(3):
        layer.forward(library.make(values[::-1].copy()))
    assert_same_bits(library.host(y), kept)


@each_dtype
def test_values_of_bf16_over_the_bridge(library: Any, dtype: str) -> None:
    """F2: 32 ones with w = 1."""
    b, scales = np.full((3, 16), 0x22, np.uint8), np.full((3, 2), 0x38, np.uint8)
    y = fp4linear.Fp4Linear(b, scales, 1.0, device="cuda").forward(library.make(np.ones((2, 32), DTYPES[dtype])))
    assert (library.host(y).astype(np.float64) == 32).all()


def test_a_layer_is_made_from_arrays_of_any_library(library: Any) -> None:
    """device=None keeps the weight where b lives; every argument may be on the GPU or on the host."""
    want = to_host(layer_on(case=LayerCase(CASE.b, CASE.scales, 0.125, np.ones(N, np.float32))).forward(to_device(X)))
    b, scales = library.make(CASE.b), library.make(CASE.scales)
    for scale2 in (
        np.float32(0.125),
        library.make(np.array([0.125], np.float32)),
        library.make(np.array(0.125, np.float32)),
        library.make(np.full(N, 0.125, np.float32)),
    ):
        for bias in (np.ones(N, np.float32), *(library.make(np.ones(N, dtype)) for dtype in DTYPES.values())):
            layer = fp4linear.Fp4Linear(b, scales, scale2, bias)
            assert layer.device == "cuda:0"
            got = to_host(layer.forward(to_device(X)))
            assert np.abs(got.astype(np.float64) - want).max() <= 2.0**-10 * np.abs(want).max()
    assert fp4linear.Fp4Linear(b, CASE.scales, 0.125).device == "cuda:0"
    assert fp4linear.Fp4Linear(CASE.b, scales, 0.125).device == "cpu"
    assert fp4linear.Fp4Linear(b, scales, 0.125, device="cpu").device == "cpu"
    np.testing.assert_array_equal(
        fp4linear.Fp4Linear(b, scales, 0.125, device="cpu").forward(X), layer_on("cpu").forward(X)
    )
    assert_same_bits(library.host(b), CASE.b)


def test_torch_forms_of_weight_and_scales() -> None:
    x = to_device(X)
    want = layer_on().forward(x)
    b, scales = to_device(CASE.b), to_device(CASE.scales)
    forms_of_b = [b, b.view(torch.int8), torch.nn.Parameter(b, requires_grad=False), b.t().contiguous().t()]
    if hasattr(torch, "float4_e2m1fn_x2"):
        forms_of_b.append(b.view(torch.float4_e2m1fn_x2))
    for form in forms_of_b:
        assert torch.equal(fp4linear.Fp4Linear(form, scales, 0.125).forward(x), want)
    wide = torch.zeros((N, 4 * scales.shape[1]), dtype=torch.uint8, device=scales.device)
    wide[:, ::4] = scales
    for form in (scales.view(torch.float8_e4m3fn), scales.t().contiguous().t(), wide[:, ::4]):
        assert torch.equal(fp4linear.Fp4Linear(b, form, torch.tensor(0.125, device=b.device)).forward(x), want)


def test_a_layer_does_not_borrow_what_it_was_made_from() -> None:
    """F7a: the arrays go, and their memory is written over."""
    b, scales, bias = to_device(CASE.b), to_device(CASE.scales), torch.ones(N, device="cuda")
    layer = fp4linear.Fp4Linear(b, scales, torch.full((N,), 0.125, device="cuda"), bias)
    x = to_device(X)
    want = layer.forward(x)
    for array in (b, scales, bias):
        array.zero_()
    del b, scales, bias, array
    junk = [torch.full((N * K // 2,), 255, dtype=torch.uint8, device="cuda") for _ in range(50)]
    assert torch.equal(layer.forward(x), want)
    del junk


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_names_of_the_device(device: str) -> None:
    layer = layer_on(device)
    assert layer.device == "cuda:0" and "device='cuda:0'" in repr(layer)
    check(Torch(), layer, X)


@pytest.mark.parametrize("device", ["cuda:99", "cuda:-1", "cuda:", "gpu", "cuda:0 ", "CUDA"])
def test_devices_that_do_not_exist(device: str) -> None:
    with pytest.raises(ValueError, match="device"):
        layer_on(device)


WAYS: dict[str, Any] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
}


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("path", ["auto", *PATHS])
def test_copies(path: str, way: str) -> None:
    """H5: the same outputs, and independent of the original."""
    case = LayerCase(CASE.b, CASE.scales, np.linspace(-1, 1, N).astype(np.float32), np.ones(N, np.float16))
    layer = layer_on(case=case, path=path)
    x = to_device(X[:8])
    y = layer.forward(x)
    ran = layer.last_path
    made = WAYS[way](layer)
    assert made.device == "cuda:0" and repr(made) == repr(layer) and made.nbytes == layer.nbytes
    assert made.last_path is None
    assert torch.equal(made.forward(x), y) and made.last_path == ran
    for ours, theirs in zip(made.canonical(), layer.canonical(), strict=True):
        assert_same_bits(ours, theirs)
    del layer
    gc.collect()
    assert torch.equal(made.forward(x), y)


def test_copies_keep_replaced_nan_scales() -> None:
    scales = CASE.scales.copy()
    scales[3, 2], scales[5, 0] = 0x7F, 0xFF
    for mode in ("zero", "propagate"):
        layer = fp4linear.Fp4Linear(CASE.b, scales, 1.0, device="cuda", nan_scales=mode)
        made = pickle.loads(pickle.dumps(layer))
        assert_same_bits(made.canonical()[1], scales)
        assert_same_bits(to_host(made.forward(to_device(X))), to_host(layer.forward(to_device(X))))
    with pytest.raises(ValueError, match=r"scales.*2.*NaN.*row 3, block 2"):
        fp4linear.Fp4Linear(CASE.b, scales, 1.0, device="cuda")


# F6 and the other refusals: each raises at the call, and the next call is right.


def refused(layer: fp4linear.Fp4Linear, error: Any, match: str, x: Any, **options: Any) -> None:
    with pytest.raises(error, match=match):
        layer.forward(x, **options)
    torch.cuda.synchronize()
    if layer.device != "cpu":
        check(Torch(), layer, X)


def test_x_on_the_wrong_device(library: Any) -> None:
    refused(layer_on("cpu"), (ValueError, BufferError), r"\bx\b", library.make(X))
    np.testing.assert_array_equal(layer_on("cpu").forward(X), layer_on("cpu").forward(X.copy()))
    on_gpu = layer_on()
    refused(on_gpu, ValueError, r"\bx\b.*cuda:0", X)
    refused(on_gpu, ValueError, r"\bx\b.*cuda:0", torch.from_numpy(X))
    if library.name == "jax":
        refused(on_gpu, (ValueError, BufferError), r"\bx\b", library.jax.device_put(X, library.jax.devices("cpu")[0]))


def test_pinned_memory() -> None:
    """F6: host memory, for a layer on the host; for one on the GPU it is refused by name."""
    pinned = torch.from_numpy(X).pin_memory()
    refused(layer_on(), ValueError, r"\bx\b", pinned)
    host = layer_on("cpu")
    assert torch.equal(host.forward(pinned), host.forward(torch.from_numpy(X)))


def test_managed_memory_of_cupy() -> None:
    """F6: the right answer, or an error that names x. A few kilobytes of it."""
    cupy = pytest.importorskip("cupy")
    memory = cupy.cuda.malloc_managed(X.nbytes)
    x = cupy.ndarray(X.shape, cupy.float16, memory)
    x.set(X)
    layer = layer_on()
    try:
        y = layer.forward(x)
    except (ValueError, BufferError) as error:
        assert "x" in str(error)
    else:
        assert_within_contract(y.get(), CASE.expected(X))
    check(Torch(), layer, X)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int16, torch.uint8, torch.complex64, torch.bool])
def test_wrong_type_of_x(dtype: Any) -> None:
    refused(layer_on(), TypeError, r"\bx\b.*float16.*bfloat16", to_device(X).to(dtype))


@pytest.mark.parametrize("shape", [(9, K // 2), (9, K + 16), (9, 2 * K), (), (K, 9), (0, K + 2)], ids=str)
def test_wrong_shape_of_x(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, dtype=torch.float16, device="cuda")
    refused(layer_on(), ValueError, rf"\bx\b.*{K}", x)


def test_more_axes_than_dlpack_users_have() -> None:
    refused(layer_on(), ValueError, r"\bx\b", to_device(X[:1]).view(1, 1, 1, 1, 1, 1, 1, 1, K))


def test_x_that_requires_grad() -> None:
    layer = layer_on()
    x = to_device(X).requires_grad_()
    for bad in (x, x * 2):
        refused(layer, ValueError, r"x.*grad", bad)
    with torch.no_grad():
        y = layer.forward(x)
    assert torch.equal(y, layer.forward(x.detach())) and not y.requires_grad


def test_fake_and_meta_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    layer = layer_on()
    with FakeTensorMode():
        fake = torch.empty(9, K, dtype=torch.float16, device="cuda")
    refused(layer, TypeError, r"\bx\b", fake)
    refused(layer, ValueError, r"\bx\b.*meta", torch.empty(9, K, dtype=torch.float16, device="meta"))


def test_traced_jax_values() -> None:
    library = Jax()
    layer = layer_on()
    with pytest.raises(TypeError, match=r"\bx\b"):
        library.jax.jit(lambda x: layer.forward(x))(library.make(X))
    check(library, layer, X)


def test_autocast_does_not_change_the_type() -> None:
    """E5."""
    for dtype in ("bfloat16", "float16"):
        for cast in TORCH_DTYPES.values():
            with torch.autocast("cuda", dtype=cast):
                check(Torch(), layer_on(), X.astype(DTYPES[dtype]))


# out=


@each_dtype
@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_out(name: str, dtype: str) -> None:
    library = {"torch": Torch, "cupy": Cupy}[name]()
    layer = layer_on()
    values = X.astype(DTYPES[dtype])
    x = library.make(values)
    nan = np.full((len(X), N), np.nan).astype(DTYPES[dtype])
    out = library.make(nan)
    assert layer.forward(x, out=out) is out
    assert_within_contract(library.host(out), CASE.expected(values))
    around = library.make(np.full((len(X) + 2, N), np.nan).astype(DTYPES[dtype]))  # nothing is written outside
    layer.forward(x, out=around[1:-1])
    assert_same_bits(library.host(around[1:-1]), library.host(out))
    edges = np.stack([library.host(around)[0], library.host(around)[-1]]).astype(np.float64)
    assert np.isnan(edges).all()
    one = library.make(nan)[0]
    layer.forward(x[0], out=one)
    assert_within_contract(library.host(one), CASE.expected(values[0]))


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("m", [1, 8, 64])
def test_out_at_any_address(m: int, offset: int) -> None:
    """N odd too: no row of y starts where 16 bytes do."""
    case = LayerCase(*reference.make(37, K, 3), scale2=0.5)
    layer = layer_on(case=case)
    values = reference.x_of(m, K, 5)
    held = poisoned((m * 37 + 16,), torch.float16)
    out = held[offset : offset + m * 37].view(m, 37)
    layer.forward(to_device(values), out=out)
    assert_within_contract(to_host(out), case.expected(values))
    assert held[:offset].isnan().all() and held[offset + m * 37 :].isnan().all()


def test_out_that_does_not_fit() -> None:
    layer, x = layer_on(), to_device(X)

    def tensor(*shape: int, dtype: Any = torch.float16, device: str = "cuda") -> Any:
        return torch.zeros(shape, dtype=dtype, device=device)

    refused(layer, TypeError, "out", x, out=tensor(9, N, dtype=torch.bfloat16))
    refused(layer, TypeError, "out", x, out=tensor(9, N, dtype=torch.float32))
    for shape in ((9, N + 1), (8, N), (9 * N,), (1, 9, N)):
        refused(layer, ValueError, "out", x, out=tensor(*shape))
    refused(layer, ValueError, "out.*contiguous", x, out=tensor(N, 9).t())
    refused(layer, ValueError, "out.*contiguous", x, out=tensor(9, 2 * N)[:, ::2])
    refused(layer, (TypeError, ValueError), "out", x, out=tensor(9, N, device="cpu"))
    refused(layer, (TypeError, ValueError), "out", x, out=np.zeros((9, N), np.float16))
    refused(layer, (TypeError, ValueError), "out", x, out=tensor(9, N).requires_grad_())
    held = torch.zeros(9 * K + 9 * N, dtype=torch.float16, device="cuda")
    held_x = held[: 9 * K].view(9, K)
    held_x.copy_(x)
    for start in (0, 9 * K - 1, 9 * K - 9 * N):
        refused(layer, ValueError, "out.*overlap", held_x, out=held[start : start + 9 * N].view(9, N))
    layer.forward(held_x, out=held[9 * K :].view(9, N))  # side by side is no overlap
    assert torch.equal(held[9 * K :].view(9, N), layer.forward(x))
    jax = Jax()
    with pytest.raises(ValueError, match="out"):
        layer.forward(jax.make(X), out=jax.make(np.zeros((9, N), np.float16)))


@pytest.mark.parametrize("stream", ["1", 1.5, True, object(), [3]], ids=lambda stream: type(stream).__name__)
def test_streams_that_are_none(stream: Any) -> None:
    refused(layer_on(), TypeError, "stream", to_device(X), stream=stream)


# Layouts that only one library has.


def test_negative_strides_of_cupy() -> None:
    library = Cupy()
    layer = layer_on()
    x = library.make(X)
    for view, values in ((x[::-1], X[::-1]), (x[:, ::-1], X[:, ::-1]), (x[::-2, ::-1], X[::-2, ::-1])):
        assert_within_contract(library.host(layer.forward(view)), CASE.expected(values))


def test_offsets_and_odd_addresses_of_cupy() -> None:
    """D5: from 0 to 17 bytes beside an aligned address."""
    cupy = pytest.importorskip("cupy")
    layer = layer_on()
    memory = cupy.cuda.alloc(X.nbytes + 64)
    for offset in range(18):
        x = cupy.ndarray(X.shape, cupy.float16, memory + offset)
        cupy.cuda.runtime.memcpy(x.data.ptr, X.ctypes.data, X.nbytes, cupy.cuda.runtime.memcpyHostToDevice)
        try:
            y = layer.forward(x)
        except (ValueError, BufferError) as error:
            assert offset % 2 == 1 and "x" in str(error)
        else:
            assert_within_contract(y.get(), CASE.expected(X))
    cupy.cuda.Device().synchronize()


def test_strides_of_axes_of_one() -> None:
    """D3."""
    layer = layer_on()
    want = layer.forward(to_device(X[:6]))
    x = to_device(X[:6])
    odd = torch.as_strided(x, (6, 1, K), (K, 7, 1))
    assert torch.equal(layer.forward(odd)[:, 0], want)
    for strides in ((7, 1), (0, 1)):
        assert torch.equal(layer.forward(torch.as_strided(x, (1, K), strides)), layer.forward(x[:1]))
    assert torch.equal(layer.forward(x[:1].expand(6, K)), layer.forward(x[:1].repeat(6, 1)))
    assert torch.equal(layer.forward(x.view(2, 3, K).transpose(0, 1)), want.view(2, 3, N).transpose(0, 1))


# Ownership.


def test_reference_counts(library: Any) -> None:
    layer = layer_on()
    x = library.make(X)
    outs = [] if library.name == "jax" else [library.make(np.zeros((9, N), np.float16))]
    objects = [x, layer, *outs]
    bad = library.make(X[:, :64].copy())

    def calls() -> None:
        for _ in range(100):
            layer.forward(x)
            for out in outs:
                layer.forward(x, out=out)
            with contextlib.suppress(ValueError):
                layer.forward(bad)

    other = library.make(X[:1].copy())

    def counts() -> list[int]:
        # An x of JAX is kept until the GPU has read it, and let go by a later call.
        torch.cuda.synchronize()
        layer.forward(other)
        gc.collect()
        return [sys.getrefcount(each) for each in objects]

    calls()
    before = counts()
    calls()
    assert counts() == before


def test_results_outlive_the_layer_and_x(library: Any) -> None:
    layer = layer_on()
    x = library.make(X)
    y = layer.forward(x)
    del layer, x
    gc.collect()
    assert_within_contract(library.host(y), CASE.expected(X))


def test_the_capsules_of_other_libraries() -> None:
    """A producer without a library that this one knows gets a DLPack producer back, which torch and CuPy read."""

    class Producer:
        def __init__(self, tensor: Any) -> None:
            self.tensor = tensor

        def __dlpack__(self, **arguments: Any) -> Any:
            return self.tensor.__dlpack__(**arguments)

        def __dlpack_device__(self) -> Any:
            return self.tensor.__dlpack_device__()

    layer = layer_on()
    for dtype in DTYPES:
        if dtype == "float32":
            continue
        values = X.astype(DTYPES[dtype])
        y = layer.forward(Producer(to_device(values)))
        assert y.__dlpack_device__() == (2, 0) and tuple(y.shape) == (9, N)
        tensor = torch.from_dlpack(y)
        assert_within_contract(to_host(tensor), CASE.expected(values))
        del y
        gc.collect()
        assert_within_contract(to_host(tensor), CASE.expected(values))
    unread = layer.forward(Producer(to_device(X)))
    capsule = unread.__dlpack__()
    del unread, capsule  # a capsule that nobody consumed frees its tensor
    with pytest.raises(BufferError):
        layer.forward(Producer(to_device(X))).__dlpack__(dl_device=(1, 0))

"""fp4linear.torch on a GPU: the module, its op, gradients, torch.compile, CUDA graphs, two GPUs."""

from __future__ import annotations

import copy
import importlib.util
import io
import pickle
import shutil
from typing import Any

import numpy as np
import pytest

import fp4linear
from tests import reference
from tests.gpu.device import DEVICE, SPIN, TORCH_DTYPES, each_dtype, to_device, torch
from tests.strategies import LayerCase

pytestmark = pytest.mark.gpu

from fp4linear.torch import Fp4LinearModule, load_model, quantize_model  # noqa: E402
from tests.test_torch_module import same  # noqa: E402
from tests.test_torch_op import gradient_is_right  # noqa: E402

N, K = 96, 256
BIAS = np.linspace(-3, 3, N).astype(np.float32)
CASE = LayerCase(*reference.make(N, K, 61), scale2=0.125, bias=BIAS)
ROWS = np.linspace(0.01, 2, N).astype(np.float32)
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not (shutil.which("cc") or shutil.which("gcc")),
    reason="inductor needs Triton and a C compiler",
)
each_m = pytest.mark.parametrize("m", [1, 8, 33])


def module_of(case: LayerCase = CASE, device: str = DEVICE) -> Fp4LinearModule:
    return Fp4LinearModule.from_parts(
        case.b, case.scales, case.scale2, case.bias, block_size=case.block_size, device=device
    )


def core_of(case: LayerCase = CASE) -> fp4linear.Fp4Linear:
    return fp4linear.Fp4Linear(case.b, case.scales, case.scale2, case.bias, block_size=case.block_size, device=DEVICE)


def some_x(dtype: str = "bfloat16", m: int = 8, k: int = K, seed: int = 62) -> Any:
    values = np.random.default_rng(seed).standard_normal((m, k)).astype(np.float32)
    return to_device(values).to(TORCH_DTYPES[dtype])


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@each_dtype
@each_m
def test_same_bits_as_the_core(m: int, dtype: str) -> None:
    module, x = module_of(), some_x(dtype, m)
    want = core_of().forward(x)
    assert same(module(x), want)
    assert same(torch.ops.fp4linear.linear(x, module._key, module.bias, N, K), want)
    assert same(module(x.view(m, 1, K)), want.view(m, 1, N))


def test_devices() -> None:
    module, x = module_of(device="cpu"), some_x()
    state = module.state_dict()
    assert all(tensor.device.type == "cpu" for tensor in state.values())
    with pytest.raises(ValueError, match=r"x.*cpu"):
        module(x)
    assert module.cuda() is module and module.device == torch.device("cuda", torch.cuda.current_device())
    assert module.bias.device == module.device
    assert same(module(x), core_of().forward(x))
    with pytest.raises(ValueError, match=r"x.*cuda"):
        module(x.cpu())
    on_gpu = module.state_dict()
    assert all(tensor.device.type == "cuda" for tensor in on_gpu.values())
    assert all(same(on_gpu[name].cpu(), state[name]) for name in state)
    fresh = Fp4LinearModule(K, N, device=DEVICE)
    fresh.load_state_dict(state)
    assert fresh.device.type == "cuda" and same(fresh(x), module(x))
    module.to("cpu")
    assert all(same(tensor, state[name]) for name, tensor in module.state_dict().items())
    assert same(module(x.cpu()), module_of(device="cpu")(x.cpu()))
    with torch.device("meta"):
        empty = Fp4LinearModule(K, N)
    empty.load_state_dict(on_gpu, assign=True)
    assert empty.device.type == "cuda" and same(empty(x), fresh(x))


def test_copies() -> None:
    module, x = module_of(), some_x()
    assert same(copy.deepcopy(module)(x), module(x))
    assert same(pickle.loads(pickle.dumps(module))(x), module(x))
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    on_host = torch.load(file, map_location="cpu", weights_only=False)
    assert on_host.device.type == "cpu" and same(on_host(x.cpu()), module_of(device="cpu")(x.cpu()))


def test_a_bias_changed_in_place() -> None:
    module, x = module_of(), some_x()
    with torch.no_grad():
        module.bias.mul_(2)
    assert same(module(x), core_of(LayerCase(CASE.b, CASE.scales, CASE.scale2, 2 * BIAS)).forward(x))


def test_types_and_autocast() -> None:
    module, x = module_of(), some_x().float()
    with pytest.raises(TypeError, match=r"x: expected float16 or bfloat16 on a GPU, got.*float32"):
        module(x)
    for dtype in TORCH_DTYPES.values():
        with torch.autocast("cuda", dtype=dtype):
            assert same(module(x), core_of().forward(x.to(dtype)))


def test_from_linear_and_quantize_model() -> None:
    linear = torch.nn.Linear(K, N, device=DEVICE, dtype=torch.bfloat16)
    q = fp4linear.quantize(linear.weight.detach().float().cpu().numpy())
    want = fp4linear.Fp4Linear(*q, linear.bias.detach().float().cpu().numpy(), device=DEVICE).forward(some_x())
    assert same(Fp4LinearModule.from_linear(linear)(some_x()), want)
    model = torch.nn.Sequential(linear)
    quantize_model(model, progress=False)
    assert same(model(some_x()), want)


def test_load_model() -> None:
    arrays = {"0.weight": CASE.b, "0.weight_scale": CASE.scales, "0.weight_scale_2": np.float32(0.125), "0.bias": BIAS}
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(K, N))
    load_model(model, arrays, device=DEVICE, format="modelopt", progress=False)
    assert model[0].device.type == "cuda" and same(model(some_x()), core_of().forward(some_x()))


# Gradients

GRADIENT_CASES = {
    "one factor": CASE,
    "a factor a row": LayerCase(CASE.b, CASE.scales, ROWS),
    "short last block": LayerCase(reference.make(40, 48, 3)[0][:, :17].copy(), np.full((40, 3), 0x38, np.uint8), 0.5),
}


@each_dtype
@pytest.mark.parametrize("case", GRADIENT_CASES.values(), ids=GRADIENT_CASES)
def test_gradient(case: LayerCase, dtype: str) -> None:
    module = module_of(case)
    x = some_x(dtype, 5, case.in_features).requires_grad_()
    y = module(x)
    assert same(y, module.layer.forward(x.detach()))
    grad = some_x(dtype, 5, case.out_features, 63)
    (got,) = torch.autograd.grad(y, x, grad)
    assert got.device == x.device and got.dtype == x.dtype
    gradient_is_right(got.cpu(), grad.cpu(), case)


@each_dtype
def test_opcheck(dtype: str) -> None:
    module = module_of()
    arguments = (module._key, module.bias, N, K)
    torch.library.opcheck(torch.ops.fp4linear.linear.default, (some_x(dtype), *arguments))
    torch.library.opcheck(torch.ops.fp4linear.linear.default, (some_x(dtype).requires_grad_(), *arguments))
    grad = some_x(dtype, 8, N)
    torch.library.opcheck(torch.ops.fp4linear.linear_grad_x.default, (grad, module._key, N, K))


def test_vmap() -> None:
    x = torch.stack([some_x(seed=seed) for seed in range(3)])
    assert same(torch.func.vmap(module_of())(x), core_of().forward(x))


# torch.compile and CUDA graphs


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_triton)])
def test_compiled(backend: str) -> None:
    module = module_of()
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    for m in (1, 8):
        assert same(compiled(some_x(m=m)), core_of().forward(some_x(m=m)))
    x = some_x().requires_grad_()
    (want,) = torch.autograd.grad(module(x).float().square().sum(), x)
    (got,) = torch.autograd.grad(compiled(x).float().square().sum(), x)
    torch.testing.assert_close(got, want)


@needs_triton
def test_reduce_overhead() -> None:
    cases = [LayerCase(*reference.make(K, K, seed), scale2=0.01, bias=None) for seed in range(4)]
    modules = [module_of(case) for case in cases]
    with torch.inference_mode():
        whole = torch.nn.Sequential(*modules)
        want = whole(some_x())
        compiled = torch.compile(whole, fullgraph=True, mode="reduce-overhead")
        for _ in range(4):
            assert same(compiled(some_x()).clone(), want)
        assert same(compiled(some_x(seed=7)).clone(), whole(some_x(seed=7)))


@needs_triton
def test_equal_blocks_under_reduce_overhead_keep_their_layers() -> None:
    modules = [module_of(LayerCase(*reference.make(N, K, seed), scale2=0.1, bias=BIAS * seed)) for seed in range(4)]
    x = some_x()
    with torch.inference_mode():
        want = [module.layer.forward(x) for module in modules]
        for module in modules:
            module.compile(fullgraph=True, mode="reduce-overhead")
        for _ in range(4):
            for module, expected in zip(modules, want, strict=True):
                torch.compiler.cudagraph_mark_step_begin()
                assert same(module(x).clone(), expected)


@needs_triton
def test_gradients_under_reduce_overhead() -> None:
    module = module_of()  # no eager backward pass before: the first one falls into the warm-up of a graph

    def loss(x: Any) -> Any:
        return module(x).float().square().mean()

    compiled = torch.compile(loss, fullgraph=True, mode="reduce-overhead")
    inputs = [some_x(seed=seed) for seed in range(6)]
    got = []
    for x in inputs:
        leaf = x.clone().requires_grad_()
        compiled(leaf).backward()
        got.append(leaf.grad.clone())
        torch.full((1 << 20,), float("nan"), device=DEVICE)  # over memory that was wrongly let go
    for x, gradient in zip(inputs, got, strict=True):
        leaf = x.clone().requires_grad_()
        loss(leaf).backward()
        torch.testing.assert_close(gradient, leaf.grad, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("case", GRADIENT_CASES.values(), ids=GRADIENT_CASES)
def test_a_first_gradient_is_captured(case: LayerCase) -> None:
    module, x = module_of(case), some_x(k=case.in_features).requires_grad_()
    grad = some_x(m=8, k=case.out_features)
    torch.mm(grad, grad.new_ones((case.out_features, 1)), out_dtype=torch.float32)  # cuBLAS has its workspace
    module(x.detach())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (got,) = torch.autograd.grad(module(x), x, grad)
    got.fill_(float("nan"))
    graph.replay()
    gradient_is_right(got.cpu(), grad.cpu(), case)


@each_m
def test_captured(m: int) -> None:
    module = module_of()
    x = some_x(m=m)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        module(x)
        with torch.cuda.graph(graph):
            y = module(x)
        for seed in range(3):
            x.copy_(some_x(m=m, seed=seed))
            y.fill_(float("nan"))
            graph.replay()
            assert same(y, core_of().forward(x))


def test_a_captured_gradient() -> None:
    module, x, grad = module_of(), some_x().requires_grad_(), some_x(m=8, k=N)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        (want,) = torch.autograd.grad(module(x), x, grad)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (got,) = torch.autograd.grad(module(x), x, grad)
    got.fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(got, want)


def test_streams() -> None:
    module, want = module_of(), core_of().forward(some_x())
    source, x = some_x(), torch.full((8, K), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(SPIN)
        x.copy_(source)
        y = module(x)
    side.synchronize()
    assert same(y, want)


# Two GPUs

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@needs_two
def test_another_gpu() -> None:
    module, x = module_of(), some_x()
    want = module(x)
    module.to("cuda:1")
    assert str(module.device) == "cuda:1" and torch.cuda.current_device() == 0
    y = module(x.to("cuda:1"))
    assert str(y.device) == "cuda:1" and same(y.to("cuda:0"), want)
    with pytest.raises(ValueError, match=r"x.*cuda:1"):
        module(x)


@needs_two
def test_tensor_parallel() -> None:
    from tests import torch_parallel

    torch_parallel.spawn(2, "cuda")

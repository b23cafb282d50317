"""The ops of fp4linear.torch: opcheck, gradients, torch.compile, fake and meta tensors, vmap, tracing."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from tests import reference
from tests.strategies import LayerCase, layers, seeds

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from fp4linear.torch import Fp4LinearModule, _gradient, _layers  # noqa: E402
from tests.test_torch_module import CASE, DTYPES, K, N, core_of, dtypes, module_of, same, some_x  # noqa: E402

linear = torch.ops.fp4linear.linear.default
linear_grad_x = torch.ops.fp4linear.linear_grad_x.default
ROWS = np.linspace(0.01, 2, N).astype(np.float32)
CASES = {
    "one factor": CASE,
    "a factor a row": LayerCase(CASE.b, CASE.scales, ROWS),
    "short last block": LayerCase(*(lambda b: (b, np.full((9, 3), 0x38, np.uint8)))(reference.make(9, 34, 3)[0]), 0.5),
    "blocks of 7": LayerCase(CASE.b, np.full((N, 12), 0x3A, np.uint8), 0.5, CASE.bias, 7),
    "no rows": LayerCase(np.zeros((0, 8), np.uint8), np.zeros((0, 1), np.uint8)),
    "no columns": LayerCase(np.zeros((5, 0), np.uint8), np.zeros((5, 0), np.uint8), 1.0, np.ones(5, np.float32)),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def arguments(module: Fp4LinearModule, x: Any) -> tuple[Any, ...]:
    return x, module._key, module.bias, module.out_features, module.in_features


@dtypes
@each_case
def test_opcheck(case: LayerCase, dtype: str) -> None:
    module = module_of(case)
    for shape in [(3,), (), (2, 1, 2)]:
        x = torch.randn(*shape, case.in_features).to(DTYPES[dtype])
        torch.library.opcheck(linear, arguments(module, x))
        torch.library.opcheck(linear, arguments(module, x.requires_grad_()))
        grad = torch.randn(*shape, case.out_features).to(DTYPES[dtype])
        torch.library.opcheck(linear_grad_x, (grad, module._key, case.out_features, case.in_features))


def test_opcheck_of_a_trained_bias() -> None:
    module = module_of()
    module.bias.requires_grad_()
    torch.library.opcheck(linear, arguments(module, some_x("float32").requires_grad_()))


# Gradients


def gradient_is_right(got: Any, grad: Any, case: LayerCase) -> None:
    """One rounding of float32 sums over N, judged against float64."""
    w = reference.dequantize(case.b, case.scales, case.scale2, case.block_size)
    grad64 = grad.double().numpy()
    want = grad64 @ w
    unit = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}[got.dtype]
    bound = unit * np.abs(want) + 2.0**-15 * (np.abs(grad64) @ np.abs(w)) + 2.0**-25
    with np.errstate(over="ignore"):
        error = np.abs(got.double().numpy() - want)
    assert (error <= bound).all()


@dtypes
@each_case
def test_gradient_of_x(case: LayerCase, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of(case)
    x = torch.randn(2, 3, case.in_features).to(DTYPES[dtype]).requires_grad_()
    y = module(x)
    assert y.requires_grad and same(y, module.layer.forward(x.detach()))
    grad = torch.randn_like(y)
    (whole,) = torch.autograd.grad(y, x, grad, retain_graph=True)
    assert whole.dtype == x.dtype and whole.shape == x.shape
    gradient_is_right(whole, grad, case)
    monkeypatch.setattr(_gradient, "SLAB", 5 * max(1, case.in_features))  # five rows at once
    (in_slabs,) = torch.autograd.grad(y, x, grad, retain_graph=True)
    gradient_is_right(in_slabs, grad, case)
    strided = torch.randn(3, 2, case.out_features).to(DTYPES[dtype]).transpose(0, 1)
    gradient_is_right(torch.autograd.grad(y, x, strided)[0], strided, case)


@given(seed=seeds, case=layers())
@settings(max_examples=30)
def test_gradient_of_any_layer(seed: int, case: LayerCase) -> None:
    factor = np.abs(np.asarray(case.scale2))
    if factor.max(initial=0) > 2.0**30 or factor.min(initial=1) < 2.0**-60:
        return  # float32 sums overflow or vanish
    module = module_of(case)
    x = some_x("float32", 3, case.in_features, seed).requires_grad_()
    grad = some_x("float32", 3, case.out_features, seed + 1)
    gradient_is_right(torch.autograd.grad(module(x), x, grad)[0], grad, case)


def test_gradient_reads_nan_scales_as_the_layer_does() -> None:
    scales = CASE.scales.copy()
    scales[3, 1] = 0x7F
    x = some_x("float32").requires_grad_()
    for nan_scales in ("zero", "propagate"):
        module = Fp4LinearModule.from_parts(CASE.b, scales, 0.5, nan_scales=nan_scales)
        (grad,) = torch.autograd.grad(module(x).nan_to_num().sum(), x, retain_graph=False)
        assert grad[:, 16:32].isnan().all() == (nan_scales == "propagate")
        assert not grad[:, :16].isnan().any()


def test_second_derivative_is_refused() -> None:
    module, x = module_of(), some_x("float32").requires_grad_()
    (grad,) = torch.autograd.grad((module(x) ** 2).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivative only"):
        grad.sum().backward()

    def loss(s: Any) -> Any:
        return module(s * x.detach()).sin().sum()

    grad, vmap, one = torch.func.grad, torch.func.vmap, torch.tensor(1.0)
    for twice in (
        lambda: grad(grad(loss))(one), lambda: torch.func.jacrev(torch.func.jacrev(loss))(one),
        lambda: vmap(grad(grad(loss)))(torch.ones(3)), lambda: grad(lambda s: vmap(grad(loss))(s).sum())(torch.ones(3)),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match="first derivative only"):
            twice()
    # What depends on a first derivative that is a constant has a gradient.
    got = grad(lambda a: a * grad(lambda s: module(s * x.detach()).sum())(one))(one)
    torch.testing.assert_close(got, (x.detach() @ module.dequantize().t()).sum())


def test_forward_mode_is_refused() -> None:
    module, x = module_of(), some_x("float32")
    message = "no forward-mode derivative"
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(module, (x,), (x,))
    with pytest.raises(NotImplementedError, match=message):
        torch.func.hessian(lambda v: module(v).sin().sum())(x[0])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        for call in (module, lambda v: linear(v, module._key, module.bias, N, K)):
            with pytest.raises(NotImplementedError, match=message):
                call(dual)
        assert same(module(x), core_of().forward(x))


def test_no_gradient_is_recorded_where_none_is_wanted() -> None:
    module, x = module_of(), some_x().requires_grad_()
    assert not module(some_x()).requires_grad
    with torch.no_grad():
        assert not module(x).requires_grad
    with torch.inference_mode():
        assert same(module(x), core_of().forward(x.detach()))


def test_a_module_made_in_inference_mode_can_be_trained_through() -> None:
    with torch.inference_mode():
        module = Fp4LinearModule.from_parts(CASE.b, CASE.scales, CASE.scale2)
    x = some_x("float32").requires_grad_()
    module(x).sum().backward()
    assert x.grad is not None


class Lora(torch.nn.Module):
    def __init__(self, base: Fp4LinearModule, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.a = torch.nn.Parameter(torch.randn(rank, base.in_features) / 8)
        self.b = torch.nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Any) -> Any:
        return self.base(x) + x @ self.a.t() @ self.b.t()


@pytest.mark.parametrize("compiled", [False, True])
def test_lora_trains(compiled: bool) -> None:
    torch.manual_seed(0)
    square = LayerCase(*reference.make(64, 64, 5), scale2=0.01)
    model = torch.nn.Sequential(Lora(module_of(square)), torch.nn.ReLU(), Lora(module_of(square)))
    before = copy.deepcopy(model.state_dict())
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    x, target = torch.randn(32, 64), torch.randn(32, 64)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = (run(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    after = model.state_dict()
    frozen = [name for name in before if "weight" in name]
    assert frozen and all(same(after[name], before[name]) for name in frozen)


def test_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    module, x = module_of(), some_x("float32").requires_grad_()
    (want,) = torch.autograd.grad(module(x).square().sum(), x)
    (got,) = torch.autograd.grad(checkpoint(module, x, use_reentrant=False).square().sum(), x)
    assert same(got, want)


# torch.compile

backends = pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])


# inductor in one type only: its C++ takes 20 s to compile in another.
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("eager", "bfloat16"), ("aot_eager", "float32"), ("aot_eager", "bfloat16"), ("inductor", "float32")],
)
def test_compiled(backend: str, dtype: str) -> None:
    model = torch.nn.Sequential(module_of(), torch.nn.ReLU(), torch.nn.Linear(N, 8, dtype=DTYPES[dtype]))
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for m in (5, 1, 6):
        x = some_x(dtype, m)
        hidden = core_of().forward(x).relu()
        torch.testing.assert_close(compiled(x), model[2](hidden))
    only = torch.compile(model[0], fullgraph=True, backend=backend)
    assert same(only(some_x(dtype)), core_of().forward(some_x(dtype)))
    wide = torch.zeros(5, 2 * K, dtype=DTYPES[dtype])[:, ::2]
    assert same(only(wide), core_of().forward(wide))


@backends
def test_compiled_gradients(backend: str) -> None:
    module, x = module_of(), some_x("float32").requires_grad_()
    (want,) = torch.autograd.grad(module(x).sin().sum(), x)
    compiled = torch.compile(lambda x: module(x).sin(), fullgraph=True, backend=backend)
    (got,) = torch.autograd.grad(compiled(x).sum(), x)
    torch.testing.assert_close(got, want)


def test_thirty_equal_blocks_compile_once() -> None:
    class Block(torch.nn.Module):
        def __init__(self, case: LayerCase) -> None:
            super().__init__()
            self.linear = module_of(case)

        def forward(self, x: Any) -> Any:
            return self.linear(x) + 1

    cases = [LayerCase(*reference.make(N, K, seed), scale2=0.5, bias=CASE.bias * seed) for seed in range(30)]
    blocks = [Block(case) for case in cases]
    compilations = []

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    x = some_x()
    for block, case in zip(blocks, cases, strict=True):
        block.compile(fullgraph=True, backend=backend)
        assert same(block(x), core_of(case).forward(x) + 1)
    assert len(compilations) == 1


def test_compiled_code_follows_the_module() -> None:
    module, x = module_of(), some_x()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    compiled(x)
    other = LayerCase(*reference.make(N, K, 77), scale2=2.0, bias=CASE.bias)
    module.load_state_dict(module_of(other).state_dict())
    assert same(compiled(x), core_of(other).forward(x))
    with torch.no_grad():
        module.bias.zero_()
    assert same(compiled(x), core_of(LayerCase(other.b, other.scales, 2.0, 0 * CASE.bias)).forward(x))


def test_compiled_with_dynamic_rows() -> None:
    module = module_of()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (2, 3, 17, 40):
        assert same(compiled(some_x(m=m)), core_of().forward(some_x(m=m)))


def test_compiled_under_autocast() -> None:
    module, x = module_of(), some_x("float32")
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(compiled(x), core_of().forward(x.bfloat16()))
    assert same(compiled(x), core_of().forward(x))


def test_compiled_errors_name_x() -> None:
    compiled = torch.compile(module_of(), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"x: expected shape \[\.\.\., 80\], got \[5, 81\]"):
        compiled(torch.zeros(5, K + 1))


# Other tensors


def test_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    module = module_of()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = module(mode.from_tensor(some_x()))
    assert y.shape == (5, N) and y.dtype == torch.bfloat16 and type(y) is not torch.Tensor


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (lambda: torch.zeros(5, K + 2), ValueError, r"x: expected shape \[\.\.\., 80\], got \[5, 82\]"),
        (lambda: torch.zeros(()), ValueError, r"x: expected shape"),
        (lambda: torch.zeros(5, K).int(), TypeError, r"x: expected float16, bfloat16 or float32, got torch.int32"),
    ],
)  # fmt: skip
def test_meta_and_host_refuse_alike(x: Any, error: type[Exception], message: str) -> None:
    with torch.device("meta"):
        module, on_meta = Fp4LinearModule(K, N), x()
    with pytest.raises(error, match=message):
        module(on_meta)
    with pytest.raises(error, match=r"\bx\b"):
        module_of()(x())


def test_a_meta_x_is_refused_by_a_real_layer() -> None:
    with pytest.raises(ValueError, match="x: a meta tensor holds no data"):
        module_of()(torch.zeros(5, K, device="meta"))


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@dtypes
def test_vmap(dim: int, dtype: str) -> None:
    module = module_of()
    x = torch.randn(4, 3, K).to(DTYPES[dtype])
    if dim == -1:
        got = torch.func.vmap(module, in_dims=-1, out_dims=-1)(x.movedim(0, -1))
        assert same(got.movedim(-1, 0), core_of().forward(x))
        return
    got = torch.func.vmap(module, in_dims=dim)(x.movedim(0, dim))
    assert same(got, core_of().forward(x))


def test_vmap_nested_and_with_chunks() -> None:
    module, x = module_of(), torch.randn(4, 3, K)
    assert same(torch.func.vmap(torch.func.vmap(module))(x), core_of().forward(x))
    torch.testing.assert_close(torch.func.vmap(module, chunk_size=2)(x), core_of().forward(x))


def test_vmap_over_the_bias_is_refused() -> None:
    module = module_of()
    with pytest.raises(ValueError, match="vmap: only x"):
        torch.func.vmap(lambda bias: linear(some_x(), module._key, bias, N, K))(torch.ones(3, N))


def test_functional_gradients() -> None:
    module, x = module_of(), torch.randn(4, K)
    want = torch.stack([torch.autograd.grad(module(row).sin().sum(), row)[0] for row in x.requires_grad_().unbind()])
    got = torch.func.vmap(torch.func.grad(lambda row: module(row).sin().sum()))(x.detach())
    torch.testing.assert_close(got, want)
    jacobian = torch.func.jacrev(module)(torch.randn(K))
    torch.testing.assert_close(jacobian, module.dequantize())


def test_functional_gradients_of_the_op_and_compiled() -> None:
    module, x = module_of(), torch.randn(4, 3, K)

    def loss(v: Any) -> Any:
        return linear(v, module._key, module.bias, N, K).sin().sum()

    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(module(leaf).sin().sum(), leaf)
    of_one, vmap = torch.func.grad(loss), torch.func.vmap
    compiled = torch.compile(
        vmap(torch.func.grad(lambda v: module(v).sin().sum())), fullgraph=True, backend="aot_eager"
    )
    for got in (of_one(x), vmap(of_one)(x), vmap(vmap(of_one))(x), compiled(x)):
        torch.testing.assert_close(got, want)
    vmap(module)(leaf).sin().sum().backward()
    torch.testing.assert_close(leaf.grad, want)
    assert same(torch.compile(vmap(module), fullgraph=True, backend="aot_eager")(x), core_of().forward(x))


def test_functional_gradient_of_the_bias() -> None:
    module, x = module_of(), torch.randn(4, K)
    call = torch.func.functional_call
    gradients = torch.func.grad(lambda biases: call(module, biases, (x,)).sum())({"bias": torch.ones(N)})
    assert same(gradients["bias"], torch.full((N,), 4.0))


def test_gradients_under_autocast() -> None:
    module, x = module_of(), some_x("float32").requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x)
    assert y.dtype == torch.bfloat16
    grad = torch.randn(5, N).bfloat16()
    (got,) = torch.autograd.grad(y, x, grad)
    assert got.dtype == torch.float32
    gradient_is_right(got.bfloat16(), grad, CASE)


def test_dtensors_are_refused() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = DTensor.from_local(some_x(), init_device_mesh("cpu", (1,)), (Replicate(),))
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            module_of()(x)
    finally:
        dist.destroy_process_group()


def test_make_fx_records_the_op() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    module = module_of()
    graph = make_fx(lambda x: module(x))(some_x())
    assert "fp4linear.linear" in graph.code
    other = some_x(seed=99)
    assert same(graph(other), core_of().forward(other))


def test_jit_trace_records_the_op() -> None:
    module, other = module_of(), some_x(seed=99)
    traced = torch.jit.trace(module, some_x(), check_trace=False)
    assert same(traced(other), core_of().forward(other))


def test_dispatch_modes_see_the_op() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        y = module_of()(some_x())
    assert linear in seen and same(y, core_of().forward(some_x()))


def test_subclasses_see_the_op() -> None:
    class Wrapped(torch.Tensor):
        calls: list[Any] = []  # noqa: RUF012

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.calls.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    y = module_of()(some_x().as_subclass(Wrapped))
    assert linear in Wrapped.calls and same(y.as_subclass(torch.Tensor), core_of().forward(some_x()))


def test_a_key_of_nothing_is_refused() -> None:
    for key in (torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.uint8), torch.ones(2, dtype=torch.int64)):
        with pytest.raises(RuntimeError, match="key: no layer of this process"):
            linear(some_x(), key, None, N, K)


def test_a_copied_key_finds_its_layer_and_no_other() -> None:
    modules = [module_of(LayerCase(*reference.make(N, K, seed), scale2=1.0)) for seed in range(4)]
    x = some_x()
    for module in modules:
        for key in (module._key.clone(), module._key.detach(), module._key[:]):
            assert same(linear(x, key, None, N, K), module.layer.forward(x))
    stale = modules[0]._key.clone()
    del module, modules
    with pytest.raises(RuntimeError, match="key: no layer"):
        linear(x, stale, None, N, K)


def test_a_copied_key_at_the_former_address_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (module_of(LayerCase(*reference.make(N, K, seed), scale2=1.0)) for seed in range(2))
    x, former = some_x(), _layers._by_address[first._key.data_ptr()]
    first._key.share_memory_()  # exchanges the storage in place: another tensor may come to its former address
    copied = second._key.clone()
    monkeypatch.setitem(_layers._by_address, copied.data_ptr(), former)
    assert same(linear(x, copied, None, N, K), second.layer.forward(x))
    assert same(first(x), first.layer.forward(x)) and same(linear(x, first._key, None, N, K), first(x))


def test_exported_and_run_here() -> None:
    module, x = module_of(), some_x()
    program = torch.export.export(module, (x,))
    assert same(program.module()(x), core_of().forward(x))


def test_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    module, x = module_of(), some_x("float32")
    with ThreadPoolExecutor(4) as pool:
        for round_ in range(20):
            with torch.no_grad():
                module.bias.fill_(round_)  # all of them find a stale layer
            results = list(pool.map(lambda _: module(x), range(8)))
            want = core_of(LayerCase(CASE.b, CASE.scales, CASE.scale2, np.full(N, round_, np.float32))).forward(x)
            assert all(same(y, want) for y in results)


def test_threads_with_biases_of_their_own() -> None:
    from concurrent.futures import ThreadPoolExecutor

    module, x = module_of(), some_x("float32")
    biases = [torch.full((N,), float(value)) for value in range(4)]
    wants = [core_of(LayerCase(CASE.b, CASE.scales, CASE.scale2, bias.numpy())).forward(x) for bias in biases]

    def run(which: int) -> bool:
        call = torch.func.functional_call
        return all(same(call(module, {"bias": biases[which]}, (x,)), wants[which]) for _ in range(100))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(4)))

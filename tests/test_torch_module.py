"""fp4linear.torch.Fp4LinearModule: state, devices, copies, autocast."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fp4linear
from tests import reference
from tests.strategies import LayerCase, layers, layers_with_nan_scales, seeds

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from fp4linear.torch import Fp4LinearModule  # noqa: E402
from fp4linear.torch._layers import _by_address, _by_serial  # noqa: E402

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
dtypes = pytest.mark.parametrize("dtype", sorted(DTYPES))
N, K = 24, 80
CASE = LayerCase(*reference.make(N, K, 51), scale2=0.125, bias=np.linspace(-3, 3, N).astype(np.float32))


def module_of(case: LayerCase = CASE, **options: Any) -> Fp4LinearModule:
    return Fp4LinearModule.from_parts(
        case.b, case.scales, case.scale2, case.bias, block_size=case.block_size, **options
    )


def core_of(case: LayerCase = CASE, **options: Any) -> fp4linear.Fp4Linear:
    return fp4linear.Fp4Linear(case.b, case.scales, case.scale2, case.bias, block_size=case.block_size, **options)


def some_x(dtype: str = "bfloat16", m: int = 5, k: int = K, seed: int = 52) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((m, k)).astype(np.float32)).to(DTYPES[dtype])


def same(a: Any, b: Any) -> bool:
    """Equal type, shape and bits, NaN included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = (t.detach().contiguous().reshape(-1) for t in (a, b))
    return a.numel() == 0 or torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@given(seed=seeds, case=layers(), dtype=st.sampled_from(sorted(DTYPES)), m=st.integers(0, 9))
def test_same_bits_as_the_core(seed: int, case: LayerCase, dtype: str, m: int) -> None:
    x = some_x(dtype, m, case.in_features, seed)
    assert same(module_of(case)(x), core_of(case).forward(x))


@given(case=layers())
def test_state_dict_is_the_canonical_bytes(case: LayerCase) -> None:
    state = module_of(case).state_dict()
    assert state["weight"].dtype == torch.uint8 and state["weight_scale"].dtype == torch.float8_e4m3fn
    assert state["weight_scale_2"].dtype == torch.float32
    assert np.array_equal(state["weight"].numpy(), case.b)
    assert np.array_equal(state["weight_scale"].view(torch.uint8).numpy(), case.scales)
    scale2 = state["weight_scale_2"].numpy()
    assert np.array_equal(scale2, np.asarray(case.scale2, np.float32).reshape(scale2.shape))
    assert set(state) == {"weight", "weight_scale", "weight_scale_2"} | ({"bias"} if case.bias is not None else set())


@given(seed=seeds, case=layers())
def test_a_state_dict_goes_through_a_file(seed: int, case: LayerCase) -> None:
    file = io.BytesIO()
    module = module_of(case)
    torch.save(module.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    fresh = Fp4LinearModule(case.in_features, case.out_features, case.bias is not None, block_size=case.block_size)
    assert fresh.load_state_dict(state).missing_keys == []
    x = some_x("float32", 3, case.in_features, seed)
    assert same(fresh(x), module(x))
    assert all(same(a, b) for a, b in zip(fresh.state_dict().values(), state.values(), strict=True))


def test_the_safetensors_file_is_one_that_the_loader_reads(tmp_path: Any) -> None:
    save = pytest.importorskip("safetensors.torch").save_file
    case = LayerCase(*reference.make(40, 96, 3), scale2=0.5)
    model = torch.nn.Sequential(module_of(case))
    save(model.state_dict(), tmp_path / "model.safetensors")
    layer = fp4linear.load(tmp_path / "model.safetensors", "0")
    x = some_x(k=96)
    assert same(layer.forward(x), model(x))


def test_from_parts_takes_tensors_and_keeps_the_bias_type() -> None:
    bias = torch.linspace(-1, 1, N, dtype=torch.bfloat16)
    module = Fp4LinearModule.from_parts(torch.from_numpy(CASE.b), torch.from_numpy(CASE.scales), 0.125, bias)
    assert module.bias is not None and module.bias.dtype == torch.bfloat16 and not module.bias.requires_grad
    assert module.bias.data_ptr() != bias.data_ptr()
    x = some_x()
    assert same(module(x), fp4linear.Fp4Linear(CASE.b, CASE.scales, 0.125, bias).forward(x))
    bias.fill_(9)
    assert same(module(x), module.layer.forward(x)) and (module.bias < 2).all()


def test_from_layer_takes_the_layer_itself() -> None:
    layer = core_of(threads=1)
    module = Fp4LinearModule.from_layer(layer)
    assert module.layer is layer
    assert same(module.bias, torch.from_numpy(CASE.bias))
    half = Fp4LinearModule.from_layer(layer, bias_dtype=torch.float16)
    x = some_x()
    rounded = LayerCase(CASE.b, CASE.scales, CASE.scale2, CASE.bias.astype(np.float16))
    assert same(half(x), core_of(rounded).forward(x))


@dtypes
@pytest.mark.parametrize("method", ["max_abs", "four_over_six", "mse"])
@pytest.mark.parametrize("bias", [True, False])
def test_from_linear(dtype: str, method: Any, bias: bool) -> None:
    linear = torch.nn.Linear(K, N, bias=bias, dtype=DTYPES[dtype]).eval()
    module = Fp4LinearModule.from_linear(linear, method=method)
    q = fp4linear.quantize(linear.weight.detach().float().numpy(), method=method)
    x = some_x(dtype)
    want = fp4linear.Fp4Linear(*q, linear.bias.detach() if bias else None).forward(x)
    assert same(module(x), want) and not module.training
    assert module.bias is None if not bias else module.bias.dtype == DTYPES[dtype]


def test_from_linear_refuses() -> None:
    with pytest.raises(ValueError, match="even"):
        Fp4LinearModule.from_linear(torch.nn.Linear(7, 4))
    broken = torch.nn.Linear(8, 4)
    torch.nn.init.constant_(broken.weight, float("nan"))
    with pytest.raises(ValueError, match="finite"):
        Fp4LinearModule.from_linear(broken)
    with pytest.raises(ValueError, match=r"in_features.*even.*7"):
        Fp4LinearModule(7, 4)
    with pytest.raises(ValueError, match=r"out_features.*-1"):
        Fp4LinearModule(8, -1)
    with pytest.raises(TypeError, match=r"options.*expected.*got blocksize"):
        Fp4LinearModule(8, 4, blocksize=16)


@dtypes
def test_leading_axes_and_strides(dtype: str) -> None:
    module, x = module_of(), some_x(dtype, 6)
    want = module(x)
    assert same(module(x.view(2, 3, K)), want.view(2, 3, N))
    assert same(module(x.view(2, 3, K).transpose(0, 1)), want.view(2, 3, N).transpose(0, 1).contiguous())
    assert module(x[0]).shape == (N,) and module(x[:0]).shape == (0, N)


# State


def test_load_state_dict_replaces_the_weight_and_the_bias() -> None:
    other = LayerCase(*reference.make(N, K, 53), scale2=np.linspace(0.1, 1, N).astype(np.float32), bias=-CASE.bias)
    module, x = module_of(), some_x()
    module(x)
    result = module.load_state_dict(module_of(other).state_dict())
    assert result.missing_keys == result.unexpected_keys == []
    assert same(module(x), core_of(other).forward(x))


@pytest.mark.parametrize("name", ["weight", "weight_scale", "weight_scale_2", "bias"])
def test_a_missing_tensor_is_named(name: str) -> None:
    model = torch.nn.Sequential(module_of())
    x, state = some_x(), model.state_dict()
    before = model(x)
    del state["0." + name]
    with pytest.raises(RuntimeError, match=rf'Missing key.*"0\.{name}"'):
        model.load_state_dict(state)
    assert same(model(x), before)


def test_an_unexpected_tensor_is_named_and_input_scale_is_not() -> None:
    model = torch.nn.Sequential(module_of())
    state = model.state_dict()
    model.load_state_dict({**state, "0.input_scale": torch.tensor(1.0)})
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"0\.other"'):
        model.load_state_dict({**state, "0.other": torch.tensor(1.0)})
    no_bias = torch.nn.Sequential(Fp4LinearModule(K, N, bias=False))
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"0\.bias"'):
        no_bias.load_state_dict(state)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("weight", torch.zeros(N, 41, dtype=torch.uint8), r"0\.weight: expected .*uint8 \[24, 40\], got .*\[24, 41\]"),
        ("weight", torch.zeros(N, K), r"0\.weight: expected .*uint8.*, got torch.float32 \[24, 80\].*quantize_model"),
        ("weight_scale", torch.zeros(N, 4).byte(), r"0\.weight_scale: expected .*\[24, 5\], got .*\[24, 4\]"),
        ("weight_scale", torch.full((N, 5), 0x7F, dtype=torch.uint8), r"0: .*NaN"),
        ("weight_scale_2", torch.zeros(3), r"0\.weight_scale_2: expected one factor or \[24\], got shape \[3\]"),
        ("weight_scale_2", torch.tensor(float("inf")), r"0: scale2.*finite"),
        ("bias", torch.zeros(3), r"size mismatch for 0\.bias"),
    ],
)  # fmt: skip
def test_a_wrong_tensor_is_named(name: str, value: Any, message: str) -> None:
    model, x = torch.nn.Sequential(module_of()), some_x()
    before = model(x)
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict({**model.state_dict(), "0." + name: value})
    assert same(model(x), before) or name == "bias"


def test_an_empty_module_says_so() -> None:
    module = Fp4LinearModule(K, N)
    assert "no weight yet" in repr(module)
    with pytest.raises(RuntimeError, match="no weight yet"):
        module(some_x())
    with pytest.raises(RuntimeError, match="no weight yet"):
        torch.ops.fp4linear.linear(some_x(), module._key, module.bias, N, K)
    assert set(module.state_dict()) == {"bias"}
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert "no weight yet" in repr(copied)


def test_from_meta_by_assign() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(Fp4LinearModule(K, N))
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    whole = torch.nn.Sequential(module_of())
    assert {k: (v.shape, v.dtype) for k, v in model.state_dict().items()} == {
        k: (v.shape, v.dtype) for k, v in whole.state_dict().items()
    }
    y = model(torch.empty(3, K, device="meta"))
    assert y.is_meta and y.shape == (3, N)
    with pytest.raises(RuntimeError, match=r"meta device.*assign=True"):
        model.load_state_dict(whole.state_dict())
    model.load_state_dict(whole.state_dict(), assign=True)
    x = some_x()
    assert same(model(x), whole(x)) and model[0].device.type == "cpu"


def test_from_meta_by_to_empty() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(Fp4LinearModule(K, N))
    model.to_empty(device="cpu")
    assert model[0].device.type == "cpu"
    with pytest.raises(RuntimeError, match="no weight yet"):
        model(some_x())
    model.load_state_dict(torch.nn.Sequential(module_of()).state_dict())
    assert same(model(some_x()), core_of().forward(some_x()))


def test_to_meta_drops_the_weight() -> None:
    module = module_of().to("meta")
    assert module.device.type == "meta" and all(t.is_meta for t in module.state_dict().values())
    assert module.state_dict()["weight"].shape == (N, K // 2)


# Types and devices


@pytest.mark.parametrize("change", ["half", "bfloat16", "float", "double", "to", "cpu", "type"])
def test_float_types_change_the_bias_only(change: str) -> None:
    module = module_of()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    dtype = {"half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64, "to": torch.float16,
             "type": torch.float16}.get(change, torch.float32)  # fmt: skip
    arguments = {"to": (torch.float16,), "type": (torch.float16,)}.get(change, ())
    assert getattr(module, change)(*arguments) is module
    assert module.bias is not None and module.bias.dtype == dtype
    assert all(same(module.state_dict()[name], before[name]) for name in before if name != "bias")
    x = some_x()
    rounded = LayerCase(CASE.b, CASE.scales, CASE.scale2, module.bias.detach().float().numpy())
    assert same(module(x), core_of(rounded).forward(x))


def test_moves_that_change_nothing_keep_the_layer() -> None:
    module = module_of()
    layer, key = module.layer, module._key
    assert module.to("cpu").cpu().float().eval().train().requires_grad_(False) is module
    assert module.layer is layer and module._key is key
    module.share_memory()
    assert same(module(some_x()), core_of().forward(some_x()))
    assert module.layer is layer


def test_an_unknown_device_is_refused_and_nothing_moves() -> None:
    module = module_of()
    with pytest.raises(ValueError, match=r"device: expected cpu, cuda or meta"):
        module._apply(lambda tensor: torch.empty_like(tensor, device="meta") if False else _Elsewhere(tensor))
    assert same(module(some_x()), core_of().forward(some_x()))


class _Elsewhere:
    def __init__(self, tensor: Any) -> None:
        self.device = torch.device("xpu", 0)


def test_autocast_casts_x() -> None:
    module, x = module_of(), some_x("float32")
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            for given_type in DTYPES.values():
                y = module(x.to(given_type))
                assert same(y, core_of().forward(x.to(given_type).to(dtype)))
            with torch.autocast("cpu", enabled=False):
                assert module(x).dtype == torch.float32
    assert module(x).dtype == torch.float32


def test_default_device_and_dtype() -> None:
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            module = module_of()
            assert Fp4LinearModule(K, N).bias.dtype == torch.bfloat16
            assert same(module(some_x()), core_of().forward(some_x()))
        assert module.bias.dtype == torch.float32 and module.device.type == "cpu"
    finally:
        torch.set_default_dtype(torch.float32)


# The bias


def test_a_bias_changed_in_place_is_noticed() -> None:
    module, x = module_of(), some_x()
    module(x)
    with torch.no_grad():
        module.bias.mul_(2)
    doubled = LayerCase(CASE.b, CASE.scales, CASE.scale2, 2 * CASE.bias)
    assert same(module(x), core_of(doubled).forward(x))
    module.bias = torch.nn.Parameter(torch.ones(N))
    ones = LayerCase(CASE.b, CASE.scales, CASE.scale2, np.ones(N, np.float32))
    assert same(torch.ops.fp4linear.linear(x, module._key, module.bias, N, K), core_of(ones).forward(x))
    module.bias = None
    none = LayerCase(CASE.b, CASE.scales, CASE.scale2)
    assert same(module(x), core_of(none).forward(x))


def test_a_bias_taken_away_before_a_copy_or_a_move() -> None:
    none, x = LayerCase(CASE.b, CASE.scales, CASE.scale2), some_x()
    for change in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: m.share_memory()):
        module = module_of()
        module.bias = None
        assert same(change(module)(x), core_of(none).forward(x))
    module = Fp4LinearModule.from_layer(core_of())
    module.bias = None
    assert same(module(x), core_of(none).forward(x)) and module.layer.bias is None


def test_equal_bias_keeps_the_layer() -> None:
    module, x = module_of(), some_x()
    layer = module.layer
    module.bias = torch.nn.Parameter(torch.from_numpy(CASE.bias.copy()), requires_grad=False)
    module(x)
    assert module.layer is layer


def test_functional_call_with_other_biases() -> None:
    n = 1 << 18  # so large that an address comes back as soon as it is free
    zeros = np.zeros((n, 1), np.uint8)
    module = Fp4LinearModule.from_parts(zeros, zeros, 1.0, np.zeros(n, np.float32))
    x = torch.ones(2)
    for value in range(20):  # each bias dies after its call, and the next one may lie at its address
        bias = torch.full((n,), float(value))
        y = torch.func.functional_call(module, {"bias": bias}, (x,))
        del bias
        assert (y == value).all()
    assert (module(x) == 0).all()


def test_a_trained_bias() -> None:
    module, x = module_of(), some_x("float32")
    module.bias.requires_grad_()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    module(x).sum().backward()
    assert same(module.bias.grad, torch.full((N,), 5.0))
    optimizer.step()
    moved = LayerCase(CASE.b, CASE.scales, CASE.scale2, module.bias.detach().numpy().copy())
    assert not np.array_equal(moved.bias, CASE.bias)
    assert same(module(x), core_of(moved).forward(x))


# Copies


def test_deepcopy_shares_the_weight_and_not_the_bias() -> None:
    model, x = torch.nn.Sequential(module_of()), some_x()
    other = copy.deepcopy(model)
    assert other[0].layer is model[0].layer
    with torch.no_grad():
        other[0].bias.zero_()
    assert same(model(x), core_of().forward(x))
    assert same(other(x), core_of(LayerCase(CASE.b, CASE.scales, CASE.scale2, 0 * CASE.bias)).forward(x))


@given(seed=seeds, case=st.one_of(layers(), layers_with_nan_scales()))
def test_pickle_and_torch_save(seed: int, case: LayerCase) -> None:
    module = module_of(case, nan_scales="propagate", threads=1, path="cpu_gemv").eval()
    x = some_x("float32", 3, case.in_features, seed)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for copied in (pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False, map_location="cpu")):
        assert same(copied(x), module(x)) and not copied.training
        assert repr(copied.layer) == repr(module.layer)


def test_options_survive_a_state_dict() -> None:
    module = Fp4LinearModule(K, N, path="cpu_gemm", threads=1)
    module.load_state_dict(module_of().state_dict())
    assert "path='cpu_gemm'" in repr(module.layer)
    copied = copy.deepcopy(Fp4LinearModule.from_layer(core_of(path="cpu_gemm")))
    copied.load_state_dict(module_of().state_dict())
    assert "path='cpu_gemm'" in repr(copied.layer)


def test_repr() -> None:
    assert repr(module_of()) == "Fp4LinearModule(in_features=80, out_features=24, bias=True, device='cpu')"


def test_parameters_and_buffers() -> None:
    module = module_of()
    assert [name for name, _ in module.named_parameters()] == ["bias"]
    assert "_key" not in module.state_dict()
    assert not any(parameter.requires_grad for parameter in module.parameters())


def test_layers_go_with_their_modules() -> None:
    gc.collect()
    before = len(_by_address), len(_by_serial)
    modules = [module_of() for _ in range(20)]
    copies = copy.deepcopy(modules)
    assert len(_by_address) == before[0] + 40
    x = some_x("float32").requires_grad_()
    y = modules[0](x)
    del modules, copies
    gc.collect()
    assert len(_by_serial) == before[1] + 1  # the graph of y holds one
    y.sum().backward()
    assert x.grad is not None
    del y
    gc.collect()
    assert (len(_by_address), len(_by_serial)) == before


def test_state_dict_keeps_nothing() -> None:
    module = module_of()
    first = module.state_dict()["weight"]
    first.zero_()
    assert np.array_equal(module.state_dict()["weight"].numpy(), CASE.b)


def test_import_of_the_package_imports_no_torch() -> None:
    code = "import sys, fp4linear; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

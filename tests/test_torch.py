"""PyTorch tensors on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fp4linear
from tests import reference
from tests.strategies import LayerCase, layers, seeds
from tests.tolerance import assert_same_bits, assert_within_contract

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
dtypes = pytest.mark.parametrize("dtype", sorted(DTYPES))
N, K = 24, 64
B, SCALES = reference.make(N, K, 41)


def to_numpy(tensor: Any) -> Any:
    """A tensor's values as NumPy, bf16 as ml_dtypes."""
    import ml_dtypes

    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def some_x(dtype: str = "float16", m: int = 5) -> Any:
    return torch.from_numpy(reference.x_of(m, K, 42)).to(DTYPES[dtype])


def check(layer: fp4linear.Fp4Linear, x: Any) -> Any:
    y = layer.forward(x)
    assert type(y) is torch.Tensor and y.dtype == x.dtype and y.device == x.device and y.is_contiguous()
    assert not y.requires_grad
    assert_within_contract(to_numpy(y), reference.linear(to_numpy(x.detach()), B, SCALES, 0.125))
    return y


@pytest.fixture
def layer() -> fp4linear.Fp4Linear:
    return fp4linear.Fp4Linear(torch.from_numpy(B), torch.from_numpy(SCALES), 0.125)


@dtypes
def test_torch_in_torch_out(layer: fp4linear.Fp4Linear, dtype: str) -> None:
    x = some_x(dtype)
    kept = x.clone()
    y = check(layer, x)
    assert torch.equal(x, kept)
    first = y.clone()
    assert layer.forward(x * 2).data_ptr() != y.data_ptr()
    assert torch.equal(y, first)


@dtypes
@given(seed=seeds, case=layers(), m=st.integers(0, 20))
def test_same_bits_as_numpy(dtype: str, seed: int, case: LayerCase, m: int) -> None:
    values = np.random.default_rng(seed).standard_normal((m, case.in_features)).astype(np.float32)
    x = torch.from_numpy(values).to(DTYPES[dtype])
    layer = fp4linear.Fp4Linear(case.b, case.scales, case.scale2, case.bias, block_size=case.block_size)
    assert_same_bits(to_numpy(layer.forward(x)), layer.forward(to_numpy(x)))


@dtypes
def test_strides(layer: fp4linear.Fp4Linear, dtype: str) -> None:
    wide = torch.full((12, 3 * K), float("nan"), dtype=DTYPES[dtype])
    wide[::2, 5 : 5 + K] = some_x(dtype, 6)
    columns = torch.full((6, 2 * K), float("nan"), dtype=DTYPES[dtype])
    columns[:, ::2] = some_x(dtype, 6)
    for x in (
        wide[::2, 5 : 5 + K], columns[:, ::2], some_x(dtype, 6).t().contiguous().t(), some_x(dtype, 1).expand(6, K),
        some_x(dtype, 6)[3:], some_x(dtype, 6)[2], some_x(dtype, 6).view(2, 3, K).transpose(0, 1),
        some_x(dtype, 6).view(2, 1, 3, K), some_x(dtype, 6)[:0], some_x(dtype, 1)[0, :1].expand(4, K),
    ):  # fmt: skip
        y = check(layer, x)
        assert torch.equal(y, layer.forward(x.contiguous()))


def test_every_form_of_weight_scales_scale2_and_bias() -> None:
    x = some_x()
    want = fp4linear.Fp4Linear(B, SCALES, 0.125, np.ones(N, np.float32)).forward(x)
    b, scales = torch.from_numpy(B), torch.from_numpy(SCALES)
    forms_of_b = [b, b.view(torch.int8), torch.nn.Parameter(b, requires_grad=False)]
    if hasattr(torch, "float4_e2m1fn_x2"):
        forms_of_b.append(b.view(torch.float4_e2m1fn_x2))
    for form in forms_of_b:
        assert torch.equal(fp4linear.Fp4Linear(form, scales, 0.125, torch.ones(N)).forward(x), want)
    for form in (scales.view(torch.float8_e4m3fn), scales.t().contiguous().t()):
        assert torch.equal(fp4linear.Fp4Linear(b, form, 0.125, torch.ones(N)).forward(x), want)
    for scale2 in (torch.tensor(0.125), torch.tensor([0.125]), torch.full((N,), 0.125),
                   torch.nn.Parameter(torch.tensor(0.125)), torch.tensor(0.125, dtype=torch.float64)):  # fmt: skip
        assert torch.equal(fp4linear.Fp4Linear(b, scales, scale2, torch.ones(N)).forward(x), want)
    for dtype in DTYPES.values():
        for bias in (torch.ones(N, dtype=dtype), torch.nn.Parameter(torch.ones(N, dtype=dtype))):
            assert torch.equal(fp4linear.Fp4Linear(b, scales, 0.125, bias).forward(x), want)


def test_autocast_does_not_change_the_type(layer: fp4linear.Fp4Linear) -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        check(layer, some_x("bfloat16"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(layer, some_x("float16"))
        check(layer, some_x("float32"))


@dtypes
def test_x_that_requires_grad_is_refused_while_recording(layer: fp4linear.Fp4Linear, dtype: str) -> None:
    x = some_x(dtype).requires_grad_()
    for bad in (x, x * 2, torch.nn.Parameter(some_x(dtype))):
        with pytest.raises(ValueError, match=r"x.*grad"):
            layer.forward(bad)
    check(layer, x.detach())
    with torch.no_grad():
        check(layer, x)
        check(layer, torch.nn.Parameter(some_x(dtype)))
    with torch.inference_mode():
        check(layer, some_x(dtype) + 0)


def test_tensors_without_memory_of_their_own_are_refused(layer: fp4linear.Fp4Linear) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2, K, dtype=torch.float16)
    for x in (fake, torch.ones(2, K, dtype=torch.float16, device="meta")):
        with pytest.raises((TypeError, ValueError), match=r"\bx\b"):
            layer.forward(x)
        with pytest.raises((TypeError, ValueError), match=r"\bb\b"):
            fp4linear.Fp4Linear(x, SCALES, 1.0)
    check(layer, some_x())


def test_sparse_and_batched_tensors_are_refused(layer: fp4linear.Fp4Linear) -> None:
    for x in (torch.eye(K).to_sparse(), torch.eye(K).to_sparse_csr(), torch.eye(K).to_mkldnn()):
        with pytest.raises((TypeError, ValueError, BufferError), match=r"\bx\b"):
            layer.forward(x)
    with pytest.raises((TypeError, ValueError, BufferError), match=r"\bx\b"):
        torch.vmap(layer.forward)(torch.ones(3, 2, K))
    check(layer, some_x())


def test_lazy_conjugate_and_negative_views(layer: fp4linear.Fp4Linear) -> None:
    for bad in (torch.ones(2, K, dtype=torch.complex64).conj(), torch.ones(2, K, dtype=torch.complex64)):
        with pytest.raises(TypeError, match=r"x.*float16"):
            layer.forward(bad)
    # The imaginary part of a conjugate is a view that negates when it is read.
    values = some_x("float32")
    negative = torch.complex(torch.zeros_like(values), values).conj().imag
    assert negative.is_neg()
    try:
        y = layer.forward(negative)
    except (TypeError, ValueError, BufferError) as error:
        assert "x" in str(error)
    else:
        assert torch.equal(y, layer.forward(-values))
    with pytest.raises(ValueError, match="out"):
        layer.forward(values, out=torch.complex(torch.zeros(5, N), torch.zeros(5, N)).conj().imag)


@pytest.mark.parametrize(
    "dtype", ["float64", "int8", "uint8", "int64", "bool", "complex64", "float8_e4m3fn", "float8_e5m2"]
)
def test_wrong_types_of_x(layer: fp4linear.Fp4Linear, dtype: str) -> None:
    with pytest.raises(TypeError, match=r"\bx\b.*float16.*bfloat16"):
        layer.forward(torch.zeros(2, K).to(getattr(torch, dtype)))
    check(layer, some_x())


@dtypes
def test_out(layer: fp4linear.Fp4Linear, dtype: str) -> None:
    x = some_x(dtype)
    held = torch.full((7, N), float("nan"), dtype=DTYPES[dtype])
    out = held[1:6]
    assert layer.forward(x, out=out) is out
    assert torch.equal(out, layer.forward(x))
    assert held[0].isnan().all() and held[6].isnan().all()


def test_outs_that_do_not_fit() -> None:
    b, scales = reference.make(K, K, 2)
    layer = fp4linear.Fp4Linear(b, scales, 1.0)
    x = some_x()
    outs = [
        torch.zeros(5, K), torch.zeros(4, K, dtype=torch.float16), torch.zeros(K, 5, dtype=torch.float16).t(),
        torch.zeros(5, K, dtype=torch.float16, requires_grad=True),
        torch.zeros(5, K, dtype=torch.float16, device="meta"), torch.zeros(1, K, dtype=torch.float16).expand(5, K), x,
    ]  # fmt: skip
    for out in outs:
        with pytest.raises((TypeError, ValueError, BufferError), match="out"):
            layer.forward(x, out=out)
    assert all((out == 0).all() for out in outs[:4])


def test_numpy_and_torch_mixed(layer: fp4linear.Fp4Linear) -> None:
    x = some_x()
    out = np.zeros((5, N), np.float16)
    assert layer.forward(x, out=out) is out
    assert_same_bits(out, layer.forward(x).numpy())


def test_subclass_of_tensor(layer: fp4linear.Fp4Linear) -> None:
    class Plain(torch.Tensor):
        pass

    x = some_x().as_subclass(Plain)
    y = layer.forward(x)
    assert isinstance(y, torch.Tensor)
    assert torch.equal(y.as_subclass(torch.Tensor), layer.forward(some_x()))


def test_default_device_and_dtype_do_not_matter(layer: fp4linear.Fp4Linear) -> None:
    x, want = some_x("bfloat16"), layer.forward(some_x("bfloat16"))
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        assert torch.equal(layer.forward(x), want)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def test_quantize_takes_tensors() -> None:
    w = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    for dtype in DTYPES.values():
        got, want = fp4linear.quantize(w.to(dtype)), fp4linear.quantize(w.to(dtype).float().numpy())
        assert_same_bits(got.b, want.b)
        assert_same_bits(got.scales, want.scales)
    parameter = fp4linear.quantize(torch.nn.Parameter(w))
    assert_same_bits(parameter.b, fp4linear.quantize(w).b)


def test_nothing_leaks() -> None:
    import gc
    import sys

    layer, x = fp4linear.Fp4Linear(B, SCALES, 0.125), some_x()
    layer.forward(x)
    gc.collect()
    before = sys.getrefcount(x), sys.getrefcount(torch.Tensor)
    for _ in range(300):
        layer.forward(x)
        with pytest.raises(ValueError, match=r"\bx\b"):
            layer.forward(x[:, :3])
    gc.collect()
    assert sys.getrefcount(x) == before[0]
    assert sys.getrefcount(torch.Tensor) < before[1] + 100  # one a call would be 600; others come and go

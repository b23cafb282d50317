"""The ops `fp4linear::linear` and `fp4linear::linear_grad_x` of torch.library.

Defined with Library.define and impl: a call that records nothing costs 8 us of dispatch (torch 2.13, one Zen 4 core),
where torch.library.custom_op costs 12. Both are opaque to the compiler, which needs their fake kernels, gradients and
vmap rules from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from ._gradient import gradient_of_x
from ._layers import holder_of

# What torch's own Python asks before it takes short cuts; bound here, since a call takes microseconds.
_grad_enabled = torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms_active = torch._C._are_functorch_transforms_active
_any_autocast = torch._C._is_any_autocast_enabled
_tracing_state = torch._C._get_tracing_state

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

_library = torch.library.Library("fp4linear", "DEF")
# Any strides do: the core reads them, and the gradient's matmul too.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
_library.define("linear(Tensor x, Tensor key, Tensor? bias, int out_features, int in_features) -> Tensor", tags=_TAGS)
_library.define("linear_grad_x(Tensor grad, Tensor key, int out_features, int in_features) -> Tensor", tags=_TAGS)
linear = torch.ops.fp4linear.linear.default
linear_grad_x = torch.ops.fp4linear.linear_grad_x.default


def _check(name: str, x: Tensor, key: Tensor, features: int) -> None:
    """What the core refuses, said while nothing but shapes and types is known."""
    if x.dtype not in _DTYPES:
        raise TypeError(f"{name}: expected float16, bfloat16 or float32, got {x.dtype}")
    if x.device.type == "cuda" and x.dtype == torch.float32:
        raise TypeError(f"{name}: expected float16 or bfloat16 on a GPU, got {x.dtype}")
    if x.device != key.device:
        raise ValueError(f"{name}: expected a tensor on {key.device}, where the layer is, got one on {x.device}")
    if x.dim() == 0 or x.shape[-1] != features:
        raise ValueError(f"{name}: expected shape [..., {features}], got {list(x.shape)}")


def recording(x: Tensor, bias: Tensor | None) -> bool:
    """True where autograd records the call."""
    return _grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))


def unobserved(x: Tensor) -> bool:
    """True where nothing of torch wants to see the call, gradients aside: the dispatcher may be left out."""
    return (
        type(x) is Tensor
        and not _dispatch_modes()  # FakeTensorMode, make_fx, counters
        and not _function_modes()
        and not _transforms_active()  # vmap, grad
        and forward_ad._current_level < 0  # dual numbers
        and not _any_autocast()
        and _tracing_state() is None
    )


def _run(x: Tensor, key: Tensor, bias: Tensor | None, out_features: int, in_features: int) -> Tensor:
    return holder_of(key).current(bias).forward(x)


def _run_fake(x: Tensor, key: Tensor, bias: Tensor | None, out_features: int, in_features: int) -> Tensor:
    _check("x", x, key, in_features)
    return x.new_empty((*x.shape[:-1], out_features))


def _run_grad_x(grad: Tensor, key: Tensor, out_features: int, in_features: int) -> Tensor:
    _check("grad", grad, key, out_features)
    return gradient_of_x(holder_of(key), grad, in_features)


def _run_grad_x_fake(grad: Tensor, key: Tensor, out_features: int, in_features: int) -> Tensor:
    _check("grad", grad, key, out_features)
    return grad.new_empty((*grad.shape[:-1], in_features))


_library.impl("linear", _run, "CompositeExplicitAutograd")
_library.impl("linear_grad_x", _run_grad_x, "CompositeExplicitAutograd")
torch.library.register_fake("fp4linear::linear", _run_fake, lib=_library)
torch.library.register_fake("fp4linear::linear_grad_x", _run_grad_x_fake, lib=_library)


@contextmanager
def _outer_levels() -> Iterator[None]:
    """Inside forward(), which sees one level of functorch's: let the outer ones record what it calls."""
    if not _transforms_active():
        yield
        return
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        yield


class _Recorded(_SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _, key, bias, ctx.out_features, ctx.in_features = inputs
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(key)
        with _outer_levels(), torch._C._AutoDispatchBelowAutograd():
            y: Tensor = linear(*inputs)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (key,) = ctx.saved_tensors
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = linear_grad_x(grad, key, ctx.out_features, ctx.in_features)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.reshape(-1, ctx.out_features).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return grad_x, None, grad_bias, None, None


class _RecordedGradX(_SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        with _outer_levels(), torch._C._AutoDispatchBelowAutograd():
            grad_x: Tensor = linear_grad_x(*inputs)
        return grad_x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> NoReturn:
        raise NotImplementedError("fp4linear::linear has a first derivative only: its gradient can't be differentiated")


def _refuse_tangents(x: Tensor) -> None:
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise NotImplementedError(
            "fp4linear::linear has no forward-mode derivative: use reverse mode (grad, vjp, jacrev)"
        )


def _record(function: Any, *inputs: Any) -> Tensor:
    if not _transforms_active():
        recorded: Tensor = function.apply(*inputs)
        return recorded
    from torch._functorch.utils import enable_single_level_autograd_function

    with enable_single_level_autograd_function():
        recorded = function.apply(*inputs)
    return recorded


# By hand and not by torch.library.register_autograd, which has no short cut for a call that records nothing.
def _autograd(keys: Any, x: Tensor, key: Tensor, bias: Tensor | None, out_features: int, in_features: int) -> Tensor:
    _refuse_tangents(x)
    if recording(x, bias):
        return _record(_Recorded, x, key, bias, out_features, in_features)
    if unobserved(x) and not x.is_meta:
        return _run(x, key, bias, out_features, in_features)
    y: Tensor = linear.redispatch(keys & torch._C._after_autograd_keyset, x, key, bias, out_features, in_features)
    return y


def _autograd_grad_x(keys: Any, grad: Tensor, key: Tensor, out_features: int, in_features: int) -> Tensor:
    _refuse_tangents(grad)
    if recording(grad, None):
        return _record(_RecordedGradX, grad, key, out_features, in_features)
    y: Tensor = linear_grad_x.redispatch(keys & torch._C._after_autograd_keyset, grad, key, out_features, in_features)
    return y


_library.impl("linear", _autograd, "Autograd", with_keyset=True)
_library.impl("linear_grad_x", _autograd_grad_x, "Autograd", with_keyset=True)


def _vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    # Leading axes are rows anyway: a mapped axis is one more of them.
    x, key, bias, out_features, in_features = args
    _refuse_mapped(in_dims[1:])
    return linear(x.movedim(in_dims[0], 0), key, bias, out_features, in_features), 0


def _vmap_grad_x(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    grad, key, out_features, in_features = args
    _refuse_mapped(in_dims[1:])
    return linear_grad_x(grad.movedim(in_dims[0], 0), key, out_features, in_features), 0


def _refuse_mapped(in_dims: tuple[int | None, ...]) -> None:
    if any(dim is not None for dim in in_dims):
        raise ValueError("vmap: only x can be mapped over; the layer and its bias are one for all")


torch.library.register_vmap("fp4linear::linear", _vmap, lib=_library)
torch.library.register_vmap("fp4linear::linear_grad_x", _vmap_grad_x, lib=_library)


def _autocast(device_type: str) -> None:
    def cast_and_run(x: Tensor, key: Tensor, bias: Tensor | None, out_features: int, in_features: int) -> Tensor:
        if x.is_floating_point() and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(device_type))
        # The bias stays as it is: it is added in float32, before the one rounding.
        with torch.autocast(device_type, enabled=False):
            y: Tensor = linear(x, key, bias, out_features, in_features)
        return y

    _library.impl("linear", cast_and_run, "Autocast" + device_type.upper())


_autocast("cpu")
_autocast("cuda")

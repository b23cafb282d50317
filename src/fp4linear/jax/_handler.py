"""The XLA handler of the compiled core (_core/xla_handler.cpp): its registration and its call."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fp4linear import _core

try:
    import jax.ffi
except ImportError as error:
    raise ImportError(f"fp4linear.jax needs jax 0.5 or later, got {jax.__version__}") from error

_ffi: Any = jax.ffi
_TARGET = "fp4linear_linear"


def _register() -> None:
    """Make XLA know the handlers. They have to name the version of XLA's interface that this jaxlib has."""
    header = Path(_ffi.include_dir()) / "xla/ffi/api/c_api.h"
    versions = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header.read_text()))
    handlers = _core.xla_ffi_handlers(int(versions["MAJOR"]), int(versions["MINOR"]))
    for platform, handler in handlers.items():
        _ffi.register_ffi_target(_TARGET, handler, platform=platform)


_register()


class Call(NamedTuple):
    """What is static in a call."""

    form: str
    path: str
    block_size: int
    batch_invariant: bool


def call_handler(call: Call, x: jax.Array, *arrays: jax.Array) -> jax.Array:
    """y [M, N] of x [M, K] and the weight, scale2, scales (canonical form only) and bias (where there is one)."""
    # With "expand_dims" the handler sees the mapped axes, and makes one call of those along which only x runs.
    call_of = _ffi.ffi_call(_TARGET, _type_of_y(x, arrays[1].shape[0]), vmap_method="expand_dims")
    y: jax.Array = call_of(
        x,
        *arrays,
        form=call.form,
        path=call.path,
        block_size=np.int64(call.block_size),
        batch_invariant=np.int64(call.batch_invariant),
    )
    return y


def varying_axes(x: Any) -> frozenset[Any]:
    """The mesh axes that x varies over, inside a shard_map that keeps account of them."""
    kind = jax.typeof(x) if hasattr(jax, "typeof") else None  # before it, JAX kept none
    manual = getattr(kind, "manual_axis_type", kind)
    axes: frozenset[Any] = getattr(manual, "varying", getattr(manual, "vma", frozenset()))
    return axes


def _type_of_y(x: jax.Array, n: int) -> Any:
    if varying_axes(x):
        return jax.typeof(x).update(shape=(x.shape[0], n))  # varies as x does
    struct: Any = jax.ShapeDtypeStruct
    return struct((x.shape[0], n), x.dtype)

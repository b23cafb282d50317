"""The layer's function and its gradient."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from fp4linear import _core
from fp4linear._libraries import load_cublaslt
from fp4linear.jax._decode import UNIT_BYTES, UNIT_K, UNIT_ROWS, products
from fp4linear.jax._handler import Call, varying_axes
from fp4linear.jax._params import Fp4Params
from fp4linear.jax._partition import call_partitioned

_lax: Any = jax.lax  # not typed, or in some versions only
_DTYPES = ("float16", "bfloat16", "float32")


def linear(
    x: Any, params: Fp4Params, *, path: str = "auto", batch_invariant: bool = False, reduce_over: Any = None
) -> jax.Array:
    """y = x @ W.T + bias with the kernels of Fp4Linear, rounded once from an fp32 sum.

    Works under jit, vmap (over x, over stacked parameters, or both), grad and shard_map. Differentiable with respect to
    x, params.scale2 and params.bias, any number of times in reverse mode; the gradient is a matmul with the dequantised
    weight in plain JAX. The weight's bytes have no gradient. Under jit with sharded arguments and no shard_map, XLA
    splits the call along M and N as x and the parameters are split, and gathers what is split along K.

    Args:
        x: [..., K] float16 or bfloat16, on the CPU float32 too. A 1-D x gives a 1-D y.
        params: the parameters, or inside shard_map a shard of them along N or K.
        path: 'auto' for the ladder, or the name of the path that must run, as of Fp4Linear.
        batch_invariant: a row's result has the same bits whatever M and the other rows are.
        reduce_over: mesh axis (or axes) that params are split over along K, inside shard_map: the shards' results are
            added over it in float32 (psum), then the bias is added, once, and the sum is rounded. Each shard's own
            result was rounded to x's type before.

    Returns:
        y [..., N] of x's type.

    Raises:
        TypeError, ValueError: x or the parameters' arrays do not fit. What only shows when the program runs (the
            platform, a path that cannot run there) is an error of XLA's (jax.errors.JaxRuntimeError).

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np
        >>> from fp4linear.jax import Fp4Params, linear
        >>> params = Fp4Params.from_float(np.eye(32, 64, dtype=np.float32))
        >>> y = jax.jit(linear)(jnp.ones((2, 64), jnp.bfloat16), params)
        >>> y.shape, y.dtype.name, float(y.sum())
        ((2, 32), 'bfloat16', 64.0)
    """
    if not isinstance(params, Fp4Params):
        raise TypeError(f"params: expected Fp4Params, got {type(params).__name__}")
    x = jnp.asarray(x)
    if x.dtype.name not in _DTYPES:
        raise TypeError(f"x: expected float16, bfloat16 or float32, got {x.dtype.name}")
    if params.form == "prepacked" and x.dtype.name == "float32":
        raise TypeError("x: expected float16 or bfloat16 for prepacked parameters (a GPU's), got float32")
    params = _arrays(params)
    _check_shapes(x, params)
    if params.form != "tiled":
        _find_cublaslt()
    call = Call(params.form, path, params.block_size, batch_invariant)
    bias = params.bias
    if reduce_over is None:
        if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((x, params))):
            return _function(call, x, params)  # nothing to differentiate: spares the 200 us that custom_vjp takes
        whole: jax.Array = _linear(call, *_all_varying(x, params))
        return whole
    y = _linear(call, *_all_varying(x, dataclasses.replace(params, bias=None)))
    total: jax.Array = _lax.psum(y.astype(jnp.float32), reduce_over)
    return (total if bias is None else total + bias).astype(x.dtype)


@functools.cache
def _find_cublaslt() -> None:
    # One of the GPU paths needs it, and a wheel of it lies where no loader looks.
    if _core.cuda_info()["devices"]:
        load_cublaslt()


def _arrays(params: Fp4Params) -> Fp4Params:
    """The parameters as JAX arrays of the handler's types: a checkpoint gives NumPy's, a cast 16-bit factors."""

    def as_type(name: str, dtype: Any) -> Any:
        array = getattr(params, name)
        if array is None or (isinstance(array, jax.Array) and array.dtype == dtype):
            return array
        array = jnp.asarray(array)
        if dtype == jnp.uint8 and array.dtype != jnp.uint8:
            raise TypeError(f"params.{name}: expected uint8, got {array.dtype.name}")
        if not jnp.issubdtype(array.dtype, jnp.floating) and dtype == jnp.float32:
            raise TypeError(f"params.{name}: expected float32, got {array.dtype.name}")
        return array.astype(dtype)

    types = {"weight": jnp.uint8, "scales": jnp.uint8, "scale2": jnp.float32, "bias": jnp.float32}
    arrays = {name: as_type(name, dtype) for name, dtype in types.items()}
    if all(arrays[name] is getattr(params, name) for name in arrays):
        return params
    return dataclasses.replace(params, **arrays)


def _check_shapes(x: jax.Array, params: Fp4Params) -> None:
    """The arrays are the layer's, or a shard of whole units of it; else an error that names what does not fit."""
    n, k, block_size, form = params.n, params.k, params.block_size, params.form
    weight, canonical = params.weight, params.form == "canonical"
    rank = 2 if canonical else 3
    if weight.ndim != rank or params.scale2.ndim != 1:
        raise ValueError(
            f"params: expected a weight of {rank} axes and a scale2 of 1, got {weight.shape}, {params.scale2.shape}; "
            "call linear() under jax.vmap for stacked parameters"
        )
    # What these arrays hold, in whole units where they are a shard.
    if canonical:
        own_n, own_k = weight.shape[0], 2 * weight.shape[1]
        whole_k = own_k == k
    else:
        whole_n, whole_k = weight.shape[0] == -(-n // UNIT_ROWS), weight.shape[1] == -(-k // UNIT_K)
        own_n = n if whole_n else weight.shape[0] * UNIT_ROWS
        own_k = k if whole_k else weight.shape[1] * UNIT_K
    if x.ndim == 0 or x.shape[-1] != own_k:
        shard = "" if whole_k else f" (params hold a shard of K = {k})"
        raise ValueError(f"x: expected shape [..., K] with K = {own_k}{shard}, got {x.shape}")
    if canonical and not whole_k and own_k % block_size:
        raise ValueError(
            f"params: a shard of K = {own_k} splits a block of {block_size}: shard along N, or in fewer parts"
        )
    expected: dict[str, tuple[int, ...]] = {"scale2": (own_n,)}
    if params.bias is not None:
        expected["bias"] = (own_n,)
    if canonical:
        expected["scales"] = (own_n, -(-own_k // block_size))
    else:
        expected["weight"] = (weight.shape[0], weight.shape[1], UNIT_BYTES)
    for name, shape in expected.items():
        got = getattr(params, name)
        if got is None or got.shape != shape:
            hint = ""
            if own_n != n and not canonical:
                hint = f"; a shard of N = {n} in the {form} form has to be whole units of {UNIT_ROWS} rows"
            raise ValueError(f"params.{name}: expected shape {shape}, got {None if got is None else got.shape}{hint}")


def _all_varying(x: jax.Array, params: Fp4Params) -> tuple[jax.Array, Fp4Params]:
    """The same values, each typed as varying over every mesh axis that one of them varies over (inside shard_map).

    The transpose of that cast is the psum that the gradient of a value shared by the shards needs.
    """
    leaves, tree = jax.tree.flatten((x, params))
    axes = frozenset[Any]().union(*(varying_axes(leaf) for leaf in leaves))
    if not axes:
        return x, params
    for i, leaf in enumerate(leaves):
        missing = tuple(axes - varying_axes(leaf))
        if missing:
            cast = hasattr(_lax, "pcast")  # jax 0.6 had another name for it
            leaves[i] = _lax.pcast(leaf, missing, to="varying") if cast else _lax.pvary(leaf, missing)
    both: tuple[jax.Array, Fp4Params] = jax.tree.unflatten(tree, leaves)
    return both


def _run(call: Call, x: jax.Array, params: Fp4Params) -> jax.Array:
    leading = x.shape[:-1]
    arrays = [each for each in (params.weight, params.scale2, params.scales, params.bias) if each is not None]
    y = call_partitioned(call, x.reshape(math.prod(leading), x.shape[-1]), *arrays)
    return y.reshape(*leading, y.shape[-1])


def _forward(call: Call, x: jax.Array, params: Fp4Params) -> tuple[jax.Array, tuple[jax.Array, Fp4Params]]:
    return _linear(call, x, params), (x, params)


def _backward(call: Call, kept: tuple[jax.Array, Fp4Params], g: jax.Array) -> tuple[jax.Array, Fp4Params]:
    gradients: tuple[jax.Array, Fp4Params] = _gradients(g, *kept)
    return gradients


def _gradients_of(g: jax.Array, x: jax.Array, params: Fp4Params) -> tuple[jax.Array, Fp4Params]:
    precision = jax.lax.Precision.HIGHEST
    leading = g.shape[:-1]
    rows = g.reshape(math.prod(leading), g.shape[-1])
    weight = products(
        params.weight,
        params.scales,
        n=g.shape[-1],
        k=params.k,
        block_size=params.block_size,
        form=params.form,
        dtype=g.dtype,
    )
    # Factors near 1 keep g in the range of its type, and equal ones leave its bits alone.
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(params.scale2), initial=0.0))
    largest = jnp.where(largest > 0, largest, 1.0)
    scaled = (rows.astype(jnp.float32) * (params.scale2 / largest)).astype(g.dtype)
    of_x = jnp.matmul(scaled, weight, precision=precision, preferred_element_type=jnp.float32) * largest
    of_x = of_x.astype(g.dtype).reshape(*leading, weight.shape[1])

    of_bias = None if params.bias is None else jnp.sum(rows, axis=0, dtype=jnp.float32)
    flat_x = x.reshape(rows.shape[0], weight.shape[1])
    unscaled = jnp.matmul(flat_x, weight.T, precision=precision, preferred_element_type=jnp.float32)
    of_scale2 = jnp.sum(rows.astype(jnp.float32) * unscaled, axis=0)
    return of_x, dataclasses.replace(params, weight=None, scale2=of_scale2, bias=of_bias, scales=None)


# Compiled, so that they are fused, and traced once, where the caller does not compile; XLA drops gradients that nobody
# uses. (No decorators: without JAX's types they would take the functions' own.)
_compiled: Any = jax.jit(_run, static_argnums=0)
_gradients: Any = jax.jit(_gradients_of)


def _function(call: Call, x: jax.Array, params: Fp4Params) -> jax.Array:
    y: jax.Array = _compiled(call, x, params)
    return y


_linear: Any = jax.custom_vjp(_function, nondiff_argnums=(0,))
_linear.defvjp(_forward, _backward)

"""The handler's call under automatic partitioning (jit on sharded arrays): split along M and N as the arrays are.

Along K they are gathered, so that y keeps its one rounding: to add parts is for linear(reduce_over=) in shard_map.
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning

from fp4linear.jax._decode import UNIT_ROWS
from fp4linear.jax._handler import Call, call_handler

# The partitioners' rules in the form of jax 0.7 and later. Before, XLA runs the whole call on every device.
_KNOWN_RULES = "need_replication_factors" in inspect.signature(custom_partitioning.def_partition).parameters


def call_partitioned(call: Call, x: jax.Array, *arrays: jax.Array) -> jax.Array:
    """call_handler() that XLA may split over the devices of a mesh whose axes are automatic."""
    if not _KNOWN_RULES or _others_partition():
        return call_handler(call, x, *arrays)
    y: jax.Array = _mappable(call)(x, *arrays)
    return y


def _others_partition() -> bool:
    """Inside shard_map, or with axes of explicit sharding."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    kinds: tuple[Any, ...] = mesh.axis_types or ()
    return any(kind != jax.sharding.AxisType.Auto for kind in kinds)


@functools.cache
def _mappable(call: Call) -> Any:
    """The call as vmap takes it: custom_partitioning has no rule of its own for that."""

    def run(x: jax.Array, *arrays: jax.Array) -> Any:
        return _partitioned(call, x, *arrays)

    def rule(size: int, mapped: list[bool], x: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, bool]:
        if mapped[0] and not any(mapped[1:]):  # more rows of x
            rows = x.reshape(size * x.shape[1], x.shape[2])
            y: jax.Array = mappable(rows, *arrays)
            return y.reshape(size, x.shape[1], y.shape[1]), True
        axes = [0 if each else None for each in mapped]
        return jax.vmap(functools.partial(call_handler, call), axes)(x, *arrays), True

    mappable: Any = custom_vmap(run)
    mappable.def_vmap(rule)
    return mappable


def _axes(sharding: Any, dimension: int) -> Any:
    spec = getattr(sharding, "spec", ())
    return spec[dimension] if dimension < len(spec) else None


def _whole_shards(mesh: Any, axes: Any, size: int, unit: int) -> bool:
    names = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
    parts: int = math.prod(mesh.shape[name] for name in names)
    return size % (parts * unit) == 0


def _rows_of_a_unit(call: Call) -> int:
    return 1 if call.form == "canonical" else UNIT_ROWS


def _partition(call: Call, mesh: Any, arguments: Any, result: Any) -> Any:
    spec: Any = jax.sharding.PartitionSpec
    m, n = result.shape
    m_axes, n_axes = _axes(result.sharding, 0), _axes(result.sharding, 1)
    m_axes = m_axes if _whole_shards(mesh, m_axes, m, 1) else None
    n_axes = n_axes if _whole_shards(mesh, n_axes, n, _rows_of_a_unit(call)) else None
    specs = [spec(m_axes, None), *(spec(n_axes, *(None,) * (len(each.shape) - 1)) for each in arguments[1:])]
    shardings = tuple(jax.sharding.NamedSharding(mesh, each) for each in specs)

    def lower(*arrays: jax.Array) -> jax.Array:
        return call_handler(call, *arrays)

    return mesh, lower, jax.sharding.NamedSharding(mesh, spec(m_axes, n_axes)), shardings


def _infer(call: Call, mesh: Any, arguments: Any, result: Any) -> Any:
    """For the older of XLA's two partitioners (GSPMD)."""
    spec: Any = jax.sharding.PartitionSpec
    m_axes, n_axes = _axes(arguments[0].sharding, 0), _axes(arguments[2].sharding, 0)
    return jax.sharding.NamedSharding(mesh, spec(m_axes, n_axes if n_axes != m_axes else None))


def _rule(call: Call, mesh: Any, arguments: Any, results: Any) -> tuple[str, dict[str, Any]]:
    """For the newer one (Shardy): which dimensions of the arrays belong together."""
    n = results[0].shape[1]
    sizes: dict[str, Any] = {}
    of_n = "n"
    if call.form == "canonical":
        operands, gathered = ["m k", "n j", "n", "n c"], ["k", "j", "c"]
    elif n % UNIT_ROWS == 0 and n > 0:
        of_n, sizes["r"] = "(t r)", UNIT_ROWS
        operands, gathered = ["m k", "t u b", of_n], ["k", "u", "b", "r"]
    else:
        operands, gathered = ["m k", "t u b", "n"], ["k", "t", "u", "b", "n"]
    operands += [of_n] * (len(arguments) - len(operands))  # the bias
    return ", ".join(operands) + f" -> m {of_n}", {"need_replication_factors": tuple(gathered), **sizes}


_typed: Any = custom_partitioning
_partitioned: Any = _typed(call_handler, static_argnums=(0,))
if _KNOWN_RULES:
    _partitioned.def_partition(_partition, infer_sharding_from_operands=_infer, sharding_rule=_rule)

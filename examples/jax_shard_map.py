"""A tensor-parallel MLP over every device that JAX sees: up split along N, down along K, one psum.

On a machine without several GPUs it runs on four devices that XLA makes of the CPU.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")  # has to be set before JAX starts

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from fp4linear.jax import Fp4Params, linear

try:
    from jax import shard_map
except ImportError:  # before jax 0.7; its replication check knows no custom calls
    import functools

    from jax.experimental.shard_map import shard_map as _shard_map

    shard_map = functools.partial(_shard_map, check_rep=False)

width, hidden = 512, 2048
mesh = Mesh(np.array(jax.devices()), ("tp",))
rng = np.random.default_rng(0)
up = Fp4Params.from_float(rng.standard_normal((hidden, width), dtype=np.float32) / width**0.5)
down = Fp4Params.from_float(
    rng.standard_normal((width, hidden), dtype=np.float32) / hidden**0.5, rng.standard_normal(width, dtype=np.float32)
)


def mlp(x: jax.Array, up: Fp4Params, down: Fp4Params) -> jax.Array:
    """Runs on every device with its shards. The bias of `down` is added once, after the sum over the devices."""
    return linear(jax.nn.silu(linear(x, up)), down, reduce_over="tp")


parallel = jax.jit(
    shard_map(
        mlp,
        mesh=mesh,
        in_specs=(PartitionSpec(), up.partition_specs(out_axis="tp"), down.partition_specs(in_axis="tp")),
        out_specs=PartitionSpec(),
    )
)
shards = up.shard(mesh, out_axis="tp"), down.shard(mesh, in_axis="tp")
x = jnp.asarray(rng.standard_normal((4, width)), jnp.bfloat16)
y = parallel(x, *shards)

whole = linear(jax.nn.silu(linear(x, up)), down)
error = float(jnp.abs(y.astype(jnp.float32) - whole.astype(jnp.float32)).max())
shard = shards[0].weight.addressable_shards[0].data
print(f"{mesh.size} devices ({jax.devices()[0].platform}), each with {shard.shape} of up's {up.weight.shape} units")
print(f"largest difference from one device: {error:.4f}")
assert error < 0.1

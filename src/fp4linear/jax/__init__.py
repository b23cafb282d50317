"""NVFP4 linear layers inside JAX programs: jit, vmap, grad, shard_map, on the CPU and on NVIDIA GPUs::

    params = fp4linear.jax.Fp4Params.from_float(w)
    y = jax.jit(fp4linear.jax.linear)(x, params)

The weight is an argument like any other: a pytree of arrays that can be stacked, sharded and saved. XLA calls the
library's kernels on its own stream. Needs jax 0.5 or later.
"""

from fp4linear.jax._linear import linear
from fp4linear.jax._params import Canonical, Form, Fp4Params

__all__ = ["Canonical", "Form", "Fp4Params", "linear"]

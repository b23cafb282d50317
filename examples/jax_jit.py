"""NVFP4 layers in a jitted JAX model: parameters as a pytree, a scan over stacked layers, gradients through them."""

import jax
import jax.numpy as jnp

from fp4linear.jax import Fp4Params, linear

width, hidden, depth = 256, 512, 4
keys = iter(jax.random.split(jax.random.key(0), 100))


def some_weight(n: int, k: int) -> Fp4Params:
    return Fp4Params.from_float(jax.random.normal(next(keys), (n, k)) / k**0.5)


blocks = [{"up": some_weight(hidden, width), "down": some_weight(width, hidden)} for _ in range(depth)]
stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)  # one array a parameter: [depth, ...]


def block(x: jax.Array, params: dict[str, Fp4Params]) -> jax.Array:
    return x + linear(jax.nn.silu(linear(x, params["up"])), params["down"])


@jax.jit
def model(x: jax.Array, stacked: dict[str, Fp4Params]) -> jax.Array:
    return jax.lax.scan(lambda h, params: (block(h, params), None), x, stacked)[0]


x = jax.random.normal(next(keys), (8, width)).astype(jnp.bfloat16)
y = model(x, stacked)
expected = x
for params in blocks:
    expected = block(expected, params)
print(f"model: {y.shape} {y.dtype} on {jax.devices()[0].platform}, form {blocks[0]['up'].form!r}")
assert jnp.abs(y.astype(jnp.float32) - expected.astype(jnp.float32)).max() < 0.1


# The 4-bit weights stay as they are; a low-rank correction beside one of them is trained.
def loss(lora: tuple[jax.Array, jax.Array], x: jax.Array, target: jax.Array) -> jax.Array:
    a, b = lora
    h = model(x, stacked)  # gradients would pass through it too
    y = linear(h, blocks[0]["up"]) + (h @ a) @ b
    return jnp.mean((y - target).astype(jnp.float32) ** 2)


lora = (
    jax.random.normal(next(keys), (width, 4), jnp.bfloat16) / width**0.5,
    jnp.zeros((4, hidden), jnp.bfloat16),
)
target = jax.random.normal(next(keys), (8, hidden)).astype(jnp.bfloat16)
step = jax.jit(jax.value_and_grad(loss))
losses = []
for _ in range(20):
    value, gradients = step(lora, x, target)
    lora = jax.tree.map(lambda p, g: p - 0.5 * g, lora, gradients)
    losses.append(float(value))
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
assert losses[-1] < losses[0]

"""JAX arrays on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fp4linear
from tests import reference
from tests.child import run_child
from tests.tolerance import assert_same_bits, assert_within_contract

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
pytestmark = pytest.mark.jax


@pytest.fixture(autouse=True)
def arrays_on_the_cpu() -> Iterator[None]:
    """Where JAX sees a GPU, it is not the subject here."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
dtypes = pytest.mark.parametrize("dtype", sorted(DTYPES))
N, K = 24, 64
B, SCALES = reference.make(N, K, 41)


def some_x(dtype: str = "float16", m: int = 5) -> Any:
    return jnp.asarray(reference.x_of(m, K, 42).astype(DTYPES[dtype]))


@pytest.fixture
def layer() -> fp4linear.Fp4Linear:
    return fp4linear.Fp4Linear(jnp.asarray(B), jnp.asarray(SCALES), 0.125)


@dtypes
@pytest.mark.parametrize("m", [0, 1, 5, 40])
def test_jax_in_jax_out(layer: fp4linear.Fp4Linear, dtype: str, m: int) -> None:
    x = some_x(dtype, m)
    kept = np.array(x)
    y = layer.forward(x)
    assert isinstance(y, jax.Array) and y.dtype == x.dtype and y.devices() == x.devices()
    assert_within_contract(np.asarray(y), reference.linear(kept, B, SCALES, 0.125))
    assert_same_bits(np.asarray(x), kept)
    assert_same_bits(np.asarray(y), layer.forward(kept))
    first = np.array(y)
    layer.forward(x * 2)
    assert_same_bits(np.asarray(y), first)
    assert (y + 1).shape == (m, N)  # an array that JAX goes on with


@dtypes
def test_shapes(layer: fp4linear.Fp4Linear, dtype: str) -> None:
    x = some_x(dtype, 12)
    assert layer.forward(x[0]).shape == (N,)
    assert layer.forward(x.reshape(2, 3, 2, K)).shape == (2, 3, 2, N)
    assert_same_bits(np.asarray(layer.forward(x.T.T[::2])), layer.forward(np.array(x[::2])))


def test_every_form_of_weight_scales_scale2_and_bias() -> None:
    x = some_x()
    want = np.asarray(fp4linear.Fp4Linear(B, SCALES, 0.125, np.ones(N, np.float32)).forward(x))
    forms_of_b = [jnp.asarray(B), jnp.asarray(B.view(np.int8))]
    if hasattr(jnp, "float4_e2m1fn"):
        forms_of_b.append(jnp.asarray(reference.codes(B).view(ml_dtypes.float4_e2m1fn)))
    for b in forms_of_b:
        for scales in (jnp.asarray(SCALES), jnp.asarray(SCALES.view(ml_dtypes.float8_e4m3fn))):
            for scale2 in (jnp.float32(0.125), jnp.asarray([0.125]), jnp.full(N, 0.125, jnp.bfloat16)):
                for bias in (jnp.ones(N), jnp.ones(N, jnp.float16), jnp.ones(N, jnp.bfloat16)):
                    y = fp4linear.Fp4Linear(b, scales, scale2, bias).forward(x)
                    assert_same_bits(np.asarray(y), want)


def test_traced_values_are_refused(layer: fp4linear.Fp4Linear) -> None:
    def call(x: Any) -> Any:
        return layer.forward(x).sum()

    for traced in (jax.jit(call), jax.vmap(call), jax.grad(call)):
        with pytest.raises(TypeError, match=r"\bx\b"):
            traced(some_x("float32"))
    with pytest.raises(TypeError, match=r"\bb\b"):
        jax.jit(lambda b: fp4linear.Fp4Linear(b, SCALES, 1.0) and b)(jnp.asarray(B))
    assert layer.forward(some_x()).shape == (5, N)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "bool", "complex64", "float8_e4m3fn", "float8_e5m2"])
def test_wrong_types_of_x(layer: fp4linear.Fp4Linear, dtype: str) -> None:
    with pytest.raises(TypeError, match=r"\bx\b.*float16.*bfloat16"):
        layer.forward(jnp.zeros((2, K), dtype))
    assert layer.forward(some_x()).shape == (5, N)


def test_jax_arrays_are_no_out(layer: fp4linear.Fp4Linear) -> None:
    out = jnp.zeros((5, N), jnp.float16)
    for x in (some_x(), np.array(some_x())):
        with pytest.raises((ValueError, BufferError), match="out"):
            layer.forward(x, out=out)
    assert (out == 0).all()


def test_deleted_arrays_are_refused(layer: fp4linear.Fp4Linear) -> None:
    x = some_x() + 0
    x.delete()
    with pytest.raises((RuntimeError, ValueError, BufferError, TypeError)):
        layer.forward(x)
    assert layer.forward(some_x()).shape == (5, N)


def test_a_result_that_is_still_being_computed(layer: fp4linear.Fp4Linear) -> None:
    big = jnp.ones((800, 800), jnp.float32)
    x = (big @ big @ big)[:5, :K] * 0 + some_x("float32")  # dispatched, not awaited
    assert_same_bits(np.asarray(layer.forward(x)), layer.forward(np.array(some_x("float32"))))


def test_no_devices_but_several_host_ones() -> None:
    """An array on the second host device gives a result there; one spread over two is an error, not a wrong answer."""
    code = """
        import numpy as np, jax, jax.numpy as jnp, fp4linear
        from jax.sharding import Mesh, NamedSharding, PartitionSpec
        from tests import reference
        b, scales = reference.make(24, 64, 41)
        layer = fp4linear.Fp4Linear(b, scales, 0.125)
        x = reference.x_of(4, 64, 1)
        want = layer.forward(x)
        second = jax.device_put(x, jax.devices()[1])
        y = layer.forward(second)
        assert y.devices() == second.devices() and (np.asarray(y) == want).all()
        spread = jax.device_put(x, NamedSharding(Mesh(np.array(jax.devices()), ("d",)), PartitionSpec("d")))
        try:
            y = layer.forward(spread)
        except (ValueError, TypeError, BufferError) as error:
            assert "x" in str(error)
        else:
            assert (np.asarray(y) == want).all()
        print("done")
    """
    assert run_child(code, XLA_FLAGS="--xla_force_host_platform_device_count=2").stdout == "done\n"

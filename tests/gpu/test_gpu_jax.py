"""fp4linear.jax on a GPU: inside XLA's programs, on its stream, in its CUDA graphs."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import fp4linear
from fp4linear import _core
from tests import reference
from tests.child import run_child
from tests.tolerance import assert_same_bits, assert_within_contract

jax = pytest.importorskip("jax")
pytest.importorskip("jax.ffi", reason="fp4linear.jax needs jax 0.5")
jnp = pytest.importorskip("jax.numpy")
fj = pytest.importorskip("fp4linear.jax")
pytestmark = [pytest.mark.gpu, pytest.mark.jax]

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
each_dtype = pytest.mark.parametrize("dtype", sorted(DTYPES))
XlaError = getattr(jax.errors, "JaxRuntimeError", None) or jax.lib.xla_extension.XlaRuntimeError


@functools.cache
def gpus() -> list[Any]:
    try:
        return list(jax.devices("gpu"))
    except RuntimeError as error:
        pytest.skip(f"JAX sees no GPU: {error}")


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Any:
    with jax.default_device(gpus()[0]):
        yield


class Case:
    """A layer whose factors are given row by row, as the parameters hold them, and its parameters on the GPU."""

    def __init__(self, n: int, k: int, form: str = "auto", block_size: int = 16, bias: bool = True) -> None:
        random = np.random.default_rng(n + k)
        self.b = random.integers(0, 256, (n, k // 2), dtype=np.uint8)
        self.scales = random.integers(0x20, 0x59, (n, -(-k // block_size)), dtype=np.uint8)
        self.scale2 = (random.standard_normal(n) * 2.0**-6).astype(np.float32)
        self.bias = random.standard_normal(n).astype(np.float32) if bias else None
        self.k, self.block_size = k, block_size
        self.params = fj.Fp4Params.from_canonical(
            self.b, self.scales, self.scale2, self.bias, block_size=block_size, form=form
        )

    def layer(self, **options: Any) -> fp4linear.Fp4Linear:
        return fp4linear.Fp4Linear(
            self.b, self.scales, self.scale2, self.bias, block_size=self.block_size, device="cuda", **options
        )

    def x(self, *leading: int, dtype: str = "bfloat16", seed: int = 1) -> NDArray:
        return np.random.default_rng(seed).standard_normal((*leading, self.k)).astype(DTYPES[dtype])

    def expected(self, x: NDArray) -> reference.Expected:
        return reference.linear(x, self.b, self.scales, self.scale2, self.bias, block_size=self.block_size)


def host(y: Any) -> NDArray:
    return np.array(y)


@each_dtype
@pytest.mark.parametrize("m", [0, 1, 3, 8, 9, 64, 200])
@pytest.mark.parametrize(("n", "k", "form"), [(64, 256, "auto"), (33, 4096, "auto"), (17, 8256, "auto"),
                                              (40, 96, "canonical"), (64, 256, "canonical")])  # fmt: skip
def test_jit(n: int, k: int, form: str, m: int, dtype: str) -> None:
    case = Case(n, k, form)
    x = case.x(m, dtype=dtype)
    y = jax.jit(fj.linear)(x, case.params)
    assert y.devices() == {gpus()[0]} and y.shape == (m, n)
    assert_within_contract(host(y), case.expected(x))
    assert_same_bits(host(y), host(jax.jit(fj.linear)(x, case.params)))


@each_dtype
@pytest.mark.parametrize("m", [1, 4, 8])
def test_bits_of_the_layers_own_forward(m: int, dtype: str) -> None:
    """The decode paths: the same kernels on the same bytes."""
    case = Case(64, 512)
    x = jnp.asarray(case.x(m, dtype=dtype))
    layer = case.layer(path="gemv_scalar")
    canonical = case.params.to("canonical")
    assert_same_bits(host(fj.linear(x, canonical, path="gemv_scalar")), host(layer.forward(x)))
    assert layer.last_path == "gemv_scalar"
    if case.params.form != "prepacked":
        pytest.skip("this GPU or build has no tensor-core path")
    layer = case.layer(path="gemv_tensor_core")
    assert_same_bits(host(fj.linear(x, case.params, path="gemv_tensor_core")), host(layer.forward(x)))
    assert layer.last_path == "gemv_tensor_core"
    layer = case.layer()
    assert_same_bits(host(fj.linear(x, case.params)), host(layer.forward(x)))


@each_dtype
@pytest.mark.parametrize("block_size", [16, 10, 32])
def test_shapes_that_only_cublas_takes(block_size: int, dtype: str) -> None:
    for k in (2, 130, 320):
        case = Case(31, k, block_size=block_size)
        x = case.x(2, 3, dtype=dtype)
        assert_within_contract(host(jax.jit(fj.linear)(x, case.params)), case.expected(x))


def test_no_input_features_is_the_bias() -> None:
    case = Case(5, 0)
    y = host(jax.jit(fj.linear)(jnp.zeros((3, 0), jnp.float16), case.params))
    assert_same_bits(y, np.broadcast_to(case.bias, (3, 5)).astype(np.float16))


def test_rows_that_start_anywhere() -> None:
    """XLA may pass a slice of a larger array in place."""
    case = Case(64, 256)
    long = np.random.default_rng(2).standard_normal(3 + 8 * 256).astype(np.float16)
    for start in (0, 1, 3):
        x = long[start : start + 8 * 256].reshape(8, 256)
        sliced = jax.jit(lambda a, s, p: fj.linear(jax.lax.dynamic_slice(a, (s,), (8 * 256,)).reshape(8, 256), p))
        assert_within_contract(host(sliced(long, start, case.params)), case.expected(x))


def test_order_with_what_is_before_and_after() -> None:
    case = Case(256, 256, bias=False)
    slow = jnp.ones((4096, 4096), jnp.float32)

    @jax.jit
    def program(slow: Any, x: Any, p: Any) -> Any:
        for _ in range(10):
            slow = slow @ slow * jnp.float32(2.0**-12)  # stays all ones
        x = x * slow[0, 0].astype(x.dtype)
        y = fj.linear(x, p)
        return y, fj.linear(jnp.flip(y, 0), p)

    x = case.x(8)
    first, second = map(host, program(slow, x, case.params))
    assert_within_contract(first, case.expected(x))
    assert_within_contract(second, case.expected(first[::-1].copy()))
    # Between programs.
    y = jax.jit(fj.linear)(jax.jit(lambda s, x: x * (s @ s)[0, 0].astype(x.dtype) / 4096)(slow, x), case.params)
    assert_same_bits(host(y + 0), first)


GRAPHS = """
    import numpy as np, jax, jax.numpy as jnp, fp4linear.jax as fj
    from fp4linear import _core
    from tests import reference
    from tests.tolerance import assert_within_contract
    rng = np.random.default_rng(0)
    layers = 8
    for k, m, form in [(256, 1, "auto"), (256, 64, "auto"), (256, 300, "auto"), (130, 5, "canonical")]:
        b, scales = rng.integers(0, 256, (k, k // 2), np.uint8), rng.integers(0x20, 0x38, (k, -(-k // 16)), np.uint8)
        p = fj.Fp4Params.from_canonical(b, scales, 2.0**-6, form=form)

        @jax.jit
        def chain(x, p):
            seen = [x]
            for _ in range(layers):
                seen.append(jnp.tanh(fj.linear(seen[-1], p)))
            return seen

        w = reference.dequantize(b, scales, 2.0**-6)
        before = _core.xla_handler_calls()
        runs = 40
        for run in range(runs):
            x = rng.standard_normal((m, k)).astype(np.float16)
            seen = [np.array(each).astype(np.float64) for each in chain(x, p)]
            for a, b_ in zip(seen, seen[1:]):
                np.testing.assert_allclose(b_, np.tanh(a @ w.T), atol=4e-3)
        print(k, m, form, _core.xla_handler_calls() - before, "handler calls of", runs * layers)
        if CHECK:
            assert _core.xla_handler_calls() - before < runs * layers, "no call was replayed"
    print("done")
"""


@pytest.mark.parametrize("flags", ["", "--xla_gpu_graph_min_graph_size=1", "--xla_gpu_enable_command_buffer="])
def test_many_calls_with_and_without_command_buffers(flags: str) -> None:
    done = run_child(GRAPHS.replace("CHECK", "False"), XLA_FLAGS=flags, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    assert done.stdout.endswith("done\n")


def test_command_buffers_replay_the_call() -> None:
    """XLA accepts the handler's trait: it captures the call and does not come back for every run."""
    done = run_child(
        GRAPHS.replace("CHECK", "True"),
        XLA_FLAGS="--xla_gpu_graph_min_graph_size=1",
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
    )
    assert done.stdout.endswith("done\n"), done.stdout


def test_vmap() -> None:
    case = Case(64, 256)
    x = case.x(3, 2, 4)
    assert_within_contract(host(jax.vmap(fj.linear, (0, None))(x, case.params)), case.expected(x))
    each = [Case(64, 256, bias=True) for _ in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[c.params for c in each])
    y = host(jax.jit(jax.vmap(fj.linear))(x, stacked))
    for i, c in enumerate(each):
        assert_within_contract(y[i], c.expected(x[i]))


@each_dtype
@pytest.mark.parametrize("form", ["auto", "canonical"])
def test_gradients(form: str, dtype: str) -> None:
    case = Case(64, 256, form)
    x = jnp.asarray(case.x(5, dtype=dtype))
    g = jnp.asarray(np.random.default_rng(4).standard_normal((5, 64)).astype(DTYPES[dtype]))

    @jax.jit
    def gradients(x: Any, p: Any, g: Any) -> Any:
        y, back = jax.vjp(fj.linear, x, p)
        of_x, of_params = back(g)
        return y, of_x, of_params.scale2, of_params.bias

    _, of_x, of_scale2, of_bias = (host(each).astype(np.float64) for each in gradients(x, case.params, g))
    x64, g64 = host(x).astype(np.float64), host(g).astype(np.float64)
    w = reference.dequantize(case.b, case.scales, case.scale2)
    products = reference.products(case.b, case.scales)
    for got, want, magnitude in (
        (of_x, g64 @ w, np.abs(g64) @ np.abs(w)),
        (of_scale2, (g64 * (x64 @ products.T)).sum(0), (np.abs(g64) * (np.abs(x64) @ np.abs(products).T)).sum(0)),
        (of_bias, g64.sum(0), np.abs(g64).sum(0)),
    ):
        assert (np.abs(got - want) <= 2.0**-7 * magnitude).all()


def test_errors_leave_the_next_call_right() -> None:
    case = Case(64, 256)
    x = case.x(2)
    for call, message in [
        (lambda: fj.linear(x.astype(np.float32), case.params.to("canonical")), "float16 or bfloat16"),
        (lambda: fj.linear(x, case.params.to("tiled")), "form='prepacked'"),
        (lambda: fj.linear(x, case.params, path="cpu_gemv"), "the weight is on a GPU"),
        (lambda: fj.linear(x, case.params, path="no_such_path"), "expected auto"),
    ]:
        with pytest.raises(XlaError, match=message):
            jax.block_until_ready(call())
        assert_within_contract(host(fj.linear(x, case.params)), case.expected(x))


def test_parameters_made_on_the_host_for_the_gpu() -> None:
    case = Case(40, 128)
    if case.params.form != "prepacked":
        pytest.skip("this GPU or build has no path that reads the prepacked form")
    layer = case.layer()
    packed_by_the_gpu = layer.canonical()
    assert_same_bits(packed_by_the_gpu[0], case.b)
    assert_same_bits(host(case.params.canonical().b), case.b)
    assert_same_bits(host(fj.Fp4Params.from_layer(layer).weight), host(case.params.weight))
    assert_same_bits(host(case.params.dequantize()), np.asarray(layer.dequantize()), zero_signs=False)


def test_both_platforms_in_one_process() -> None:
    case = Case(40, 128)
    x = case.x(3)
    cpu = jax.devices("cpu")[0]
    there = case.params.to(device=cpu)
    assert there.form == "tiled"
    y = jax.jit(fj.linear)(jax.device_put(x, cpu), there)
    assert y.devices() == {cpu}
    assert_within_contract(host(y), case.expected(x))
    both = case.params.to("canonical")
    for device in (cpu, gpus()[0]):
        y = jax.jit(fj.linear)(jax.device_put(x, device), jax.device_put(both, device))
        assert y.devices() == {device}
        assert_within_contract(host(y), case.expected(x))


def test_two_gpus() -> None:
    if len(gpus()) < 2:
        pytest.skip("needs two GPUs")
    shard_map = pytest.importorskip("jax", minversion="0.7").shard_map
    spec = jax.sharding.PartitionSpec
    mesh = jax.sharding.Mesh(np.array(gpus()[:2]), ("tp",))
    case = Case(64, 512)
    x = case.x(5)
    p = case.params
    columns = shard_map(
        fj.linear, mesh=mesh, in_specs=(spec(), p.partition_specs(out_axis="tp")), out_specs=spec(None, "tp")
    )
    rows = shard_map(
        lambda x, p: fj.linear(x, p, reduce_over="tp"),
        mesh=mesh,
        in_specs=(spec(None, "tp"), p.partition_specs(in_axis="tp")),
        out_specs=spec(),
    )
    y = host(jax.jit(columns)(x, p.shard(mesh, out_axis="tp")))
    assert_within_contract(y, case.expected(x))
    z = host(jax.jit(rows)(x, p.shard(mesh, in_axis="tp"))).astype(np.float64)
    expected = case.expected(x)
    # Each shard rounds its part to bf16, then their sum is rounded.
    assert (np.abs(z - expected.y) <= 2.0**-7 * expected.magnitude + 2.0**-8 * np.abs(expected.y)).all()
    last = jax.jit(fj.linear)(jax.device_put(x, gpus()[1]), jax.device_put(p, gpus()[1]))
    assert last.devices() == {gpus()[1]}
    assert_within_contract(host(last), expected)
    assert _core.xla_handler_calls() > 0

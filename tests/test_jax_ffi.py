"""fp4linear.jax on the host: the handler inside XLA's programs, and every transformation over it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fp4linear
from tests import reference
from tests.child import run_child
from tests.strategies import LayerCase, layers, row_counts
from tests.tolerance import assert_same_bits, assert_within_contract

jax = pytest.importorskip("jax")
pytest.importorskip("jax.ffi", reason="fp4linear.jax needs jax 0.5")
jnp = pytest.importorskip("jax.numpy")
fj = pytest.importorskip("fp4linear.jax")
pytestmark = pytest.mark.jax

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
dtypes = pytest.mark.parametrize("dtype", sorted(DTYPES))
XlaError = getattr(jax.errors, "JaxRuntimeError", None) or jax.lib.xla_extension.XlaRuntimeError

N, K = 24, 128
B, SCALES = reference.make(N, K, 61)
BIAS = np.random.default_rng(62).standard_normal(N).astype(np.float32)
SCALE2 = np.random.default_rng(63).standard_normal(N).astype(np.float32)


@pytest.fixture(autouse=True)
def arrays_on_the_cpu() -> Iterator[None]:
    """Where JAX sees a GPU, it is not the subject here."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture
def params() -> Any:
    return fj.Fp4Params.from_canonical(B, SCALES, SCALE2, BIAS)


def some_x(dtype: str = "float16", *leading: int, seed: int = 64) -> Any:
    values = np.random.default_rng(seed).standard_normal((*leading, K))
    return jnp.asarray(values.astype(DTYPES[dtype]))


def params_of(case: LayerCase, **options: Any) -> Any:
    return fj.Fp4Params.from_canonical(
        case.b, case.scales, case.scale2, case.bias, block_size=case.block_size, **options
    )


# The parameters.


@given(case=layers())
def test_parameters_and_back(case: LayerCase) -> None:
    n = case.out_features
    for form in ("auto", "canonical"):
        params = params_of(case, form=form)
        c = params.canonical()
        assert_same_bits(c.b, case.b)
        assert_same_bits(c.scales, case.scales)
        assert_same_bits(c.scale2, np.broadcast_to(np.asarray(case.scale2, np.float32), (n,)))
        assert (c.bias is None) == (case.bias is None or n == 0)
        if c.bias is not None and case.bias is not None:
            assert_same_bits(c.bias, case.bias.astype(np.float32))


def _values(params: Any, dtype: Any) -> Any:
    from fp4linear.jax._decode import products

    return products(params.weight, params.scales, params.n, params.k, params.block_size, params.form, dtype)


@settings(max_examples=30)
@given(case=layers())
def test_the_weight_in_plain_jax(case: LayerCase) -> None:
    want = reference.products(case.b, case.scales, case.block_size).astype(np.float32)
    forms = ["auto", "canonical"]
    if case.block_size == 16 and case.in_features % 64 == 0 and case.in_features > 0:
        forms.append("prepacked")
    for form in forms:
        params = dataclasses.replace(params_of(case, form=form), scale2=jnp.ones(case.out_features))
        assert_same_bits(np.asarray(params.dequantize()), want, zero_signs=False)
        for dtype in (np.float16, ml_dtypes.bfloat16):
            assert_same_bits(np.asarray(_values(params, dtype)), want.astype(dtype), zero_signs=False)


def test_from_a_layer_from_floats_and_to_a_layer() -> None:
    layer = fp4linear.Fp4Linear(B, SCALES, SCALE2, BIAS)
    params = fj.Fp4Params.from_layer(layer)
    assert (params.out_features, params.in_features, params.block_size, params.form) == (N, K, 16, "tiled")
    x = some_x("bfloat16", 3)
    assert_same_bits(np.asarray(params.layer()(x)), np.asarray(layer(x)))
    assert_same_bits(np.asarray(params.to("canonical").to().weight), np.asarray(params.weight))
    w = np.random.default_rng(1).standard_normal((N, K)).astype(np.float32)
    for method in ("max_abs", "four_over_six"):
        quantized = fj.Fp4Params.from_float(w, method=method)
        assert_same_bits(
            np.asarray(quantized.dequantize()), fp4linear.dequantize(*fp4linear.quantize(w, method=method))
        )
    assert "form='tiled'" in repr(params) and len(repr(params)) < 200


def test_nan_scales() -> None:
    scales = SCALES.copy()
    scales[3, 1], scales[5, 0] = 0x7F, 0xFF
    with pytest.raises(ValueError, match="2 NaN scale"):
        fj.Fp4Params.from_canonical(B, scales, 1.0)
    with pytest.raises(ValueError, match="prepacked form can hold no NaN"):
        fj.Fp4Params.from_canonical(B, scales, 1.0, nan_scales="propagate", form="prepacked")
    x = some_x("bfloat16", 2)
    y = np.asarray(fj.linear(x, fj.Fp4Params.from_canonical(B, scales, 1.0, nan_scales="propagate")))
    assert np.isnan(y).any(axis=0).tolist() == [n in (3, 5) for n in range(N)]
    zero = fj.Fp4Params.from_canonical(B, scales, 1.0, nan_scales="zero")
    want = fp4linear.Fp4Linear(B, scales, 1.0, nan_scales="zero")(x)
    assert_same_bits(np.asarray(fj.linear(x, zero)), np.asarray(want))
    assert zero.canonical().scales[3, 1] == 0


def test_bad_parameters() -> None:
    with pytest.raises(ValueError, match="form"):
        fj.Fp4Params.from_canonical(B, SCALES, 1.0, form="wgmma")
    with pytest.raises(ValueError, match="block_size"):
        fj.Fp4Params.from_canonical(B, np.zeros((N, 13), np.uint8), 1.0, block_size=10, form="tiled")
    with pytest.raises(ValueError, match=r"\bscales\b"):
        fj.Fp4Params.from_canonical(B, SCALES[:, 1:], 1.0)
    with pytest.raises(ValueError, match="finite"):
        fj.Fp4Params.from_canonical(B, SCALES, float("inf"))


def test_parameters_that_were_saved_or_cast(params: Any) -> None:
    x = some_x("bfloat16", 3)
    want = np.asarray(fj.linear(x, params))
    on_the_host = jax.tree.map(np.asarray, params)
    assert_same_bits(np.asarray(fj.linear(x, on_the_host)), want)
    leaves, tree = jax.tree.flatten(params)
    assert_same_bits(np.asarray(fj.linear(x, jax.tree.unflatten(tree, leaves))), want)
    halved = dataclasses.replace(params, bias=params.bias.astype(jnp.bfloat16))
    rounded = dataclasses.replace(params, bias=params.bias.astype(jnp.bfloat16).astype(jnp.float32))
    assert_same_bits(np.asarray(jax.jit(fj.linear)(x, halved)), np.asarray(fj.linear(x, rounded)))
    gradient = jax.grad(lambda b: fj.linear(x, dataclasses.replace(params, bias=b)).astype(jnp.float32).sum())(
        halved.bias
    )
    assert gradient.dtype == jnp.bfloat16 and (gradient == 3).all()


# The call. XLA compiles every example.


@settings(max_examples=30)
@given(case=layers(), m=row_counts, dtype=st.sampled_from(sorted(DTYPES)), seed=st.integers(0, 99))
def test_bits_of_the_layers_own_forward(case: LayerCase, m: int, dtype: str, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((m, case.in_features)).astype(DTYPES[dtype])
    y = np.asarray(fj.linear(x, params_of(case)))
    layer = fp4linear.Fp4Linear(case.b, case.scales, case.scale2, case.bias, block_size=case.block_size)
    assert_same_bits(y, layer(x))
    assert_within_contract(y, case.expected(x))
    assert_within_contract(np.asarray(fj.linear(x, params_of(case, form="canonical"))), case.expected(x))


@dtypes
@pytest.mark.parametrize("leading", [(), (1,), (5,), (2, 3), (0,), (2, 0, 3), (70,)])
def test_jit(params: Any, dtype: str, leading: tuple[int, ...]) -> None:
    x = some_x(dtype, *leading)
    kept = np.array(x)
    want = params.layer()(kept)
    closed_over = jax.jit(lambda x, _: fj.linear(x, params))
    for call in (fj.linear, jax.jit(fj.linear), closed_over):
        y = call(x, params)
        assert isinstance(y, jax.Array) and y.dtype == x.dtype
        assert_same_bits(np.asarray(y), want)
    assert_same_bits(np.asarray(x), kept)


def test_inside_a_larger_program(params: Any) -> None:
    """What XLA computes before and after, loops over stacked layers, branches, remat, donated x."""
    x = some_x("float32", 4)
    square = fj.Fp4Params.from_float(np.random.default_rng(2).standard_normal((K, K)).astype(np.float32) / 12)
    layer = square.layer()
    want = np.asarray(x)
    for _ in range(3):
        want = np.tanh(layer(want))
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), square)

    def scanned(x: Any, stacked: Any) -> Any:
        return jax.lax.scan(lambda h, p: (jnp.tanh(fj.linear(h, p)), None), x, stacked)[0]

    np.testing.assert_allclose(np.asarray(jax.jit(scanned)(x, stacked)), want, rtol=1e-5, atol=1e-5)
    branch = jax.jit(lambda flag, x: jax.lax.cond(flag, lambda x: fj.linear(x, params), lambda x: x[:, :N], x))
    assert_same_bits(np.asarray(branch(True, x)), params.layer()(np.asarray(x)))
    remat = jax.grad(lambda x: jax.checkpoint(fj.linear)(x, params).sum())(x)
    assert_same_bits(np.asarray(remat), np.asarray(jax.grad(lambda x: fj.linear(x, params).sum())(x)))
    donated = jax.jit(fj.linear, donate_argnums=0)(jnp.tanh(some_x("float32", 4)), square)  # y fits into x's memory
    assert_same_bits(np.asarray(donated), layer(np.asarray(jnp.tanh(some_x("float32", 4)))))


def test_paths_and_batch_invariance(params: Any) -> None:
    x = some_x("bfloat16", 5)
    for path in ("cpu_gemv", "cpu_gemm"):
        assert_same_bits(np.asarray(fj.linear(x, params, path=path)), np.asarray(params.layer(path=path)(x)))
    call = jax.jit(fj.linear, static_argnames=("path", "batch_invariant"))
    many = np.asarray(call(some_x("bfloat16", 64), params, batch_invariant=True))
    one = np.asarray(call(some_x("bfloat16", 64)[:1], params, batch_invariant=True))
    assert_same_bits(many[:1], one)


def test_one_compilation_serves_all_layers_of_a_shape(params: Any) -> None:
    traces = []

    @jax.jit
    def call(x: Any, p: Any) -> Any:
        traces.append(1)
        return fj.linear(x, p)

    other = fj.Fp4Params.from_canonical(B[::-1], SCALES[::-1], 2.0, BIAS)
    x = some_x("float16", 2)
    assert_same_bits(np.asarray(call(x, params)), np.asarray(params.layer()(x)))
    assert_same_bits(np.asarray(call(x, other)), np.asarray(other.layer()(x)))
    assert len(traces) == 1


def test_exported_programs(params: Any) -> None:
    export = pytest.importorskip("jax.export")
    leaves, tree = jax.tree.flatten(params)
    call = jax.jit(lambda x, *leaves: fj.linear(x, jax.tree.unflatten(tree, leaves)))
    checks = [export.DisabledSafetyCheck.custom_call("fp4linear_linear")]
    (m,) = export.symbolic_shape("m")
    program = export.export(call, disabled_checks=checks)(jax.ShapeDtypeStruct((m, K), jnp.float16), *leaves)
    for rows in (1, 7):
        x = some_x("float16", rows)
        assert_same_bits(np.asarray(program.call(x, *leaves)), np.asarray(params.layer()(x)))


def test_many_calls_from_many_threads(params: Any) -> None:
    code = """
        import threading, numpy as np, jax, fp4linear.jax as fj
        jax.config.update("jax_platforms", "cpu")
        rng = np.random.default_rng(0)
        p = fj.Fp4Params.from_float(rng.standard_normal((80, 256)).astype(np.float32))
        call = jax.jit(fj.linear)
        xs = [rng.standard_normal((m, 256)).astype(np.float16) for m in (1, 2, 7, 40)]
        want = [p.layer()(x) for x in xs]
        wrong = []
        def work(i):
            for _ in range(50):
                if not (np.asarray(call(xs[i % 4], p)) == want[i % 4]).all():
                    wrong.append(i)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        [t.start() for t in threads]; [t.join() for t in threads]
        print(wrong)
    """
    assert run_child(code).stdout == "[]\n"


# vmap.


@dtypes
def test_vmap_over_x_is_more_rows(params: Any, dtype: str) -> None:
    x = some_x(dtype, 3, 2, 4)
    want = params.layer()(np.asarray(x))
    mapped = jax.vmap(fj.linear, (0, None))
    assert_same_bits(np.asarray(mapped(x, params)), want)
    assert_same_bits(np.asarray(jax.jit(jax.vmap(mapped, (0, None)))(x, params)), want)
    moved = jax.vmap(fj.linear, (2, None), 1)(x, params)
    assert moved.shape == (3, 4, 2, N)
    assert_same_bits(np.asarray(moved), np.asarray(fj.linear(jnp.moveaxis(x, 2, 1), params)))
    assert jax.vmap(fj.linear, (0, None))(x[:0], params).shape == (0, 2, 4, N)


def test_vmap_over_parameters() -> None:
    """Experts: stacked parameters, with one x for all, an x each, and both nested."""
    cases = [LayerCase(*reference.make(N, K, seed), scale2=0.5, bias=BIAS * seed) for seed in (1, 2, 3)]
    each = [params_of(case) for case in cases]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    x = some_x("bfloat16", 3, 5)
    want = np.stack([np.asarray(p.layer()(x[i])) for i, p in enumerate(each)])
    assert_same_bits(np.asarray(jax.jit(jax.vmap(fj.linear))(x, stacked)), want)
    shared = np.stack([np.asarray(p.layer()(x[0])) for p in each])
    assert_same_bits(np.asarray(jax.vmap(fj.linear, (None, 0))(x[0], stacked)), shared)
    grid = jax.vmap(jax.vmap(fj.linear, (None, 0)), (0, None))(x, stacked)
    assert_same_bits(np.asarray(grid), np.stack([[np.asarray(p.layer()(row)) for p in each] for row in x]))
    swapped = jax.vmap(jax.vmap(fj.linear, (0, None)), (None, 0))(x, stacked)
    assert_same_bits(np.asarray(swapped), np.asarray(grid).swapaxes(0, 1))
    no_bias = dataclasses.replace(stacked, bias=None)
    one_bias = jax.vmap(lambda x, p, bias: fj.linear(x, dataclasses.replace(p, bias=bias)), (0, 0, None))
    assert_same_bits(
        np.asarray(one_bias(x, no_bias, jnp.asarray(BIAS))),
        np.stack([np.asarray(params_of(dataclasses.replace(c, bias=BIAS)).layer()(x[i])) for i, c in enumerate(cases)]),
    )
    with pytest.raises(ValueError, match="vmap"):
        fj.linear(x[0], stacked)


# grad.


def dense(x: Any, params: Any) -> Any:
    """The same function in plain JAX, which differentiates itself."""
    y = jnp.matmul(x.astype(jnp.float32), params.dequantize().T, precision="highest")
    return y if params.bias is None else y + params.bias


def with_factors(params: Any, scale2: Any, bias: Any) -> Any:
    return dataclasses.replace(params, scale2=scale2, bias=bias)


def close(a: Any, b: Any, tolerance: float) -> None:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape and np.abs(a - b).max() <= tolerance * np.abs(b).max()


@pytest.mark.parametrize("form", ["tiled", "canonical"])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_gradients(form: str, jit: bool) -> None:
    params = fj.Fp4Params.from_canonical(B, SCALES, SCALE2, BIAS, form=form)
    x = some_x("float32", 2, 3)
    weigh = jnp.asarray(np.random.default_rng(3).standard_normal((2, 3, N)), jnp.float32)

    def loss(function: Any) -> Any:
        return lambda x, scale2, bias: (weigh * jnp.sin(function(x, with_factors(params, scale2, bias)) / 50)).sum()

    ours, theirs = (jax.grad(loss(f), (0, 1, 2)) for f in (fj.linear, dense))
    if jit:
        ours = jax.jit(ours)
    for got, want in zip(ours(x, params.scale2, params.bias), theirs(x, params.scale2, params.bias), strict=True):
        close(got, want, 1e-4)
    twice = [
        jax.grad(lambda x, f=f: (jax.grad(loss(f))(x, params.scale2, params.bias) ** 2).sum())(x)
        for f in (fj.linear, dense)
    ]
    close(*twice, 1e-3)
    mixed = [
        jax.grad(lambda s, f=f: (jax.grad(loss(f))(x, s, params.bias) ** 2).sum())(params.scale2)
        for f in (fj.linear, dense)
    ]
    close(*mixed, 1e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scale2", [2.0**-13, SCALE2 * 2.0**-13, 0.0], ids=["one", "rows", "zero"])
def test_gradients_in_16_bits(dtype: str, scale2: Any) -> None:
    """The factors are small: multiplied into a 16-bit gradient they would drown in its subnormals."""
    params = fj.Fp4Params.from_canonical(B, SCALES, scale2)
    x = some_x(dtype, 6)
    g = jnp.asarray(np.random.default_rng(4).standard_normal((6, N)).astype(DTYPES[dtype]))
    (got, _) = jax.vjp(fj.linear, x, params)[1](g)
    assert got.dtype == x.dtype
    w = reference.dequantize(B, SCALES, scale2)
    want = np.asarray(g).astype(np.float64) @ w
    bound = 2.0**-7 * (np.abs(np.asarray(g).astype(np.float64)) @ np.abs(w))
    assert (np.abs(np.asarray(got).astype(np.float64) - want) <= bound + 2.0**-24).all()


def test_gradient_of_vmapped_experts() -> None:
    each = [fj.Fp4Params.from_canonical(*reference.make(N, K, seed), SCALE2, BIAS) for seed in (1, 2, 3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    x = some_x("float32", 3, 4)

    def loss(function: Any) -> Any:
        def of(x: Any, scale2: Any, bias: Any) -> Any:
            return (jax.vmap(function)(x, with_factors(stacked, scale2, bias)) ** 2).sum()

        return of

    ours, theirs = (jax.jit(jax.grad(loss(f), (0, 1, 2))) for f in (fj.linear, dense))
    arguments = (x, stacked.scale2, stacked.bias)
    for got, want in zip(ours(*arguments), theirs(*arguments), strict=True):
        close(got, want, 1e-4)


def test_the_bytes_have_no_gradient_and_forward_mode_says_no(params: Any) -> None:
    x = some_x("float32", 2)
    with pytest.raises(TypeError, match="uint8"):
        jax.grad(lambda p: fj.linear(x, p).sum())(params)
    gradient = jax.grad(lambda p: fj.linear(x, p).sum(), allow_int=True)(params)
    assert gradient.weight.dtype == jax.dtypes.float0 and gradient.bias.shape == (N,)
    close(gradient.bias, np.full(N, 2.0), 1e-6)
    with pytest.raises(TypeError, match=r"jvp|forward-mode"):
        jax.jvp(lambda x: fj.linear(x, params), (x,), (x,))


# What does not fit.


def test_wrong_arguments(params: Any) -> None:
    x = some_x("float16", 2)
    for bad, error, message in [
        (some_x("float16", 2)[:, 1:], ValueError, r"x: expected shape \[..., K\] with K = 128, got \(2, 127\)"),
        (jnp.float16(1), ValueError, "x: expected shape"),
        (jnp.ones((2, K), jnp.int8), TypeError, "x: expected float16.*got int8"),
        (jnp.ones((2, K), jnp.float8_e4m3fn), TypeError, "x: expected float16"),
    ]:
        with pytest.raises(error, match=message):
            fj.linear(bad, params)
    with pytest.raises(TypeError, match="params: expected Fp4Params, got tuple"):
        fj.linear(x, (B, SCALES))
    prepacked = params.to("prepacked")
    with pytest.raises(TypeError, match="float16 or bfloat16"):
        fj.linear(x.astype(jnp.float32), prepacked)
    with pytest.raises(XlaError, match=r"made for a GPU .* form='tiled'"):
        jax.block_until_ready(fj.linear(x, prepacked))
    for name, value in [("scale2", jnp.ones(N + 1)), ("bias", jnp.ones(3)), ("weight", params.weight[:1])]:
        with pytest.raises(ValueError, match=r"params\."):
            fj.linear(x, dataclasses.replace(params, **{name: value}))
    for name, dtype in [("scale2", jnp.int32), ("weight", jnp.int8), ("bias", jnp.bool_)]:
        with pytest.raises(TypeError, match=rf"params\.{name}: expected"):
            fj.linear(x, dataclasses.replace(params, **{name: getattr(params, name).astype(dtype)}))
    canonical = params.to("canonical")
    with pytest.raises(ValueError, match=r"params\.scales"):
        fj.linear(x, dataclasses.replace(canonical, scales=canonical.scales[:, 1:]))
    for path, message in [("no_such_path", "expected auto"), ("gemv_scalar", "the weight is on the CPU")]:
        with pytest.raises(XlaError, match=message):
            jax.block_until_ready(fj.linear(x, params, path=path))
    assert_same_bits(np.asarray(fj.linear(x, params)), np.asarray(params.layer()(x)))


def hostile(**changes: Any) -> Any:
    """A call of the handler itself with something replaced."""
    params = fj.Fp4Params.from_canonical(B, SCALES, SCALE2, BIAS)
    arrays = {"x": some_x("float16", 2), "weight": params.weight, "scale2": params.scale2, "bias": params.bias}
    attributes = {
        "form": "tiled",
        "path": "auto",
        "block_size": np.int64(16),
        "batch_invariant": np.int64(0),
    }
    result = jax.ShapeDtypeStruct(changes.pop("y", (2, N)), changes.pop("y_dtype", jnp.float16))
    for name, value in changes.items():
        into = arrays if name in arrays else attributes
        if value is None:
            del into[name]
        else:
            into[name] = value
    return jax.ffi.ffi_call("fp4linear_linear", result)(*arrays.values(), **attributes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": jnp.ones((2, K), jnp.int32)}, "x: expected float16"),
        ({"x": jnp.ones(K, jnp.float16)}, "x and y"),
        ({"x": jnp.ones((2, 2, K), jnp.float16)}, "x and y"),
        ({"x": jnp.ones((3, K), jnp.float16)}, "y: expected"),
        ({"x": jnp.ones((2, K - 1), jnp.float16)}, "K must be even"),
        ({"x": jnp.ones((2, K + 64), jnp.float16)}, "weight: expected uint8"),
        ({"y": (2, N + 16)}, "weight: expected uint8"),
        ({"y_dtype": jnp.float32}, "y: expected x's type"),
        ({"weight": jnp.ones((2, 2, 576), jnp.int8)}, "weight: expected uint8"),
        ({"weight": jnp.ones((2, 2, 575), jnp.uint8)}, "weight: expected uint8"),
        ({"weight": jnp.ones((1, 2, 2, 576), jnp.uint8)}, "weight: expected uint8"),
        ({"scale2": jnp.ones(N, jnp.bfloat16)}, "scale2: expected float32"),
        ({"scale2": jnp.ones(1)}, "scale2: expected float32"),
        ({"bias": jnp.ones(N - 1)}, "bias: expected float32"),
        ({"bias": None, "scale2": None}, "arrays"),
        ({"form": None}, "form is missing"),
        ({"form": "wgmma"}, "form="),
        ({"form": np.int64(1)}, "form is missing or of another type"),
        ({"form": "prepacked"}, "made for a GPU"),
        ({"form": "canonical"}, "weight: expected uint8"),
        ({"block_size": np.int64(0)}, "block_size"),
        ({"block_size": np.int64(-16)}, "block_size"),
        ({"block_size": np.int64(1 << 40)}, "block_size"),
        ({"block_size": np.int64(8)}, "multiple of 16"),
        ({"block_size": np.float32(15.5)}, r"block_size is missing|expected int64"),
        ({"path": None}, "path is missing"),
        ({"path": "x" * 5000}, "path="),
        ({"batch_invariant": None}, "batch_invariant is missing"),
    ],
)
def test_hostile_calls_of_the_handler(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(XlaError, match=message):
        jax.block_until_ready(hostile(**changes))
    assert hostile().shape == (2, N)  # the next one is right


def test_malformed_switches_are_errors_and_not_crashes() -> None:
    code = """
        import numpy as np, jax, fp4linear.jax as fj
        jax.config.update("jax_platforms", "cpu")
        w = np.ones((16, 64), np.float32)
        import os
        p = fj.Fp4Params.from_float(w)
        os.environ["FP4LINEAR_GEMV_ROW_TILING"] = "perhaps"
        try:
            jax.block_until_ready(fj.linear(np.ones((1, 64), np.float32), p))
        except Exception as error:
            assert "FP4LINEAR_GEMV_ROW_TILING" in str(error), error
            print("refused")
    """
    assert run_child(code).stdout == "refused\n"


def test_import_of_the_package_imports_no_jax() -> None:
    assert run_child("import sys, fp4linear; print('jax' in sys.modules)").stdout == "False\n"


# Several devices.

SHARDED = """
    import dataclasses, functools
    import numpy as np, jax, jax.numpy as jnp, fp4linear, fp4linear.jax as fj
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    jax.config.update("jax_platforms", "cpu")
    try:
        from jax import shard_map
    except ImportError:
        from jax.experimental.shard_map import shard_map
        shard_map = functools.partial(shard_map, check_rep=False)

    mesh = Mesh(np.array(jax.devices()), ("tp",))
    rng = np.random.default_rng(0)
    w, bias = rng.standard_normal((64, 256)).astype(np.float32), rng.standard_normal(64).astype(np.float32)
    scale2 = rng.standard_normal(64).astype(np.float32)
    q = fp4linear.quantize(w)
    x = jnp.asarray(rng.standard_normal((8, 256)), jnp.float32)
    sx = jax.device_put(x, NamedSharding(mesh, P("tp")))

    def dense(x, p):
        y = jnp.matmul(x, p.dequantize().T, precision="highest")
        return y + p.bias

    def loss(f):
        return lambda x, s, b, p: (f(x, dataclasses.replace(p, scale2=s, bias=b)) ** 2).sum()

    def close(a, b, tolerance=1e-5):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape and np.abs(a - b).max() <= tolerance * np.abs(b).max(), np.abs(a - b).max()

    def over(f, specs_of_params, specs_of_x, out):
        return shard_map(f, mesh=mesh, in_specs=(specs_of_x, specs_of_params), out_specs=out)
"""

MODES = """
    for form in ("tiled", "canonical"):
        p = fj.Fp4Params.from_canonical(q.b, q.scales, scale2, bias, form=form)
        want = np.asarray(fj.linear(x, p))
        expected = jax.grad(loss(dense), (0, 1, 2))(x, p.scale2, p.bias, p)
        columns = over(fj.linear, p.partition_specs(out_axis="tp"), P(), P(None, "tp"))
        rows = over(lambda x, p: fj.linear(x, p, reduce_over="tp"), p.partition_specs(in_axis="tp"), P(None, "tp"), P())
        data = over(fj.linear, jax.tree.map(lambda _: P(), p), P("tp"), P("tp"))
        for f, placed in ((columns, p.shard(mesh, out_axis="tp")), (rows, p.shard(mesh, in_axis="tp")), (data, p)):
            for run in (f, jax.jit(f)):
                y = run(x, placed)
                if f is columns and form == "tiled":
                    assert (np.asarray(y) == want).all()  # a row of the weight is one sum, wherever it is
                close(y, want)
                got = jax.grad(loss(run), (0, 1, 2))(x, placed.scale2, placed.bias, placed)
                for a, b in zip(got, expected):
                    close(a, b)
        whole = jax.tree.map(np.asarray, dataclasses.replace(p.shard(mesh, out_axis="tp")))
        assert (whole.canonical().b == q.b).all() and (whole.canonical().scales == q.scales).all()
    print("done")
"""


def test_shard_map() -> None:
    """Column-parallel, row-parallel (psum, the bias once) and data-parallel, with their gradients."""
    assert run_child(SHARDED + MODES, XLA_FLAGS="--xla_force_host_platform_device_count=4").stdout == "done\n"


AUTOMATIC = """
    p = fj.Fp4Params.from_canonical(q.b, q.scales, scale2, bias)
    want = np.asarray(fj.linear(x, p))
    expected = jax.grad(loss(dense), (0, 1, 2))(x, p.scale2, p.bias, p)
    for placed in (p, p.shard(mesh, out_axis="tp"), p.shard(mesh, in_axis="tp")):
        for rows in (x, sx, jax.device_put(x, NamedSharding(mesh, P(None, "tp")))):
            for call in (fj.linear, jax.jit(fj.linear)):
                assert (np.asarray(call(rows, placed)) == want).all()
            got = jax.jit(jax.grad(loss(fj.linear), (0, 1, 2)))(rows, placed.scale2, placed.bias, placed)
            for a, b in zip(got, expected):
                close(a, b)
    from fp4linear.jax import _partition
    if _partition._KNOWN_RULES:  # on shards, with nothing gathered
        grid = Mesh(np.array(jax.devices()).reshape(2, 2), ("dp", "tp"))
        for form in ("tiled", "canonical"):
            q2 = fj.Fp4Params.from_canonical(q.b, q.scales, scale2, bias, form=form)
            want = np.asarray(fj.linear(x, q2))
            call, columns = jax.jit(fj.linear), q2.shard(grid, out_axis="tp")
            rows = jax.device_put(x, NamedSharding(grid, P("dp")))
            y = call(rows, columns)
            assert y.sharding.spec == P("dp", "tp") and (np.asarray(y) == want).all()
            program = call.lower(rows, columns).compile().as_text()
            assert "all-gather" not in program and "[4,32]" in program
            stack = jax.device_put(jnp.stack([x, -x]), NamedSharding(grid, P("dp")))
            y = jax.jit(jax.vmap(fj.linear, (0, None)))(stack, columns)
            assert y.sharding.spec == P("dp", None, "tp") and (np.asarray(y[0]) == want).all()
            y = jax.jit(fj.linear, out_shardings=NamedSharding(grid, P(None, ("dp", "tp"))))(x, q2)
            assert (np.asarray(y) == want).all()
        uneven = fj.Fp4Params.from_float(w[:40], bias[:40])
        y = jax.jit(fj.linear, out_shardings=NamedSharding(mesh, P(None, "tp")))(x, uneven)
        assert (np.asarray(y) == np.asarray(fj.linear(x, uneven))).all()
        explicit = jax.make_mesh((4,), ("tp",), axis_types=(jax.sharding.AxisType.Explicit,))
        with jax.set_mesh(explicit):
            y = jax.jit(fj.linear)(jax.device_put(x, NamedSharding(explicit, P("tp", None))), p)
            assert (np.asarray(y) == np.asarray(fj.linear(x, p))).all()
    print("done")
"""


def test_automatic_partitioning_is_right() -> None:
    assert run_child(SHARDED + AUTOMATIC, XLA_FLAGS="--xla_force_host_platform_device_count=4").stdout == "done\n"


UNEVEN = """
    def refused(call, *words):
        try:
            jax.block_until_ready(call())
        except ValueError as error:
            assert all(word in str(error) for word in words), error
        else:
            raise AssertionError("not refused")

    for form in ("tiled", "prepacked"):
        odd = fj.Fp4Params.from_float(w[:24, :192], form=form)  # 2 tiles of 16 rows, the second half empty; 3 units
        refused(lambda: odd.shard(mesh, out_axis="tp"), "N = 24", "16")
        refused(lambda: odd.shard(mesh, in_axis="tp"), "K = 192", "64")
    two = Mesh(np.array(jax.devices()[:2]), ("tp",))
    odd = fj.Fp4Params.from_float(w[:24])
    # JAX itself can split these arrays in two; the parts are not the layer's rows 0-11 and 12-23.
    split = shard_map(fj.linear, mesh=two, in_specs=(P(), odd.partition_specs(out_axis="tp")), out_specs=P(None, "tp"))
    refused(lambda: split(x, odd), "scale2", "16")
    part = fj.Fp4Params.from_float(w[:, :96])
    split = shard_map(lambda x, p: fj.linear(x, p, reduce_over="tp"), mesh=two,
                      in_specs=(P(None, "tp"), part.partition_specs(in_axis="tp")), out_specs=P())
    refused(lambda: split(x[:, :96], part), "K = 64", "48")
    blocks = fj.Fp4Params.from_canonical(q.b, q.scales[:, ::4], 1.0, block_size=64, form="canonical")
    refused(lambda: blocks.shard(Mesh(np.array(jax.devices()), ("tp",)), in_axis="tp") and None or
            fj.Fp4Params.from_canonical(q.b[:, :64], q.scales[:, :2], 1.0, block_size=64, form="canonical")
            .shard(mesh, in_axis="tp"), "K = 128")
    print("done")
"""


def test_shards_that_break_units_are_refused() -> None:
    assert run_child(SHARDED + UNEVEN, XLA_FLAGS="--xla_force_host_platform_device_count=4").stdout == "done\n"

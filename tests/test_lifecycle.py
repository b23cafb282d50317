"""A layer's life: import, copies, pickles, lifetimes of what it was made from, leaks, the end of the process."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import sys
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fp4linear
from tests import reference
from tests.backends import Backend, each_backend
from tests.child import run_child
from tests.strategies import DTYPES
from tests.tolerance import assert_same_bits, assert_within_contract

N, K = 20, 72
random = np.random.default_rng(0)
B = random.integers(0, 256, (N, K // 2), dtype=np.uint8)
SCALES = random.integers(0x20, 0x59, (N, -(-K // 16)), dtype=np.uint8)
BIAS = random.standard_normal(N).astype(np.float32)
X = reference.x_of(5, K, 3)


def every_kind() -> dict[str, fp4linear.Fp4Linear]:
    nan = SCALES.copy()
    nan[3, 2] = 0x7F
    rows = random.standard_normal(N).astype(np.float32)
    return {
        "plain": fp4linear.Fp4Linear(B, SCALES, 0.5),
        "bias": fp4linear.Fp4Linear(B, SCALES, -0.25, BIAS),
        "bias16": fp4linear.Fp4Linear(B, SCALES, 0.5, BIAS.astype(ml_dtypes.bfloat16)),
        "row factors": fp4linear.Fp4Linear(B, SCALES, rows, BIAS),
        "blocks of 8": fp4linear.Fp4Linear(B, np.repeat(SCALES, 2, axis=1)[:, :9], 0.5, block_size=8),
        "NaN as zero": fp4linear.Fp4Linear(B, nan, 0.5, nan_scales="zero"),
        "NaN": fp4linear.Fp4Linear(B, nan, 0.5, nan_scales="propagate"),
        "forced": fp4linear.Fp4Linear(B, SCALES, 0.5, path="cpu_gemm", isa="portable", threads=2),
        "invariant": fp4linear.Fp4Linear(B, SCALES, 0.5, batch_invariant=True),
        "empty": fp4linear.Fp4Linear(B[:0], SCALES[:0], 0.5),
        "no K": fp4linear.Fp4Linear(B[:, :0], SCALES[:, :0], 0.5, BIAS),
    }


WAYS: dict[str, Any] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{
        f"pickle {p}": lambda layer, p=p: pickle.loads(pickle.dumps(layer, p))
        for p in range(2, pickle.HIGHEST_PROTOCOL + 1)
    },
}


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("kind", list(every_kind()))
def test_copies_are_equal_and_independent(kind: str, way: str) -> None:
    layer = every_kind()[kind]
    x = X[:, : layer.in_features]
    y = layer.forward(x)
    made = WAYS[way](layer)
    assert made is not layer and type(made) is type(layer)
    assert_same_bits(made.forward(x), y)
    for ours, theirs in zip(made.canonical(), layer.canonical(), strict=True):
        assert_same_bits(ours, theirs)
    assert repr(made) == repr(layer)
    assert made.plan(3).path == layer.plan(3).path
    del layer
    gc.collect()
    assert_same_bits(made.forward(x), y)


def test_copies_have_their_own_last_path() -> None:
    layer = fp4linear.Fp4Linear(B, SCALES, 1.0)
    layer.forward(X)
    made = copy.copy(layer)
    assert made.last_path is None
    made.forward(X)
    assert made.last_path is not None


class Named(fp4linear.Fp4Linear):
    """A user's subclass."""


def test_subclasses_and_attributes_survive() -> None:
    layer = Named(B, SCALES, 0.5)
    layer.name = "lm_head"
    for way in WAYS.values():
        made = way(layer)
        assert type(made) is Named and made.name == "lm_head"
        assert_same_bits(made.forward(X), layer.forward(X))


def test_a_pickle_is_read_by_another_process(tmp_path: Any) -> None:
    layer = fp4linear.Fp4Linear(B, SCALES, 0.5, BIAS)
    (tmp_path / "layer").write_bytes(pickle.dumps(layer))
    np.save(tmp_path / "x.npy", X)
    run_child(
        """
        import pathlib, pickle, sys, numpy as np
        at = pathlib.Path(sys.argv[1])
        layer = pickle.loads((at / "layer").read_bytes())
        np.save(at / "y.npy", layer.forward(np.load(at / "x.npy")))
        """,
        arguments=(str(tmp_path),),
    )
    assert_same_bits(np.load(tmp_path / "y.npy"), layer.forward(X))


def test_what_a_layer_was_made_from_may_change_and_go() -> None:
    b, scales, bias, factors = B.copy(), SCALES.copy(), BIAS.copy(), np.full(N, 0.5, np.float32)
    layer = fp4linear.Fp4Linear(b, scales, factors, bias)
    y = layer.forward(X)
    for array in (b, scales, bias, factors):
        array[...] = 0
    assert_same_bits(layer.forward(X), y)
    watched = [weakref.ref(array) for array in (b, scales, bias, factors)]
    del b, scales, bias, factors, array
    gc.collect()
    assert [ref() for ref in watched] == [None] * 4
    assert_same_bits(layer.forward(X), y)


@each_backend
def test_temporaries_that_are_gone_and_overwritten(backend: Backend) -> None:
    layer = backend.layer(B.copy(), SCALES.copy(), np.float32(0.5).copy(), BIAS.copy())
    rubbish = [np.full(size, 0xEE, np.uint8) for size in (B.size, SCALES.size, 4 * N) for _ in range(50)]
    assert_within_contract(layer.forward(X), reference.linear(X, B, SCALES, 0.5, BIAS))
    del rubbish


def test_results_outlive_the_layer() -> None:
    layer = fp4linear.Fp4Linear(B, SCALES, 0.5)
    results = [layer.forward(X), layer.dequantize(), *layer.canonical()]
    kept = [result.copy() for result in results]
    del layer
    gc.collect()
    rubbish = [np.full(1000, 0xEE, np.uint8) for _ in range(200)]
    for result, before in zip(results, kept, strict=True):
        assert_same_bits(result, before)
    del rubbish


def test_canonical_gives_fresh_arrays() -> None:
    layer = fp4linear.Fp4Linear(B, SCALES, 0.5)
    y = layer.forward(X)
    for array in layer.canonical():
        array[...] = 1
    layer.dequantize()[...] = 1
    assert_same_bits(layer.forward(X), y)
    assert_same_bits(layer.canonical()[0], B)


def test_weak_references_and_cycles() -> None:
    layer = fp4linear.Fp4Linear(B, SCALES, 0.5)
    layer.itself = layer
    watched = weakref.ref(layer)
    del layer
    gc.collect()
    assert watched() is None


def test_repr_says_what_it_is() -> None:
    text = repr(fp4linear.Fp4Linear(B, SCALES, 0.5, BIAS, path="cpu_gemm"))
    for part in ("Fp4Linear", "72", "20", "cpu", "cpu_gemm"):
        assert part in text


def test_nbytes_is_about_the_packed_size() -> None:
    b, scales = reference.make(512, 1024, 0)
    nbytes = fp4linear.Fp4Linear(b, scales, 1.0, np.zeros(512, np.float32)).nbytes
    packed = b.nbytes + scales.nbytes + 512 * 4
    assert packed <= nbytes <= 1.1 * packed


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_reference_counts(dtype: str) -> None:
    layer = fp4linear.Fp4Linear(B, SCALES, 0.5)
    x, out, bad = X.astype(DTYPES[dtype]), np.empty((5, N), DTYPES[dtype]), np.ones((2, 7), DTYPES[dtype])
    watched = (layer, B, SCALES, BIAS, x, out, bad, None, x.dtype)
    for _ in range(3):
        before = [sys.getrefcount(each) for each in watched[:-2]]
        for _ in range(100):
            layer.forward(x)
            layer.forward(x[:0])
            layer.forward(x, out=out)
            fp4linear.Fp4Linear(B, SCALES, 0.5, BIAS)
            layer.plan(1)
            for argument in (bad, [1.0], None):
                with pytest.raises((ValueError, TypeError)):
                    layer.forward(argument)
        gc.collect()
        assert [sys.getrefcount(each) for each in watched[:-2]] == before


LEAKS = """
    import gc, sys
    import numpy as np
    import fp4linear
    from tests import reference
    from tests.dlpack_producer import Producer, _live

    b, scales = reference.make(64, 128, 0)
    x, empty = reference.x_of(1, 128, 1), np.zeros((0, 128), np.float16)
    layer = fp4linear.Fp4Linear(b, scales, 1.0)

    def fail():
        try: layer.forward(x[:, :64])
        except ValueError: pass
        else: raise AssertionError

    def fail_to_build():
        try: fp4linear.Fp4Linear(b, scales[:, :3], 1.0)
        except ValueError: pass
        else: raise AssertionError

    def produce():
        layer.forward(Producer(x))
        _live.clear()

    work = {
        "forward": lambda: layer.forward(x),
        "construct": lambda: fp4linear.Fp4Linear(b, scales, 1.0),
        "error": fail,
        "construction error": fail_to_build,
        "empty": lambda: layer.forward(empty),
        "strided": lambda: layer.forward(x[:, ::-1]),
        "producer": produce,
        "plan": lambda: str(layer.plan(3)),
        "quantize": lambda: fp4linear.quantize(x),
        "canonical": layer.canonical,
    }[sys.argv[1]]

    def resident():
        gc.collect()
        with open("/proc/self/statm") as f: return int(f.read().split()[1]) * 4096

    for _ in range(1000): work()
    before = resident()
    counts = [sys.getrefcount(each) for each in (x, b, scales, layer)]
    for _ in range(10000): work()
    grown = resident() - before
    assert [sys.getrefcount(each) for each in (x, b, scales, layer)] == counts
    assert grown < 2 << 20, f"{grown} bytes more after 10,000 calls"
    print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", [
    "forward", "construct", "error", "construction error", "empty", "strided", "producer", "plan", "quantize",
    "canonical",
])  # fmt: skip
def test_nothing_leaks(what: str) -> None:
    assert run_child(LEAKS, arguments=(what,)).stdout == "done\n"


def test_import_brings_no_framework() -> None:
    code = """
        import sys
        import fp4linear
        heavy = {"torch", "jax", "jaxlib", "cupy", "ml_dtypes", "safetensors", "typer", "rich", "matplotlib",
                 "tokenizers", "fp4linear.files", "fp4linear.cli", "fp4linear.bench", "fp4linear.demo"}
        print(sorted(heavy & set(sys.modules)))
    """
    assert run_child(code).stdout == "[]\n"


def test_no_gpu_in_sight() -> None:
    code = """
        import numpy as np, fp4linear
        from fp4linear import _core
        from tests import reference
        layer = fp4linear.Fp4Linear(*reference.make(8, 32, 1), 1.0)
        assert layer.forward(np.ones((2, 32), np.float16)).shape == (2, 8)
        info = _core.cuda_info()
        assert info["devices"] == [] and info["reason"], info
        for device in ("cuda", "cuda:0", "cuda:1"):
            try:
                fp4linear.Fp4Linear(*reference.make(8, 32, 1), 1.0, device=device)
            except ValueError as error:
                assert "device" in str(error), error
            else:
                raise AssertionError(device)
        assert layer.forward(np.ones((2, 32), np.float16)).shape == (2, 8)
        print("done")
    """
    assert run_child(code, CUDA_VISIBLE_DEVICES="").stdout == "done\n"


def test_the_module_is_typed_and_says_its_version() -> None:
    from importlib.metadata import PackageNotFoundError, version
    from importlib.resources import files

    try:
        assert fp4linear.__version__ == version("fp4linear")
    except PackageNotFoundError:
        assert re.fullmatch(r"\d+\.\d+\.\d+\S*", fp4linear.__version__)  # run from a build tree
    assert files("fp4linear").joinpath("py.typed").is_file()
    assert set(fp4linear.__all__) >= {"Fp4Linear", "Plan", "quantize", "dequantize", "reference", "load"}
    for name in fp4linear.__all__:
        assert getattr(fp4linear, name) is not None
    with pytest.raises(AttributeError):
        _ = fp4linear.nothing

"""Memory that runs out at each allocation of the module in turn: MemoryError, and everything works right after."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.child import ROOT, run_child

WALK = """
    import ctypes, copy, pickle, signal, sys
    import numpy as np
    import fp4linear
    from tests import reference

    shim = ctypes.CDLL(sys.argv[1])
    shim.fail_allocation.argtypes, shim.fail_allocation.restype = [ctypes.c_long], ctypes.c_long
    assert shim.fail_allocation(-1) >= 0, "the module was not found"

    b, scales = reference.make(70, 192, 1)
    nan = scales.copy()
    nan[3, 2] = 0x7F
    rows = np.linspace(0.5, 2, 70).astype(np.float32)
    layer = fp4linear.Fp4Linear(b, scales, rows, rows, threads=3)
    zeroed = fp4linear.Fp4Linear(b, nan, 0.5, nan_scales="zero")
    w = np.linspace(-3, 3, 64 * 32).astype(np.float32).reshape(64, 32)
    xs = {f"{dtype} {m}": reference.x_of(m, 192, 2).astype(dtype) for dtype in ("f2", "f4") for m in (1, 40)}
    strided = np.asfortranarray(xs["f2 40"])
    held = pickle.dumps(layer)

    def refuses():
        try:
            layer.forward(np.ones((2, 191), np.float16))
        except ValueError as error:
            return str(error)
        raise AssertionError("accepted")

    work = {f"forward {key}": lambda x=x: layer.forward(x) for key, x in xs.items()}
    work |= {
        "strided": lambda: layer.forward(strided),
        "one row": lambda: layer.forward(xs["f2 1"][0]),
        "gemm": fp4linear.Fp4Linear(b, scales, 0.5, path="cpu_gemm", threads=3).forward,
        "native": fp4linear.Fp4Linear(b, scales, 0.5, path="native_emulated").forward,
        "construct": lambda: fp4linear.Fp4Linear(b, scales, rows, rows).canonical()[0],
        "construct, zeroed": lambda: fp4linear.Fp4Linear(b, nan, 0.5, nan_scales="zero").canonical()[1],
        "construct, strided": lambda: fp4linear.Fp4Linear(np.asfortranarray(b), scales, 0.5).canonical()[0],
        "pickle": lambda: pickle.loads(held).canonical()[0],
        "copy": lambda: copy.copy(layer).canonical()[1],
        "dequantize": zeroed.dequantize,
        "dequantize arrays": lambda: fp4linear.dequantize(b, scales, 0.5),
        "quantize": lambda: fp4linear.quantize(w, method="mse").b,
        "plan": lambda: str(layer.plan(7)),
        "repr": lambda: repr(layer),
        "error": refuses,
    }
    for name in ("gemm", "native"):
        work[name] = lambda call=work[name]: call(xs["f2 40"])

    def same(a, b):
        return a.tobytes() == b.tobytes() if isinstance(a, np.ndarray) else a == b

    total = 0
    for name, call in work.items():
        wanted = call()
        for n in range(2000):
            before = shim.fail_allocation(n)
            try:
                got = call()
            except MemoryError as error:
                got = error
            finally:
                fired = shim.fail_allocation(-1) - before
            if not fired:
                break
            # Some are not needed: a plan's cache, a thread that others stand in for.
            assert isinstance(got, MemoryError) or same(got, wanted), (name, n, got)
            assert same(call(), wanted), (name, n)
        else:
            raise AssertionError(f"{name}: no end")
        total += n
        print(name, n)
    assert total > 100, total
    print("done")
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("a sanitizer has its own allocator")
    library = tmp_path_factory.mktemp("shim") / "allocation_shim.so"
    source = str(ROOT / "tests/allocation_shim.cc")
    subprocess.run([compiler, "-std=c++20", "-O1", "-shared", "-fPIC", source, "-o", str(library), "-ldl"], check=True)
    return library


def test_every_allocation_of_the_module(shim: Path) -> None:
    done = run_child(WALK, arguments=(str(shim),), LD_PRELOAD=str(shim))
    assert done.stdout.endswith("done\n"), done.stdout

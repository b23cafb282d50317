"""H. Life cycle."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import fp4linear
from tests import reference
from tests.backends import CPU_PATHS
from tests.cases.conventions import each_dtype, each_m
from tests.child import run_child
from tests.strategies import DTYPES
from tests.test_lifecycle import LEAKS
from tests.tolerance import assert_same_bits, assert_within_contract

B, SCALES = reference.make(150, 480, 5)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["forward", "construct", "error", "empty"])
def test_H1_leaks(what: str) -> None:
    """10,000 calls after the first 1000: RSS grows by less than 2 MB, reference counts stay."""
    assert run_child(LEAKS, arguments=(what,)).stdout == "done\n"


def test_H2_import_without_a_gpu() -> None:
    code = """
        import sys, fp4linear, numpy as np
        assert not {"torch", "jax", "cupy"} & set(sys.modules)
        b, scales = np.full((3, 8), 0x22, np.uint8), np.full((3, 1), 0x38, np.uint8)
        assert (fp4linear.Fp4Linear(b, scales, 1.0).forward(np.ones((2, 16), np.float16)) == 16).all()
        try: fp4linear.Fp4Linear(b, scales, 1.0, device="cuda")
        except ValueError as error: print(error)
    """
    assert "device" in run_child(code, CUDA_VISIBLE_DEVICES="").stdout


def test_H2_import_opens_no_cuda_driver() -> None:
    code = """
        import fp4linear
        with open("/proc/self/maps") as maps:
            print(sorted({line.split("/")[-1].strip() for line in maps if "libcuda" in line or "libcublas" in line}))
    """
    assert run_child(code).stdout == "[]\n"


def test_H2_fork_after_the_threads_started() -> None:
    code = """
        import os, warnings, fp4linear
        from tests import reference
        warnings.simplefilter("ignore", DeprecationWarning)
        layer = fp4linear.Fp4Linear(*reference.make(256, 512, 1), 1.0, threads=2)
        x = reference.x_of(40, 512, 2)
        want = layer.forward(x)
        pid = os.fork()
        if pid == 0:
            os._exit(0 if (layer.forward(x) == want).all() else 1)
        print(os.waitpid(pid, 0)[1], (layer.forward(x) == want).all())
    """
    assert run_child(code, timeout=60).stdout == "0 True\n"


@each_dtype
@each_m
def test_H5_copies(dtype: str, m: int) -> None:
    layer = fp4linear.Fp4Linear(B, SCALES, 0.5, np.ones(150, np.float16))
    x = reference.x_of(m, 480, 1).astype(DTYPES[dtype])
    y = layer.forward(x)
    copies = [copy.deepcopy(layer), copy.copy(layer), pickle.loads(pickle.dumps(layer))]
    del layer
    for made in copies:
        assert_same_bits(made.forward(x), y)


@each_dtype
@each_m
@pytest.mark.parametrize("path", CPU_PATHS)
def test_H5_one_and_eight_threads(path: str, dtype: str, m: int) -> None:
    x = reference.x_of(m, 480, 1).astype(DTYPES[dtype])
    one, eight = (fp4linear.Fp4Linear(B, SCALES, 0.5, path=path, threads=threads) for threads in (1, 8))
    assert_same_bits(one.forward(x), eight.forward(x))


@each_dtype
@each_m
@pytest.mark.parametrize("path", CPU_PATHS)
def test_H5_forced_baseline(path: str, dtype: str, m: int) -> None:
    x = reference.x_of(m, 480, 1).astype(DTYPES[dtype])
    layer = fp4linear.Fp4Linear(B, SCALES, 0.5, path=path, isa="portable")
    assert_within_contract(layer.forward(x), reference.linear(x, B, SCALES, 0.5))
    assert fp4linear._core.last_isa() == "portable"


def test_H5_clean_exit_with_a_live_layer() -> None:
    code = """
        import numpy as np, fp4linear
        from tests import reference
        layer = fp4linear.Fp4Linear(*reference.make(256, 512, 1), 1.0, threads=4)
        layer.forward(np.ones((40, 512), np.float16))
    """
    done = run_child(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

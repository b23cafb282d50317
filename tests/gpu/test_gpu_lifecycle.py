"""A process's life with a GPU: import, fork, memory after many calls, the end."""

from __future__ import annotations

import pytest

from tests.child import run_child

pytestmark = pytest.mark.gpu

# Growth of the device's used memory and of this process after the first calls; 2 MB is the unit of device memory.
LEAKS = """
    import gc, resource, sys, numpy as np, torch, fp4linear
    from tests import reference
    b, scales = reference.make(256, 512, 1)
    layer = fp4linear.Fp4Linear(b, scales, 1.0, device="cuda")
    x = torch.from_numpy(reference.x_of(8, 512, 1)).cuda()
    wide = x.repeat(9, 2)
    bad, empty = x[:, :256].contiguous(), x[:0]
    rows = np.ones(256, np.float32)
    def fail():
        try: layer.forward(bad)
        except ValueError: return
        raise SystemExit("no error")
    runs = {"forward": (10000, 1000, lambda: layer.forward(x)),
            "strided": (5000, 1000, lambda: layer.forward(wide[:, ::2])),
            "error": (10000, 1000, fail),
            "empty": (10000, 1000, lambda: layer.forward(empty)),
            "construct": (2000, 500, lambda: fp4linear.Fp4Linear(b, scales, rows, rows, device="cuda"))}
    def measure():
        gc.collect()
        torch.cuda.synchronize()
        with open("/proc/self/statm") as statm:
            resident = int(statm.read().split()[1]) * resource.getpagesize()
        return torch.cuda.mem_get_info()[0], resident
    for what, (calls, first, run) in runs.items():
        for _ in range(first): run()
        counts = [sys.getrefcount(each) for each in (x, b, layer)]
        free, resident = measure()
        for _ in range(calls): run()
        after = measure()
        good = free - after[0] < 2 * 2**20 and after[1] - resident < 2 * 2**20
        good = good and counts == [sys.getrefcount(each) for each in (x, b, layer)]
        print(what, "kept" if good else ("device", free - after[0], "host", after[1] - resident, counts))
"""

JAX_LEAKS = """
    import gc, sys, numpy as np, jax, torch, fp4linear
    from tests import reference
    gpu = jax.devices("gpu")[0]
    layer = fp4linear.Fp4Linear(*reference.make(256, 512, 1), 1.0, device="cuda")
    x = jax.device_put(reference.x_of(8, 512, 1), gpu)
    def run(times):
        for _ in range(times): y = layer.forward(x)
        y.block_until_ready()
        del y
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]
    free = run(500)
    after = run(3000)
    assert free - after < 4 * 2**20, free - after
    print("done")
"""


@pytest.mark.slow
def test_H1_leaks() -> None:
    """Calls, failing and empty ones too, and layers leave memory and reference counts as they were."""
    lines = run_child(LEAKS).stdout.splitlines()
    assert lines == [f"{what} kept" for what in ("forward", "strided", "error", "empty", "construct")]


@pytest.mark.slow
def test_H1_leaks_of_jax_calls() -> None:
    pytest.importorskip("jax")
    assert run_child(JAX_LEAKS, XLA_PYTHON_CLIENT_PREALLOCATE="false").stdout == "done\n"


def test_H2_import_and_questions_make_no_context() -> None:
    code = """
        import ctypes, sys, numpy as np, fp4linear
        with open("/proc/self/maps") as maps:
            assert "libcuda" not in maps.read(), "the import opened the driver"
        assert not {"torch", "jax", "cupy"} & set(sys.modules)
        driver = ctypes.CDLL("libcuda.so.1")
        assert driver.cuInit(0) == 0
        def has_context():
            flags, active = ctypes.c_uint(), ctypes.c_int()
            assert driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0
            return bool(active.value)
        assert not has_context()
        assert fp4linear._core.cuda_info()["devices"]
        b, scales = np.full((3, 64), 0x22, np.uint8), np.full((3, 8), 0x38, np.uint8)
        host = fp4linear.Fp4Linear(b, scales, 1.0)
        assert (host.forward(np.ones((2, 128), np.float16)) == 128).all()
        host.plan(1); fp4linear._core.plan(64, 128, 1, device="sm90")
        try: fp4linear.Fp4Linear(b, scales, 1.0, device="cuda:77")
        except ValueError: pass
        assert not has_context(), "a call for the CPU made a context"
        fp4linear.Fp4Linear(b, scales, 1.0, device="cuda")
        assert has_context()
        print("done")
    """
    assert run_child(code).stdout == "done\n"


def test_H2_fork_after_the_import() -> None:
    code = """
        import os, warnings, numpy as np, fp4linear
        from tests import reference
        warnings.simplefilter("ignore", DeprecationWarning)
        b, scales = reference.make(64, 256, 1)
        x = reference.x_of(8, 256, 2)
        want = fp4linear.Fp4Linear(b, scales, 0.125).forward(x)  # the pool of threads is up
        def on_gpu():
            import torch
            layer = fp4linear.Fp4Linear(b, scales, 0.125, device="cuda")
            y = layer.forward(torch.from_numpy(x).cuda()).cpu().numpy()
            return bool((np.abs(y.astype(np.float64) - want) <= 2.0**-9 * np.abs(want) + 1e-3).all())
        pid = os.fork()
        if pid == 0:
            good = False
            try: good = on_gpu()
            finally: os._exit(0 if good else 1)
        print(os.waitpid(pid, 0)[1], on_gpu())
    """
    assert run_child(code).stdout == "0 True\n"


@pytest.mark.parametrize("library", ["torch", "cupy", "jax"])
def test_H5_clean_exit_with_live_layers_and_results(library: str) -> None:
    """Device memory outlives the interpreter's modules; that must not end in an abort."""
    pytest.importorskip(library)
    makes = {
        "torch": "import torch; make = lambda x: torch.from_numpy(x).cuda()",
        "cupy": "import cupy; make = cupy.asarray",
        "jax": "import jax; make = lambda x: jax.device_put(x, jax.devices('gpu')[0])",
    }
    code = f"""
        import fp4linear
        from tests import reference
        {makes[library]}
        layer = fp4linear.Fp4Linear(*reference.make(256, 512, 1), 1.0, device="cuda")
        results = [layer.forward(make(reference.x_of(m, 512, m))) for m in (1, 8, 64)]
        class Holder: pass
        Holder.cycle = (Holder, layer, results)
    """
    done = run_child(code, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    assert done.stdout == "" and "fp4linear" not in done.stderr and "Error" not in done.stderr, done.stderr


def test_a_layer_before_the_framework() -> None:
    """cuBLASLt comes with a framework that is imported later; the layer that was there first finds it then."""
    code = """
        import fp4linear
        from tests import reference
        b, scales = reference.make(64, 256, 1)
        layer = fp4linear.Fp4Linear(b, scales, 0.125, device="cuda")
        layer.plan(64)
        import torch
        x = torch.from_numpy(reference.x_of(64, 256, 2)).cuda()
        y = layer.forward(x).cpu().numpy()
        want = reference.linear(x.cpu().numpy(), b, scales, 0.125)
        assert (abs(y - want.y) <= 2.0**-11 * abs(want.y) + 2.0**-15 * want.magnitude + 2.0**-25).all()
        print("done")
    """
    assert run_child(code).stdout == "done\n"


def test_a_gemv_needs_no_cublas() -> None:
    """With CuPy alone cuBLASLt may be absent: then its rung says so, and everything else runs."""
    pytest.importorskip("cupy")
    code = """
        import cupy, numpy as np, fp4linear
        from tests import reference
        b, scales = np.full((64, 103), 0x22, np.uint8), np.full((64, 13), 0x38, np.uint8)
        layer = fp4linear.Fp4Linear(*reference.make(64, 256, 1), 0.125, device="cuda")
        x = reference.x_of(8, 256, 2)
        y, want = layer.forward(cupy.asarray(x)).get(), reference.linear(x, *reference.make(64, 256, 1), 0.125)
        assert layer.last_path == "gemv_tensor_core"
        assert (abs(y - want.y) <= 2.0**-11 * abs(want.y) + 2.0**-15 * want.magnitude + 2.0**-25).all()
        any_k = fp4linear.Fp4Linear(b, scales, 1.0, device="cuda")
        try: assert (any_k.forward(cupy.ones((3, 206), cupy.float16)).get() == 206).all()
        except ValueError as error: assert "cuBLASLt" in str(error), error
        print("done")
    """
    assert run_child(code).stdout == "done\n"

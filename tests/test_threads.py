"""Results do not depend on threads: how many compute, how many call, and who forks."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fp4linear
from fp4linear import _core
from tests import reference
from tests.backends import CPU_PATHS, ISAS
from tests.child import run_child
from tests.strategies import DTYPES, LayerCase, activations, layers
from tests.tolerance import assert_same_bits


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("path", CPU_PATHS)
def test_equal_bits_for_1_to_8_threads(isa: str, path: str, dtype: str) -> None:
    b, scales = reference.make(203, 1040, 1)
    bias = np.arange(203, dtype=np.float32)
    for m in (1, 3, 8, 9, 70):
        x = reference.x_of(m, 1040, 2).astype(DTYPES[dtype])
        results = [
            fp4linear.Fp4Linear(b, scales, 0.01, bias, path=path, isa=isa, threads=threads).forward(x)
            for threads in (1, 2, 3, 4, 5, 6, 7, 8)
        ]
        for other in results[1:]:
            assert_same_bits(other, results[0])


@given(data=st.data(), case=layers(), threads=st.integers(2, 16), path=st.sampled_from(["auto", *CPU_PATHS]))
def test_equal_bits_for_any_threads(data: st.DataObject, case: LayerCase, threads: int, path: str) -> None:
    x = data.draw(activations(case.in_features)).x
    one, many = (
        fp4linear.Fp4Linear(
            case.b, case.scales, case.scale2, case.bias, block_size=case.block_size, path=path, threads=count
        )
        for count in (1, threads)
    )
    assert_same_bits(many.forward(x), one.forward(x))


@pytest.mark.parametrize("threads", [1, 4])
def test_many_callers_of_one_layer(threads: int) -> None:
    b, scales = reference.make(97, 336, 3)
    layer = fp4linear.Fp4Linear(b, scales, 0.5, threads=threads)
    inputs = [reference.x_of(m, 336, m).astype(DTYPES[dtype]) for m in (1, 2, 9, 40) for dtype in sorted(DTYPES)]
    wanted = [layer.forward(x) for x in inputs]
    barrier = threading.Barrier(8)

    def call(worker: int) -> None:
        barrier.wait()
        for turn in range(60):
            at = (worker + turn) % len(inputs)
            assert_same_bits(layer.forward(inputs[at]), wanted[at])
            assert layer.last_path == layer.plan(len(inputs[at]), dtype=inputs[at].dtype.name).path

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(call, worker) for worker in range(8)]:
            future.result()


def test_many_callers_of_many_layers_with_errors_between() -> None:
    cases = [(reference.make(8 * i + 1, 64, i), reference.x_of(3, 64, i)) for i in range(1, 7)]
    built = [fp4linear.Fp4Linear(b, scales, 1.0, path=CPU_PATHS[i % 2]) for i, ((b, scales), _) in enumerate(cases)]
    wanted = [layer.forward(x) for layer, (_, x) in zip(built, cases, strict=True)]

    def call(worker: int) -> None:
        for turn in range(60):
            at = (worker + turn) % len(cases)
            with pytest.raises(ValueError):
                built[at].forward(np.ones((2, 63), np.float16))
            assert_same_bits(built[at].forward(cases[at][1]), wanted[at])

    with ThreadPoolExecutor(6) as pool:
        for future in [pool.submit(call, worker) for worker in range(6)]:
            future.result()


def test_the_gil_is_released_while_a_call_computes() -> None:
    """Another Python thread makes progress during one long call."""
    b, scales = reference.make(512, 1024, 1)
    layer = fp4linear.Fp4Linear(b, scales, 1.0, threads=1, isa="portable")
    x = np.ones((2000, 1024), np.float32)
    running, counts = threading.Event(), [0]

    def count() -> None:
        running.wait()
        while running.is_set():
            counts[0] += 1

    counter = threading.Thread(target=count)
    counter.start()
    running.set()
    before = counts[0]
    layer.forward(x)
    during = counts[0] - before
    running.clear()
    counter.join()
    # Were the GIL held, the counter could run for a few switch intervals around the call, not through it.
    assert during > 1000


FORK = """
    import os, warnings
    import numpy as np
    import fp4linear
    from tests import reference

    warnings.simplefilter("ignore", DeprecationWarning)
    b, scales = reference.make(300, 512, 1)
    layer = fp4linear.Fp4Linear(b, scales, 1.0, threads=4)
    xs = [reference.x_of(m, 512, 2) for m in (1, 40)]
    wanted = [layer.forward(x) for x in xs]      # starts the threads
    for turn in range(3):
        pid = os.fork()
        if pid == 0:
            same = all((layer.forward(x) == y).all() for x, y in zip(xs, wanted))
            new = fp4linear.Fp4Linear(b, scales, 1.0, threads=3).forward(xs[1])
            grandchild = os.fork()
            if grandchild == 0:
                os._exit(0 if (layer.forward(xs[1]) == wanted[1]).all() else 1)
            _, status = os.waitpid(grandchild, 0)
            os._exit(0 if same and (new == wanted[1]).all() and status == 0 else 1)
        _, status = os.waitpid(pid, 0)
        assert status == 0, status
        assert all((layer.forward(x) == y).all() for x, y in zip(xs, wanted))
    print("done")
"""


def test_fork_then_forward() -> None:
    assert run_child(FORK, timeout=120).stdout == "done\n"


def test_fork_while_other_threads_call() -> None:
    code = """
        import os, threading, warnings
        import fp4linear
        from tests import reference

        warnings.simplefilter("ignore", DeprecationWarning)
        b, scales = reference.make(300, 512, 1)
        layer = fp4linear.Fp4Linear(b, scales, 1.0, threads=4)
        x = reference.x_of(20, 512, 2)
        want = layer.forward(x)
        stop = threading.Event()

        def work():
            while not stop.is_set():
                assert (layer.forward(x) == want).all()

        workers = [threading.Thread(target=work) for _ in range(3)]
        for worker in workers: worker.start()
        for turn in range(20):
            pid = os.fork()
            if pid == 0:
                os._exit(0 if (layer.forward(x) == want).all() else 1)
            _, status = os.waitpid(pid, 0)
            assert status == 0, status
        stop.set()
        for worker in workers: worker.join()
        print("done")
    """
    assert run_child(code, timeout=120).stdout == "done\n"


@pytest.mark.parametrize("threads", [1, 4])
def test_clean_exit_with_a_live_layer(threads: int) -> None:
    code = f"""
        import numpy as np, fp4linear
        from tests import reference
        layer = fp4linear.Fp4Linear(*reference.make(64, 256, 1), 1.0, threads={threads})
        kept = [layer, layer.forward(np.ones((40, 256), np.float16)), layer.forward]
        layer.itself = layer   # a cycle that only the interpreter's end takes apart
        fp4linear.kept = kept
        print("done")
    """
    done = run_child(code)
    assert done.stdout == "done\n" and done.stderr == ""


@pytest.mark.skipif(
    sys.version_info < (3, 14), reason="this Python ends daemon threads by pthread_exit, which no C++ frame survives"
)
def test_exit_while_a_daemon_thread_calls() -> None:
    code = """
        import threading, numpy as np, fp4linear
        from tests import reference
        layer = fp4linear.Fp4Linear(*reference.make(300, 1024, 1), 1.0, threads=3)
        x = np.ones((30, 1024), np.float16)
        started = threading.Event()

        def work():
            while True:
                layer.forward(x)
                started.set()

        threading.Thread(target=work, daemon=True).start()
        started.wait()
        print("done")
    """
    assert run_child(code, timeout=120).stdout == "done\n"


def test_environment_number_of_threads() -> None:
    code = """
        import numpy as np, os, fp4linear
        from fp4linear import _core
        from tests import reference
        print(_core.default_threads())
        layer = fp4linear.Fp4Linear(*reference.make(512, 2048, 1), 1.0)
        before = len(os.listdir("/proc/self/task"))
        for m in (1, 64): layer.forward(np.ones((m, 2048), np.float16))
        print(len(os.listdir("/proc/self/task")) - before)
    """
    for threads in (1, 3):
        counted, extra = map(int, run_child(code, FP4LINEAR_NUM_THREADS=str(threads)).stdout.split())
        assert counted == threads
        assert extra <= threads - 1  # the caller is one of them


def test_default_threads_is_what_the_process_may_use() -> None:
    code = """
        import os
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        from fp4linear import _core
        print(_core.default_threads())
    """
    assert run_child(code).stdout == "1\n"
    assert _core.default_threads() >= 1


def test_isas_run_in_threads_too() -> None:
    b, scales = reference.make(130, 256, 4)
    for isa in ISAS:
        fp4linear.Fp4Linear(b, scales, 1.0, isa=isa, threads=3).forward(reference.x_of(9, 256, 1))
        assert _core.last_isa() == isa

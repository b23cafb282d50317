"""Host time of one call, in microseconds: how long it keeps the caller, not how long the GPU works.

    python tools/host_overhead.py [--device cuda|cpu] [--n 16] [--k 128] [--batches 200] [--calls 100]

Eager calls of a layer from torch, then of fp4linear.torch's module and op, compiled, in a CUDA graph, from CuPy and
from JAX, where these are installed. The layer is small, and a batch short enough for the GPU's queue, so that no call
waits for the GPU; on a CPU the time holds the work. Medians over batches; batches of the variants alternate, so that
all see the same machine. A variant that can't be made, or whose first call fails, is named with the reason on stderr;
the others are timed all the same, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

import fp4linear

Calls = dict[str, Callable[[], object]]


def make(n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    b = random.integers(0, 256, (n, k // 2), dtype=np.uint8)
    return b, random.integers(0x20, 0x59, (n, k // 16), dtype=np.uint8)


def of_layer(n: int, k: int, m: int, device: str) -> Calls:
    layer = fp4linear.Fp4Linear(*make(n, k), 2.0**-6, device=device)
    x = torch.randn(m, k, dtype=torch.bfloat16, device=device)
    same = torch.empty_like(x)
    dense = torch.randn(n, k, dtype=torch.bfloat16, device=device)
    out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
    calls: Calls = {
        "forward(x)": lambda: layer.forward(x),
        "forward(x, out=)": lambda: layer.forward(x, out=out),
        "torch.mul(x, x, out=)": lambda: torch.mul(x, x, out=same),
        "torch.nn.functional.linear": lambda: torch.nn.functional.linear(x, dense),
        "torch.empty": lambda: torch.empty(m, n, dtype=torch.bfloat16, device=device),
    }
    if device == "cuda":
        stream = torch.cuda.current_stream().cuda_stream
        no_rows, no_out = x[:0], out[:0]
        scalar = fp4linear.Fp4Linear(*make(n, k), 2.0**-6, device="cuda", path="gemv_scalar")
        calls |= {
            "forward(x, stream=)": lambda: layer.forward(x, stream=stream),
            "forward(x, out=, stream=)": lambda: layer.forward(x, out=out, stream=stream),
            "  of it without a launch": lambda: layer.forward(no_rows, out=no_out, stream=stream),
            "  the same, gemv_scalar": lambda: scalar.forward(x, out=out, stream=stream),
        }
    return calls


@torch.inference_mode()
def of_torch_module(n: int, k: int, m: int, device: str, graph_calls: int) -> Calls:
    from fp4linear.torch import Fp4LinearModule

    module = Fp4LinearModule.from_parts(*make(n, k), np.float32(2.0**-6)).to(device)
    linear = torch.nn.Linear(k, n, bias=False, dtype=torch.bfloat16, device=device)
    x = torch.randn(m, k, dtype=torch.bfloat16, device=device)
    op = torch.ops.fp4linear.linear.default
    compiled = torch.compile(module, fullgraph=True, dynamic=False)
    compiled_linear = torch.compile(linear, fullgraph=True, dynamic=False)
    compiled(x), compiled_linear(x)
    calls: Calls = {
        "Fp4LinearModule(x)": lambda: module(x),
        "torch.ops.fp4linear.linear": lambda: op(x, module._key, None, n, k),
        "torch.compile(Fp4LinearModule)(x)": lambda: compiled(x),
        "torch.compile(nn.Linear)(x)": lambda: compiled_linear(x),
    }
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(graph_calls):
                module(x)
        calls[f"replay of a graph of {graph_calls} calls"] = graph.replay
    return calls


def of_cupy(n: int, k: int, m: int) -> Calls:
    import cupy

    layer = fp4linear.Fp4Linear(*make(n, k), 2.0**-6, device="cuda")
    x, out = cupy.ones((m, k), cupy.float16), cupy.empty((m, n), cupy.float16)
    return {
        "CuPy: forward(x)": lambda: layer.forward(x),
        "CuPy: forward(x, out=)": lambda: layer.forward(x, out=out),
        "CuPy: multiply(x, x)": lambda: cupy.multiply(x, x),
    }


def of_jax(n: int, k: int, m: int, device: str) -> Calls:
    import jax
    import jax.numpy as jnp

    from fp4linear.jax import Fp4Params, linear

    # Committed to the place: jit would move them to JAX's default device otherwise.
    place = jax.devices("gpu" if device == "cuda" else "cpu")[0]
    params = Fp4Params.from_canonical(*make(n, k), np.float32(2.0**-6), device=place)
    x = jax.device_put(jnp.ones((m, k), jnp.bfloat16), place)
    w = jax.device_put(jnp.ones((k, n), jnp.bfloat16), place)
    jitted, dense = jax.jit(linear), jax.jit(jnp.matmul)
    layer = params.layer(device=device)
    return {
        "JAX: jit(linear)(x, params)": lambda: jitted(x, params),
        "JAX: linear(x, params)": lambda: linear(x, params),
        "JAX: Fp4Linear.forward(x)": lambda: layer.forward(x),
        "JAX: jit(matmul)(x, w)": lambda: dense(x, w),
    }


@torch.inference_mode()
def variants(options: argparse.Namespace) -> tuple[Calls, dict[str, str]]:
    """Those that work, each called once, and why the others do not."""
    shape = options.n, options.k, options.m
    groups: dict[str, Callable[[], Calls]] = {
        "Fp4Linear": lambda: of_layer(*shape, options.device),
        "fp4linear.torch": lambda: of_torch_module(*shape, options.device, options.calls),
    }
    if options.device == "cuda" and importlib.util.find_spec("cupy"):
        groups["CuPy"] = lambda: of_cupy(*shape)
    if importlib.util.find_spec("jax"):
        groups["JAX"] = lambda: of_jax(*shape, options.device)
    calls: Calls = {}
    failed: dict[str, str] = {}
    for group, made_by in groups.items():
        try:
            made = made_by()
        except Exception as error:
            failed[f"all of {group}"] = f"{type(error).__name__}: {error}"
            continue
        for name, call in made.items():
            try:
                call()
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}"
            else:
                calls[name] = call
    return calls, failed


@torch.inference_mode()
def measure(calls: Calls, batches: int, count: int, device: str) -> dict[str, list[float]]:
    """Microseconds a call, a value a batch."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for batch in range(batches + 10):  # the first ten warm up
        for name, call in calls.items():
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter_ns()
            for _ in range(1 if name.startswith("replay") else count):
                call()
            took = time.perf_counter_ns() - start
            if batch >= 10:
                times[name].append(took / count / 1000)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--n", type=int, default=16, help="out_features")
    parser.add_argument("--k", type=int, default=128, help="in_features")
    parser.add_argument("--m", type=int, default=1, help="rows of x")
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--calls", type=int, default=100, help="calls a batch")
    parser.add_argument("--json", action="store_true", help="one JSON line instead of the table")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the frameworks share the GPU's memory
    calls, failed = variants(options)
    for what, why in failed.items():
        print(f"{what} failed: {why}", file=sys.stderr)
    times = measure(calls, options.batches, options.calls, options.device)
    medians = {name: statistics.median(values) for name, values in times.items()}
    if options.json:
        shape = {"n": options.n, "k": options.k, "m": options.m}
        print(json.dumps({**shape, "microseconds": medians, "failed": failed}))
        return 1 if failed else 0
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, N={options.n} K={options.k} M={options.m}")
    print(f"{'µs a call, median of ' + str(options.batches) + ' batches':38} {'median':>8} {'10 %':>8} {'90 %':>8}")
    for name, values in times.items():
        low, high = np.quantile(values, [0.1, 0.9])
        print(f"{name:38} {medians[name]:8.2f} {low:8.2f} {high:8.2f}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

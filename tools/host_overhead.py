"""Host time of one eager call from torch, in microseconds: how long forward() keeps the caller, not how long it runs.

    python tools/host_overhead.py [--n 16] [--k 128] [--batches 200] [--calls 100]

The layer is small, and a batch short enough for the GPU's queue, so that no call waits for the GPU. Medians over
batches; batches of the variants alternate, so that all see the same machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

import fp4linear


def variants(n: int, k: int, m: int) -> dict[str, Callable[[], object]]:
    random = np.random.default_rng(0)
    b = random.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scales = random.integers(0x20, 0x59, (n, k // 16), dtype=np.uint8)
    layer = fp4linear.Fp4Linear(b, scales, 2.0**-6, device="cuda")
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    same = torch.empty_like(x)
    dense = torch.randn(n, k, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    no_rows, no_out = x[:0], out[:0]
    scalar = fp4linear.Fp4Linear(b, scales, 2.0**-6, device="cuda", path="gemv_scalar")
    return {
        "forward(x)": lambda: layer.forward(x),
        "forward(x, out=)": lambda: layer.forward(x, out=out),
        "forward(x, stream=)": lambda: layer.forward(x, stream=stream),
        "forward(x, out=, stream=)": lambda: layer.forward(x, out=out, stream=stream),
        "  of it without a launch": lambda: layer.forward(no_rows, out=no_out, stream=stream),
        "  the same, gemv_scalar": lambda: scalar.forward(x, out=out, stream=stream),
        "torch.mul(x, x, out=)": lambda: torch.mul(x, x, out=same),
        "torch.nn.functional.linear": lambda: torch.nn.functional.linear(x, dense),
        "torch.empty": lambda: torch.empty(m, n, dtype=torch.bfloat16, device="cuda"),
    }


def measure(calls: dict[str, Callable[[], object]], batches: int, count: int) -> dict[str, list[float]]:
    """Microseconds a call, a value a batch."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for batch in range(batches + 10):  # the first ten warm up
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            for _ in range(count):
                call()
            took = time.perf_counter_ns() - start
            if batch >= 10:
                times[name].append(took / count / 1000)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--n", type=int, default=16, help="out_features")
    parser.add_argument("--k", type=int, default=128, help="in_features")
    parser.add_argument("--m", type=int, default=1, help="rows of x")
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--calls", type=int, default=100, help="calls a batch")
    parser.add_argument("--json", action="store_true", help="one JSON line instead of the table")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU")
    times = measure(variants(options.n, options.k, options.m), options.batches, options.calls)
    medians = {name: statistics.median(values) for name, values in times.items()}
    if options.json:
        print(json.dumps({"n": options.n, "k": options.k, "m": options.m, "microseconds": medians}))
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, N={options.n} K={options.k} M={options.m}")
    print(f"{'µs a call, median of ' + str(options.batches) + ' batches':38} {'median':>8} {'10 %':>8} {'90 %':>8}")
    for name, values in times.items():
        low, high = np.quantile(values, [0.1, 0.9])
        print(f"{name:38} {medians[name]:8.2f} {low:8.2f} {high:8.2f}")


if __name__ == "__main__":
    main()

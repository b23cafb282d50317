"""Mixed calls from many threads for a long time: every result has the bits of the serial one, and memory stays flat.

    python tools/soak.py [--device cpu|cuda|cuda:N] [--calls 100000] [--threads 8] [--seed 1]

Threads draw layers (shapes, block sizes, paths, instruction sets, number of threads, factors, bias), x (rows, dtypes,
strides, empty ones) and what to do: forward, forward with out=, errors of several kinds, construction, copies, plans,
dequantize, quantize. On a GPU every thread has two streams, and inputs and results stay on the device (torch). The
library keeps scratch for every stream (docs/limits.md), so these are the same streams before and after the count of
memory, and each has run everything once. A GPU's memory is what all of its processes use: run it alone there. Exit
status 1: a wrong bit, an exception that was not asked for, or memory that grew.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import os
import random
import resource
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

import fp4linear

HOST_GROWTH = 8 << 20  # bytes of resident memory after the warm-up: arenas of threads, no call's share times calls
DEVICE_GROWTH = 4 << 20  # bytes; 2 MiB is the unit of device memory
WARM_UP = 5  # a fifth of the calls fills caches, pools and arenas


@dataclass
class Case:
    """A layer, inputs, and what the serial call gave for each."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    layer: fp4linear.Fp4Linear
    inputs: list[Any]
    wanted: list[bytes]
    bad: Any


class Cpu:
    """NumPy arrays."""

    device: str | None = None
    dtypes = (np.dtype(np.float16), np.dtype(np.float32))
    paths: tuple[tuple[str, int, int], ...] = (("auto", 2, 400), ("cpu_gemv", 2, 400), ("cpu_gemm", 2, 400))

    def array(self, values: np.ndarray) -> Any:
        return values

    def raw(self, y: Any) -> bytes:
        return bytes(y.tobytes())

    def poisoned(self, y: Any) -> Any:
        return np.full_like(y, np.nan)

    def call(self, layer: Any, x: Any, generator: random.Random, **options: Any) -> Any:
        return layer.forward(x, **options)

    def held(self) -> int:
        return 0

    def prepare(self, cases: list[Case], threads: int) -> None:
        """What the threads of all runs share, with the memory that the library keeps for it."""

    def thread(self, worker: int) -> None:
        """What a thread needs before its first call."""


class Cuda(Cpu):
    """torch tensors on a GPU, each call on one of the thread's streams."""

    def __init__(self, device: str) -> None:
        import torch

        self.torch, self.device = torch, device if ":" in device else f"{device}:{torch.cuda.current_device()}"
        self.paths = (
            ("auto", 32, 400), ("gemv_tensor_core", 64, 400), ("gemv_scalar", 32, 400), ("gemm_fused", 64, 400),
            ("dequant_cublas", 2, 400),
        )  # fmt: skip
        self.dtypes = (np.dtype(np.float16),)
        self.local = threading.local()
        self.streams: list[list[Any]] = []
        torch.zeros(1, device=self.device)

    def prepare(self, cases: list[Case], threads: int) -> None:
        self.streams = [[self.torch.cuda.Stream(self.device) for _ in range(2)] for _ in range(threads)]
        for stream in itertools.chain.from_iterable(self.streams):
            stream.wait_stream(self.torch.cuda.current_stream(self.device))
            with self.torch.cuda.stream(stream):
                for case in cases:
                    for x in case.inputs:
                        case.layer.forward(x)
            stream.synchronize()

    def thread(self, worker: int) -> None:
        self.torch.cuda.set_device(self.device)
        self.local.streams = self.streams[worker]

    def array(self, values: np.ndarray) -> Any:
        tensor = self.torch.from_numpy(np.ascontiguousarray(values)).to(self.device)
        return tensor.to(self.torch.bfloat16) if values.shape[0] % 2 else tensor

    def raw(self, y: Any) -> bytes:
        return bytes(y.contiguous().view(self.torch.int16).cpu().numpy().tobytes())

    def poisoned(self, y: Any) -> Any:
        return self.torch.full_like(y, float("nan"))

    def call(self, layer: Any, x: Any, generator: random.Random, **options: Any) -> Any:
        if not hasattr(self.local, "streams"):
            return layer.forward(x, **options)
        stream = generator.choice(self.local.streams)
        stream.wait_stream(self.torch.cuda.current_stream())
        with self.torch.cuda.stream(stream):
            y = layer.forward(x, **options)
        stream.synchronize()
        return y

    def held(self) -> int:
        """Device memory in use beside torch's own cache."""
        self.torch.cuda.synchronize()
        self.torch.cuda.empty_cache()
        free, total = self.torch.cuda.mem_get_info(self.device)
        return int(total - free)


def make_case(backend: Cpu, generator: random.Random) -> Case:
    path, multiple, most = generator.choice(backend.paths)
    n, k = generator.randint(1, 200), multiple * generator.randint(1, max(1, most // multiple))
    numbers = np.random.default_rng(generator.getrandbits(32))
    block_size = generator.choice((16, 16, 8, 32)) if path == "dequant_cublas" or backend.device is None else 16
    b = numbers.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scales = numbers.integers(0x20, 0x59, (n, -(-k // block_size)), dtype=np.uint8)
    scale2 = 0.01 if generator.random() < 0.5 else numbers.standard_normal(n).astype(np.float32)
    bias = None if generator.random() < 0.5 else numbers.standard_normal(n).astype(np.float32)
    options: dict[str, Any] = {"block_size": block_size, "path": path}
    if backend.device is not None:
        options["device"] = backend.device
    else:
        options |= {"threads": generator.randint(1, 4), "isa": generator.choice(here())}
        if path == "auto" and generator.random() < 0.3:
            options["batch_invariant"] = True
    layer = fp4linear.Fp4Linear(b, scales, scale2, bias, **options)
    most_rows = 8 if path.startswith("gemv_") else 40
    inputs = []
    for _ in range(4):
        x = numbers.standard_normal((generator.randint(0, most_rows), 2 * k)).astype(generator.choice(backend.dtypes))
        held = backend.array(x)
        inputs.append(held[:, ::2] if generator.random() < 0.3 else held[:, :k])
    wanted = [backend.raw(layer.forward(x)) for x in inputs]
    bad = backend.array(np.ones((2, k + 1), np.float16))
    return Case((b, scales, scale2, bias), options, layer, inputs, wanted, bad)


def here() -> list[str]:
    """The instruction sets that run on this machine."""
    found = []
    for name in ("avx512_bf16", "avx512", "avx2", "portable"):
        try:
            fp4linear.Fp4Linear(np.zeros((1, 1), np.uint8), np.zeros((1, 1), np.uint8), 1.0, isa=name)
        except ValueError:
            continue
        found.append(name)
    return found


def refused(call: Any, *kinds: type[Exception]) -> None:
    try:
        call()
    except kinds:
        return
    raise AssertionError("no error where one was due")


def one_call(backend: Cpu, case: Case, generator: random.Random) -> str:
    """Does one of the things; what it was. AssertionError for a wrong bit."""
    at = generator.randrange(len(case.inputs))
    x, wanted, draw = case.inputs[at], case.wanted[at], generator.random()
    if draw < 0.6:
        y = backend.call(case.layer, x, generator)
        assert backend.raw(y) == wanted, f"{case.options}: other bits for {tuple(x.shape)}"
        return "forward"
    if draw < 0.75:
        out = backend.poisoned(backend.call(case.layer, x, generator))
        backend.call(case.layer, x, generator, out=out)
        assert backend.raw(out) == wanted, f"{case.options}: other bits in out for {tuple(x.shape)}"
        return "out"
    if draw < 0.85:
        refused(lambda: case.layer.forward(case.bad), ValueError)
        refused(lambda: case.layer.forward([1.0]), TypeError)
        b, scales, scale2, bias = case.arguments
        refused(lambda: fp4linear.Fp4Linear(b, scales[:, :0], scale2, bias, **case.options), ValueError)
        return "errors"
    if draw < 0.9:
        made = fp4linear.Fp4Linear(*case.arguments, **case.options)
        assert backend.raw(backend.call(made, x, generator)) == wanted, f"{case.options}: other bits of a new layer"
        return "construct"
    if draw < 0.93:
        made = copy.deepcopy(case.layer)
        assert backend.raw(backend.call(made, x, generator)) == wanted, f"{case.options}: other bits of a copy"
        return "copy"
    if draw < 0.97:
        assert (case.layer.canonical()[0] == case.arguments[0]).all()
        assert case.layer.plan(int(x.shape[0])).reasons is not None
        return "canonical and plan"
    fp4linear.quantize(np.ones((4, 32), np.float32) * generator.randint(1, 9))
    return "quantize"


def resident() -> int:
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def run(backend: Cpu, cases: list[Case], calls: int, threads: int, seed: int) -> Counter[str]:
    """`calls` calls shared out among threads; the first failure of any is raised."""
    done: Counter[str] = Counter()
    failures: list[BaseException] = []
    lock = threading.Lock()

    def work(worker: int) -> None:
        generator, mine = random.Random(f"{seed} {worker}"), Counter[str]()
        try:
            backend.thread(worker)
            for _ in range(calls // threads + (worker < calls % threads)):
                if failures:
                    break
                mine[one_call(backend, generator.choice(cases), generator)] += 1
        except BaseException as error:
            failures.append(error)
        with lock:
            done.update(mine)

    workers = [threading.Thread(target=work, args=(worker,)) for worker in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    return done


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    backend = Cpu() if options.device == "cpu" else Cuda(options.device)
    generator = random.Random(options.seed)
    cases = [make_case(backend, generator) for _ in range(options.layers)]
    started = time.monotonic()
    backend.prepare(cases, options.threads)
    warm = options.calls // WARM_UP
    done = run(backend, cases, warm, options.threads, options.seed)
    before = resident(), backend.held(), len(os.listdir("/proc/self/fd"))
    print(f"after {warm} calls: {before[0] >> 20} MiB resident, {before[1] >> 20} MiB of the device", flush=True)
    done += run(backend, cases, options.calls - warm, options.threads, options.seed + 1)
    after = resident(), backend.held(), len(os.listdir("/proc/self/fd"))
    grown = tuple(now - then for now, then in zip(after, before, strict=True))
    print(f"after {options.calls} calls: {grown[0]} bytes more resident, {grown[1]} of the device, {grown[2]} files")
    print(", ".join(f"{count} {what}" for what, count in done.most_common()))
    print(f"{time.monotonic() - started:.0f} s, {options.threads} threads, {options.layers} layers, no wrong bit")
    if grown[0] > HOST_GROWTH or grown[1] > DEVICE_GROWTH or grown[2] > 0:
        print("memory or files grew", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Bytes a second that a GPU reads, measured with the best reader at hand."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable
from typing import Any

from .graphs import seconds_of

READ_BYTES = 2_000_000_000  # 33 times the L2 cache of an H200
REPEATS = 7

# Read bandwidth of named GPUs as measured with CUDA-graph replays over at least 1.6 GB (2026-11-29). A share of it
# compares runs; the bandwidth of the same run tells what the machine gave then.
NAMED_LIMITS = {"H200": 4.4e12}

BLOCKS_PER_SM = 8
THREADS = 256
# 16 bytes a load, four in flight a thread. The store never happens; it keeps the loads.
KERNEL = """
extern "C" __global__ void read_all(const uint4* data, long long count, unsigned* sink) {
    const long long stride = (long long)gridDim.x * blockDim.x;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned seen = 0;
    for (; i + 3 * stride < count; i += 4 * stride) {
        const uint4 a = __ldcs(data + i), b = __ldcs(data + i + stride);
        const uint4 c = __ldcs(data + i + 2 * stride), d = __ldcs(data + i + 3 * stride);
        seen |= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    for (; i < count; i += stride) {
        const uint4 a = __ldcs(data + i);
        seen |= a.x ^ a.y ^ a.z ^ a.w;
    }
    if (seen == 0x5eed5eedu) *sink = seen;
}
"""


def limit_of(name: str) -> float | None:
    """Bytes a second of a GPU by its name, where a measurement is recorded."""
    return next((limit for part, limit in NAMED_LIMITS.items() if part in name), None)


def read_bandwidth(torch: Any, device: str) -> tuple[float, str]:
    """The best of several readers of 2 GB: bytes a second (median of its repeats) and its name."""
    data = torch.empty(READ_BYTES // 16 * 4, dtype=torch.float32, device=device).uniform_()
    readers: dict[str, Callable[[], object]] = {
        "torch.sum": data.sum,
        "torch.amax": data.amax,
        "torch.dot": lambda: torch.dot(data[: data.numel() // 2], data[data.numel() // 2 :]),
    }
    note = ""
    try:
        readers["a CUDA kernel"] = kernel_reader(torch, data)
    except Exception as error:  # a CuPy that is absent or doesn't fit costs a better figure, no more
        note = f" (no CuPy for a plain kernel: {type(error).__name__})"
    rates = {
        name: data.numel() * 4 / statistics.median(seconds_of(torch, read, REPEATS)) for name, read in readers.items()
    }
    best = max(rates, key=lambda name: rates[name])
    return rates[best], best + note


def kernel_reader(torch: Any, data: Any) -> Callable[[], object]:
    """Reads a float32 tensor with a kernel that CuPy compiles."""
    cupy = importlib.import_module("cupy")
    kernel = cupy.RawKernel(KERNEL, "read_all")
    sink = torch.zeros(1, dtype=torch.int32, device=data.device)
    index = data.device.index
    blocks = torch.cuda.get_device_properties(index).multi_processor_count * BLOCKS_PER_SM

    def read() -> None:
        with cupy.cuda.Device(index):  # its current stream is the default one, as torch's is here
            kernel((blocks,), (THREADS,), (data.data_ptr(), data.numel() // 4, sink.data_ptr()))

    read()
    torch.cuda.synchronize()
    return read

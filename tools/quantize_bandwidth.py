"""How near to copy bandwidth a GPU quantises x to NVFP4, in one run:

    python tools/quantize_bandwidth.py [--device cuda] [--seconds 1] [--json FILE]

Ours and torch's copy take turns as CUDA graphs over at least 250 MB of x, which no cache holds. The copy moves as many
bytes as x has, in and out. The quantiser's bytes are x, its codes and its scales; where the global scale is taken from
x, x counts twice, since it is read twice. Both as a median over the replays. Nothing is asserted but the bytes of the
first row, against the CPU's.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

import fp4linear
from fp4linear import _core
from fp4linear.bench.graphs import Graph, alternate

LEAST_BYTES = 250_000_000  # of x, in the buffers that a graph goes through: five times the L2 cache of an H200
TARGET = 0.70  # of copy bandwidth
DTYPES = ("bfloat16", "float16", "float32")
SHAPES = ((4096, 4096), (8192, 8192), (2048, 5120), (256, 4096), (16, 4096))


class Case(NamedTuple):
    """One way to quantise x [m, k]."""

    m: int
    k: int
    dtype: str = "bfloat16"
    global_scale: float | Literal["dynamic"] = 1.7
    swizzled: bool = True

    @property
    def x_bytes(self) -> int:
        return self.m * self.k * (4 if self.dtype == "float32" else 2)

    @property
    def out_bytes(self) -> int:
        """Codes and scales, without padding."""
        return self.m * (self.k // 2 + -(-self.k // 16))

    @property
    def moved_bytes(self) -> int:
        return self.x_bytes * (2 if self.global_scale == "dynamic" else 1) + self.out_bytes

    def __str__(self) -> str:
        return f"{self.m}x{self.k} {self.dtype} g={self.global_scale} {'swizzled' if self.swizzled else 'plain'}"


def cases() -> Iterator[Case]:
    for m, k in SHAPES:
        yield Case(m, k)
    large_m, large_k = SHAPES[0]
    for dtype in DTYPES:
        yield Case(large_m, large_k, dtype, swizzled=False)
    yield Case(large_m, large_k, "float16")
    yield Case(large_m, large_k, global_scale="dynamic")
    yield Case(large_m, large_k, global_scale=1.0)
    yield Case(large_m, large_k + 2)  # rows that start between multiples of 16 bytes, and a short last block


def buffers(torch: Any, case: Case, device: str) -> list[Any]:
    count = -(-LEAST_BYTES // case.x_bytes)
    dtype = getattr(torch, case.dtype)
    return [torch.randn((case.m, case.k), device=device).to(dtype) for _ in range(count)]


def quantising(x: Any, case: Case, kept: dict[int, Any], index: int) -> Callable[[], object]:
    def call() -> object:
        # Kept, so that no two results of a graph share their memory.
        kept[index] = fp4linear.quantize_activations(x, global_scale=case.global_scale, swizzled=case.swizzled)
        return kept[index]

    return call


def copying(source: Any, target: Any) -> Callable[[], object]:
    return lambda: target.copy_(source)


def check(x: Any, case: Case) -> None:
    """The first rows' bytes are the CPU's."""
    rows = x[:3].contiguous()
    got = fp4linear.quantize_activations(rows, global_scale=case.global_scale, swizzled=case.swizzled)
    want = fp4linear.quantize_activations(rows.cpu(), global_scale=case.global_scale, swizzled=case.swizzled)
    for ours, theirs in zip(got, want, strict=True):
        if ours.cpu().numpy().tobytes() != np.asarray(theirs).tobytes():
            raise SystemExit(f"{case}: the GPU's bytes are not the CPU's")


def measure(torch: Any, case: Case, device: str, seconds: float) -> dict[str, Any]:
    """Bytes a second of both, and the share."""
    xs = buffers(torch, case, device)
    check(xs[0], case)
    targets = [torch.empty_like(x) for x in xs]
    kept: dict[int, Any] = {}
    sides = {
        "quantise": Graph(torch, [quantising(x, case, kept, i) for i, x in enumerate(xs)], len(xs)),
        "copy": Graph(torch, [copying(x, y) for x, y in zip(xs, targets, strict=True)], len(xs)),
    }
    samples = alternate(sides, seconds)
    took = {name: statistics.median(sample.by_call[0]) for name, sample in samples.items()}
    ours, copy = case.moved_bytes / took["quantise"], 2 * case.x_bytes / took["copy"]
    return {
        **case._asdict(),
        "buffers": len(xs),
        "us": took["quantise"] * 1e6,
        "bytes_per_second": ours,
        "copy_bytes_per_second": copy,
        "share_of_copy": ours / copy,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each line")
    parser.add_argument("--json", type=Path, help="JSON lines to this file")
    arguments = parser.parse_args()
    if not _core.cuda_info()["devices"]:
        raise SystemExit(f"no GPU: {_core.cuda_info()['reason']}")
    import torch

    torch.cuda.set_device(arguments.device if ":" in arguments.device else 0)
    print(f"{torch.cuda.get_device_name()}, {_core.cuda_info()['build_info']}; target {TARGET:.0%} of copy bandwidth")
    records = []
    for case in cases():
        record = measure(torch, case, arguments.device, arguments.seconds)
        records.append(record)
        print(
            f"{case!s:48} {record['us']:9.1f} us  {record['bytes_per_second'] / 1e12:5.2f} TB/s"
            f"  copy {record['copy_bytes_per_second'] / 1e12:5.2f} TB/s  {record['share_of_copy']:6.1%}"
        )
    if arguments.json:
        arguments.json.write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main()

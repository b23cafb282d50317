"""A decoding step of NVFP4 layers as one CUDA graph, captured by hand and by torch.compile.

python examples/torch_cuda_graph.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import nn

from fp4linear.torch import quantize_model

if not torch.cuda.is_available():
    print("skipped: CUDA graphs need a GPU, and torch sees none")
    sys.exit(0)

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(16))).to("cuda", torch.bfloat16).eval()
quantize_model(model, exclude=(), progress=False)
x = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)

with torch.inference_mode():
    eager = model(x)

    graph = torch.cuda.CUDAGraph()
    held_x = x.clone()
    with torch.cuda.graph(graph):
        held_y = model(held_x)
    other = torch.randn_like(x)
    held_x.copy_(other)
    graph.replay()
    assert torch.equal(held_y, model(other))
    held_x.copy_(x)
    graph.replay()
    assert torch.equal(held_y, eager)

    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):  # compiles, records, replays
        y = compiled(x)
    assert torch.equal(y, eager)


def microseconds(call: Callable[[], object], repeats: int = 50) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / repeats


with torch.inference_mode():
    times = {"eager": lambda: model(x), "graph": graph.replay, "compiled": lambda: compiled(x)}
    shown = ", ".join(f"{name} {microseconds(call):.0f} us" for name, call in times.items())
    print(f"16 layers of 4096 x 4096, M = 1: {shown}")

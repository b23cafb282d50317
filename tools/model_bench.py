"""Decode and prefill of a decoder with random weights: bf16, and the same model after fp4linear.torch.quantize_model.

    python tools/model_bench.py [--layers 36] [--batch 1,8] [--prompt 2048] [--context 256] [--tokens 64]
                                [--separate] [--eager] [--profile]

The model has the shapes of Qwen3-8B (huggingface.co/Qwen/Qwen3-8B, config.json) and its arithmetic, which
tests/test_model_bench.py compares with that of transformers; its weights are random, for speed does not depend on them.
q, k and v are one linear layer, gate and up another, as serving engines keep them; --separate leaves them apart, as
transformers does. Whatever is said here holds for both models: they differ in their linear layers alone.

A decode step reads the embedding of the last token, runs the layers, the last norm and the head, takes the most likely
token and moves on by one position. It is one CUDA graph. In it, a layer is its linear layers and, compiled by
torch.compile, these kernels: residual and norm; norm and rotary embedding of q and k; keys and values into a cache of
context + tokens positions; attention of the one query over that cache, in float32 (scores, softmax, sum: a masked
scaled_dot_product_attention copies keys, values and mask for it); residual and norm; activation. --eager compiles none
of them. The cache holds random numbers before the first step. Steps are timed eight at a time, since the host does not
choose the token; figures are medians. A prefill fills the cache, with torch's causal attention, and gives the token
that follows.

Memory is the peak of torch's allocator after the model was made, with the fp4linear weights (which lie outside of it)
added. --profile prints the time of each kernel of the decode graphs.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import fp4linear
import fp4linear.torch

STEPS = 8  # decode steps that are enqueued before the host waits
WARM_UP = 2
BLOCK = 128  # of the vocabulary, for the search for the largest logit
CHUNK = 64  # positions of the cache whose values are summed apart: enough blocks of threads for one query


@dataclass(frozen=True)
class Shape:
    """Qwen3-8B."""

    layers: int = 36
    hidden: int = 4096
    intermediate: int = 12_288
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 151_936
    eps: float = 1e-6
    theta: float = 1e6


SMALL = Shape(layers=3, hidden=256, intermediate=512, heads=4, kv_heads=2, head_dim=64, vocabulary=512)


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rotate(x: Any, cos: Any, sin: Any) -> Any:
    """Rotary embedding; the first half of sin has the other sign. No torch.cat, which is kernels of its own."""
    return x * cos + x.unflatten(-1, (2, -1)).flip(-2).flatten(-2) * sin


def attend_one(q: Any, keys: Any, values: Any, position: Any) -> Any:
    """One query [batch, 1, heads, dim] over the positions of a cache [batch, kv_heads, length, dim] up to its own."""
    batch, _, heads, dim = q.shape
    kv_heads, length = keys.shape[1:3]
    grouped = q.float().view(batch, kv_heads, heads // kv_heads, 1, dim)
    scores = (grouped * keys.float().unsqueeze(2)).sum(-1) / math.sqrt(dim)
    seen = torch.arange(length, device=q.device) <= position
    weights = torch.softmax(scores.where(seen, -math.inf), -1).unflatten(-1, (-1, CHUNK))
    y = (weights.unsqueeze(-1) * values.float().unflatten(2, (-1, CHUNK)).unsqueeze(2)).sum(-2).sum(-2)
    return y.to(q.dtype).reshape(batch, 1, heads * dim)


def attend_all(q: Any, keys: Any, values: Any) -> Any:
    """Queries [batch, length, heads, dim] over the keys and values [batch, kv_heads, length, dim] of these tokens."""
    y = nn.functional.scaled_dot_product_attention(q.transpose(1, 2), keys, values, is_causal=True, enable_gqa=True)
    return y.transpose(1, 2).flatten(2)


class Layer(nn.Module):
    def __init__(self, shape: Shape, separate: bool) -> None:
        super().__init__()
        self.shape = shape
        rows = [shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.kv_heads * shape.head_dim]
        of_qkv = rows if separate else [sum(rows)]
        of_gate_up = [shape.intermediate] * 2 if separate else [2 * shape.intermediate]
        self.qkv = nn.ModuleList(nn.Linear(shape.hidden, n, bias=False) for n in of_qkv)
        self.o = nn.Linear(rows[0], shape.hidden, bias=False)
        self.gate_up = nn.ModuleList(nn.Linear(shape.hidden, n, bias=False) for n in of_gate_up)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        self.second_norm = nn.Parameter(torch.ones(shape.hidden))
        # A row a head of q, k and v, whose last are not read: what is done to them is one kernel.
        self.head_norms = nn.Parameter(torch.ones(shape.heads + 2 * shape.kv_heads, shape.head_dim))

    def forward(self, x: Any, update: Any, cos: Any, sin: Any, cache: Any, position: Any) -> tuple[Any, Any]:
        """x and what the layer before adds to it, [batch, tokens, hidden] -> the same for the next one.

        cache [batch, 2 * kv_heads, length, dim]: keys, then values. One token comes at the position, several from 0 on.
        """
        s = self.shape
        x = x + update
        h = rms_norm(x, self.norm, s.eps)
        qkv = torch.cat([part(h) for part in self.qkv], -1).unflatten(-1, (-1, s.head_dim))
        rotated = rotate(rms_norm(qkv, self.head_norms, s.eps), cos[:, None], sin[:, None])
        is_v = torch.arange(qkv.shape[2], device=x.device)[:, None] >= s.heads + s.kv_heads
        qkv = torch.where(is_v, qkv, rotated)
        q, kv = qkv[:, :, : s.heads], qkv[:, :, s.heads :].transpose(1, 2)
        if x.shape[1] == 1:
            cache.index_copy_(2, position, kv)
            keys, values = cache.split(s.kv_heads, 1)
            y = attend_one(q, keys, values, position)
        else:
            cache[:, :, : x.shape[1]] = kv
            y = attend_all(q, *kv.split(s.kv_heads, 1))
        x = x + self.o(y)
        h = rms_norm(x, self.second_norm, s.eps)
        gate, up = torch.cat([part(h) for part in self.gate_up], -1).chunk(2, -1)
        return x, self.down(nn.functional.silu(gate) * up)


class Decoder(nn.Module):
    """Qwen3's decoder. With compiled=True a layer is one graph for all layers, and so is what follows them."""

    def __init__(self, shape: Shape, positions: int, separate: bool = False, compiled: bool = True) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, separate) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        powers = torch.arange(0, shape.head_dim, 2, dtype=torch.float) / shape.head_dim
        angles = torch.outer(torch.arange(positions, dtype=torch.float), shape.theta**-powers)
        self.register_buffer("cos", angles.cos().repeat(1, 2).to(self.norm.dtype))
        self.register_buffer("sin", torch.cat([-angles.sin(), angles.sin()], -1).to(self.norm.dtype))
        self.run_layer, self.run_end = Layer.forward, Decoder.end
        if compiled:
            torch._dynamo.config.recompile_limit = 64
            torch._dynamo.config.fail_on_recompile_limit_hit = True  # it would go on in eager mode otherwise
            self.run_layer = torch.compile(Layer.forward, dynamic=False, fullgraph=True)
            self.run_end = torch.compile(Decoder.end, dynamic=False, fullgraph=True)

    def caches(self, batch: int, length: int) -> list[Any]:
        """Of every layer, as many positions as this or up to a whole chunk more."""
        s = self.shape
        shape = batch, 2 * s.kv_heads, -(-length // CHUNK) * CHUNK, s.head_dim
        return [torch.randn(shape, dtype=self.norm.dtype, device=self.norm.device) for _ in range(s.layers)]

    def forward(self, tokens: Any, caches: list[Any], position: Any) -> tuple[Any, Any]:
        """tokens [batch, n]: one at the position [1], or the first n -> logits and token that follow, [batch, 1, *]."""
        x = self.embedding(tokens)
        update = torch.zeros_like(x)
        n = tokens.shape[1]
        cos, sin = (self.cos[position], self.sin[position]) if n == 1 else (self.cos[:n], self.sin[:n])
        for layer, cache in zip(self.layers, caches, strict=True):
            x, update = self.run_layer(layer, x, update, cos, sin, cache, position)
        logits, token = self.run_end(self, x, update)
        return logits, token

    def end(self, x: Any, update: Any) -> tuple[Any, Any]:
        logits = self.head(rms_norm(x[:, -1:] + update[:, -1:], self.norm, self.shape.eps))
        # The largest of each block, then of those: one search over all is one block of threads a row.
        largest, at = logits.unflatten(-1, (-1, BLOCK)).max(-1)
        block = largest.argmax(-1, keepdim=True)
        return logits, (block * BLOCK + at.gather(-1, block)).squeeze(-1)


def build(shape: Shape, positions: int, device: str, **options: Any) -> Decoder:
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = Decoder(shape, positions, **options)
    torch.set_default_dtype(torch.float32)
    return model.eval().requires_grad_(False)


class DecodeStep:
    """One decode step as a CUDA graph (on a CPU: a plain call)."""

    def __init__(self, model: Decoder, batch: int, context: int, tokens: int) -> None:
        device = model.norm.device
        caches = model.caches(batch, context + tokens)
        self.context = context
        self.token = torch.ones((batch, 1), dtype=torch.long, device=device)
        self.position = torch.full((1,), context, dtype=torch.long, device=device)
        self.graph = None

        def step() -> None:
            self.token.copy_(model(self.token, caches, self.position)[1])
            self.position.add_(1)

        self.step = step
        stream = torch.cuda.Stream() if device.type == "cuda" else None
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                step()
        if stream is not None:
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream):
                step()
        self.rewind()

    def rewind(self) -> None:
        self.position.fill_(self.context)

    def run(self) -> None:
        for _ in range(STEPS):
            self.graph.replay() if self.graph is not None else self.step()


def timed(run: Any, repeats: int, device: str) -> float:
    """Median seconds."""
    seconds = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


# By the names that cuBLAS, this library, torch and Inductor (triton_..._fused_ and the operations) give their kernels.
GROUPS = {
    "attention": r"softmax|flash|fmha|attention|fused\w*_sum",
    "linear": r"gemm|gemv|cublas|cutlass|nvjet|splitk|fp4linear|addmm|::mm|^mm$",
}


def group_of(kernel: str) -> str:
    return next((name for name, words in GROUPS.items() if re.search(words, kernel, re.IGNORECASE)), "other")


def profile(step: DecodeStep, wall: float, title: str, rows: int = 25, width: int = 70) -> None:
    """Prints the kernels of a decode step, most time first. wall: milliseconds of a step without the profiler."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    on_gpu = step.graph is not None
    step.rewind()
    step.run()
    if on_gpu:
        torch.cuda.synchronize()
    step.rewind()
    with profiler(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        step.run()
        if on_gpu:
            torch.cuda.synchronize()
    kernels: list[tuple[float, float, str]] = []  # microseconds and launches a step
    for average in seen.key_averages():
        time_of = average.self_device_time_total if on_gpu else average.self_cpu_time_total
        if time_of > 0 and average.device_type == (DeviceType.CUDA if on_gpu else DeviceType.CPU):
            kernels.append((time_of / STEPS, average.count / STEPS, average.key))
    kernels.sort(reverse=True)
    print(f"{title}: GPU time of one step" if on_gpu else f"{title}: CPU time of one step, by operation")
    print(f"{'us':>9} {'launches':>9}  {'group':10} kernel")
    for time_of, count, name in kernels[:rows]:
        print(f"{time_of:9.1f} {count:9.1f}  {group_of(name):10} {name[:width]}")
    for group in (*GROUPS, "other"):
        members = [(time_of, count) for time_of, count, name in kernels if group_of(name) == group]
        print(f"{sum(t for t, _ in members):9.1f} {sum(c for _, c in members):9.1f}  {group:10} all of {len(members)}")
    busy = sum(time_of for time_of, _, _ in kernels)
    print(f"{busy:9.1f} {sum(c for _, c, _ in kernels):9.1f}  {'sum':10} all of {len(kernels)}")
    # Below zero where kernels overlap: this library's start while the one before them ends.
    print(f"{1e3 * wall - busy:9.1f} {'':9}  {'gaps':10} of a step of {1e3 * wall:.1f} us", flush=True)


def steps_of(options: argparse.Namespace) -> int:
    """How many groups of STEPS decode steps are timed."""
    return max(1, options.tokens // STEPS)


def measure(model: Decoder, name: str, options: argparse.Namespace, weights_outside: int) -> dict[str, Any]:
    device = options.device
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    result: dict[str, Any] = {"model": name}
    for batch in options.batches:
        step = DecodeStep(model, batch, options.context, steps_of(options) * STEPS)
        seconds = timed(step.run, steps_of(options), device) / STEPS
        result[f"decode batch {batch}: ms a step"] = 1e3 * seconds
        result[f"decode batch {batch}: tokens/s"] = batch / seconds
        del step
        gc.collect()
    prompt = torch.ones((1, options.prompt), dtype=torch.long, device=device)
    caches = model.caches(1, options.prompt)
    model(prompt, caches, None)
    result[f"prefill {options.prompt}: ms"] = 1e3 * timed(lambda: model(prompt, caches, None), 5, device)
    if device == "cuda":
        result["peak memory: GB"] = (torch.cuda.max_memory_allocated() + weights_outside) / 1e9
    return result


def measure_and_print(model: Decoder, name: str, options: argparse.Namespace, weights_outside: int) -> dict[str, Any]:
    result = measure(model, name, options, weights_outside)
    print(json.dumps(result), flush=True)
    for batch in options.batches if options.profile else []:
        step = DecodeStep(model, batch, options.context, steps_of(options) * STEPS)
        profile(step, result[f"decode batch {batch}: ms a step"], f"{name}, decode batch {batch}")
    return result


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prefill")
    parser.add_argument("--context", type=int, default=256, help="tokens before the first decode step")
    parser.add_argument("--tokens", type=int, default=64, help="decode steps")
    parser.add_argument("--separate", action="store_true", help="q, k, v, gate and up as linear layers of their own")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--profile", action="store_true", help="the kernels of a decode step, their time and count")
    parser.add_argument("--small", action="store_true", help="a model of toy size, to try the script")
    options = parser.parse_args(arguments)
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.batches = [int(batch) for batch in options.batch.split(",")]
    torch.manual_seed(0)
    shape = SMALL if options.small else Shape(layers=options.layers)
    positions = max(options.prompt, options.context + steps_of(options) * STEPS)
    model = build(shape, positions, options.device, separate=options.separate, compiled=not options.eager)
    dense = measure_and_print(model, "bf16", options, 0)
    fp4linear.torch.quantize_model(model, exclude=(), progress=False)
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    outside = sum(m.layer.nbytes for m in model.modules() if isinstance(m, fp4linear.torch.Fp4LinearModule))
    quantized = measure_and_print(model, "nvfp4", options, outside)
    for key, value in dense.items():
        if key == "model":
            continue
        gain = quantized[key] / value if "tokens/s" in key else value / quantized[key]
        print(f"{key:<32} bf16 {value:10.2f}   nvfp4 {quantized[key]:10.2f}   {gain:5.2f}x")
    if options.device == "cuda":
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, fp4linear {fp4linear.__version__}")


if __name__ == "__main__":
    main()

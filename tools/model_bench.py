"""Decode and prefill of a decoder with random weights: bf16, and the same model after fp4linear.torch.quantize_model.

    python tools/model_bench.py [--layers 36] [--batch 1,8] [--prompt 2048] [--context 256] [--tokens 64] [--eager]

The model has the shapes of Qwen3-8B and comes from transformers; its weights are random, for speed does not depend on
them. A decode step is one CUDA graph with a static cache; figures are medians of replays. What lies between the linear
layers (norms, rotary embedding, cache, activation) is compiled by torch.compile, a layer at a time and for both models
alike: as single kernels of eager mode it takes longer than all NVFP4 weights do. --eager leaves it so. Memory is
the peak of torch's allocator after the model was made, with the fp4linear weights (which lie outside of it) added.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from typing import Any

import torch
import transformers

import fp4linear
import fp4linear.torch


def build(layers: int, device: str, small: bool) -> Any:
    """Qwen3-8B's shapes (huggingface.co/Qwen/Qwen3-8B, config.json), fewer layers or all of them."""
    config = transformers.Qwen3Config(
        vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=4096,
        tie_word_embeddings=False,
    )  # fmt: skip
    if small:
        config.update({"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4})
        config.update({"num_key_value_heads": 2, "head_dim": 64})
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = transformers.Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model.eval().requires_grad_(False)


class LayerCache:
    """One layer's keys and values, in the place of a cache of all layers."""

    def __init__(self, keys: Any, values: Any, length: Any) -> None:
        self.keys, self.values, self.length = keys, values, length

    def update(self, keys: Any, values: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        where = torch.arange(keys.shape[2], device=keys.device) + self.length
        self.keys.index_copy_(2, where, keys)
        self.values.index_copy_(2, where, values)
        self.length.add_(keys.shape[2])
        return self.keys, self.values


def compile_layers(model: Any) -> None:
    """torch.compile of a decoder layer, once for all of them: a model as a whole takes minutes for each shape of x.

    A layer reads its number to find its part of the cache, and torch.compile makes a graph for each number, so the
    layers get their part alone, and no number.
    """
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # it would go on in eager mode otherwise
    plain = qwen3.Qwen3DecoderLayer.forward

    @torch.compile(dynamic=False, fullgraph=True)
    def run(layer: Any, x: Any, mask: Any, cos: Any, sin: Any, part: tuple[Any, ...] | None) -> Any:
        cache = LayerCache(*part) if part is not None else None
        return plain(layer, x, attention_mask=mask, past_key_values=cache, position_embeddings=(cos, sin))

    def forward(
        self: Any, x: Any, attention_mask: Any = None, past_key_values: Any = None, position_embeddings: Any = None,
        **_: Any,
    ) -> Any:  # fmt: skip
        part = None
        if past_key_values is not None:
            kept = past_key_values.layers[numbers[self]]
            if not kept.is_initialized:
                heads = model.config.num_key_value_heads, 0, model.config.head_dim
                kept.lazy_initialization(*[x.new_empty((x.shape[0], *heads))] * 2)
            part = kept.keys, kept.values, kept.cumulative_length
        return run(self, x, attention_mask, *position_embeddings, part)

    numbers = {layer: i for i, layer in enumerate(model.model.layers)}
    for layer in model.model.layers:
        layer.self_attn.layer_idx = 0
    qwen3.Qwen3DecoderLayer.forward = forward
    for kind in (qwen3.Qwen3RMSNorm, qwen3.Qwen3RotaryEmbedding):  # those outside of the layers
        kind.forward = torch.compile(kind.forward, dynamic=False, fullgraph=True)


def prefill(model: Any, tokens: Any, cache: Any = None) -> Any:
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    return model(
        tokens, past_key_values=cache, use_cache=cache is not None, cache_position=positions, logits_to_keep=1
    ).logits


class Decoder:
    """One decode step as a CUDA graph (on a CPU: a plain call)."""

    def __init__(self, model: Any, batch: int, prompt: int, length: int) -> None:
        device = next(model.parameters()).device
        self.cache = transformers.StaticCache(config=model.config, max_cache_len=prompt + length)
        self.token = torch.ones((batch, 1), dtype=torch.long, device=device)
        self.position = torch.full((1,), prompt, dtype=torch.long, device=device)
        prefill(model, torch.ones((batch, prompt), dtype=torch.long, device=device), self.cache)
        self.graph = None

        def step() -> None:
            logits = model(
                self.token, past_key_values=self.cache, use_cache=True, cache_position=self.position,
                position_ids=self.position[None].expand(batch, 1),
            ).logits  # fmt: skip
            self.token.copy_(logits[:, -1:].argmax(-1))
            self.position += 1

        self.step = step
        if device.type == "cuda":
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(2):
                    step()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream):
                step()

    def run(self) -> None:
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


def measure(model: Any, name: str, options: argparse.Namespace, weights_outside: int) -> dict[str, Any]:
    device = options.device
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    result: dict[str, Any] = {"model": name}
    for batch in options.batches:
        decoder = Decoder(model, batch, options.context, options.tokens + 8)
        step = timed(decoder.run, options.tokens, device)
        result[f"decode batch {batch}: ms a step"] = 1e3 * step
        result[f"decode batch {batch}: tokens/s"] = batch / step
        del decoder
        gc.collect()
    prompt = torch.ones((1, options.prompt), dtype=torch.long, device=device)
    prefill(model, prompt)
    result[f"prefill {options.prompt}: ms"] = 1e3 * timed(lambda: prefill(model, prompt), 5, device)
    if device == "cuda":
        result["peak memory: GB"] = (torch.cuda.max_memory_allocated() + weights_outside) / 1e9
    return result


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prefill")
    parser.add_argument("--context", type=int, default=256, help="tokens before the first decode step")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--small", action="store_true", help="a model of toy size, to try the script")
    options = parser.parse_args()
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.batches = [int(batch) for batch in options.batch.split(",")]
    torch.manual_seed(0)
    model = build(options.layers, options.device, options.small)
    if not options.eager:
        compile_layers(model)
    dense = measure(model, "bf16", options, 0)
    print(json.dumps(dense), flush=True)
    fp4linear.torch.quantize_model(model, exclude=(), progress=False)
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    outside = sum(m.layer.nbytes for m in model.modules() if isinstance(m, fp4linear.torch.Fp4LinearModule))
    quantized = measure(model, "nvfp4", options, outside)
    print(json.dumps(quantized), flush=True)
    for key, value in dense.items():
        if key == "model":
            continue
        gain = quantized[key] / value if "tokens/s" in key else value / quantized[key]
        print(f"{key:<32} bf16 {value:10.2f}   nvfp4 {quantized[key]:10.2f}   {gain:5.2f}x")
    if options.device == "cuda":
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, fp4linear {fp4linear.__version__}")


if __name__ == "__main__":
    main()

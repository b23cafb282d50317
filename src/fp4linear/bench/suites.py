"""What is timed: single shapes, suites, and the layers of known models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

DTYPES = ("bfloat16", "float16", "float32")
SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class Part(NamedTuple):
    """So many layers of one shape, each with its own weight."""

    layers: int
    n: int
    k: int


@dataclass(frozen=True)
class Item:
    """One measurement: y [M, N] = x [M, K] · W^T.

    cold: weights rotate over more memory than any cache holds; threads: None for all; path and isa: forced ones;
    chain: several layers one after another, timed as one (N and K are 0); sets: the number of weight sets, where the
    item is a part of a chain.
    """

    n: int
    k: int
    m: int
    dtype: str = "bfloat16"
    cold: bool = True
    threads: int | None = None
    path: str = "auto"
    isa: str | None = None
    label: str = ""
    chain: tuple[Part, ...] = ()
    sets: int | None = None

    @property
    def parts(self) -> list[Item]:
        """Items of one shape each: itself, or those of the chain."""
        if not self.chain:
            return [self]
        return [replace(self, n=part.n, k=part.k, sets=part.layers, chain=()) for part in self.chain]

    def __str__(self) -> str:
        return f"{self.label or 'chain' if self.chain else f'{self.n}x{self.k}'} M={self.m} {self.dtype}"


# (label, N, K). Sources: the models' published configurations.
MODELS: dict[str, tuple[tuple[str, int, int], ...]] = {
    "minilm-l6": (("attention", 384, 384), ("ffn up", 1536, 384), ("ffn down", 384, 1536)),
    "qwen3-0.6b": (
        ("q", 2048, 1024), ("kv", 1024, 1024), ("o", 1024, 2048), ("gate/up", 3072, 1024), ("down", 1024, 3072),
    ),
    "llama-3.1-8b": (
        ("qkv", 6144, 4096), ("o", 4096, 4096), ("gate_up", 28672, 4096), ("down", 4096, 14336),
    ),
    "qwen3-8b": (("qkv", 6144, 4096), ("o", 4096, 4096), ("gate/up", 12288, 4096), ("down", 4096, 12288)),
    "qwen3.6-35b-a3b": (
        ("expert gate/up", 512, 2048), ("expert down", 2048, 512), ("in_proj_qkv", 8192, 2048),
        ("in_proj_a/b", 32, 2048), ("shared_expert_gate", 1, 2048), ("lm_head", 248320, 2048),
    ),
    "qwen3.6-27b": (("gate/up", 17408, 5120), ("down", 5120, 17408), ("in_proj_a/b", 48, 5120)),
    "deepseek-v3": (
        ("q_a", 1536, 7168), ("kv_a", 576, 7168), ("q_b", 24576, 1536), ("kv_b", 32768, 512), ("o", 7168, 16384),
        ("expert gate/up", 2048, 7168), ("expert down", 7168, 2048), ("dense down", 7168, 18432),
    ),
    "glm-4.5-air-tp4": (("dense down", 4096, 2736), ("expert down TP8", 4096, 176)),
    "nemotron-3-nano-30b": (
        ("expert up", 1856, 2688), ("expert down", 2688, 1856), ("expert down TP4", 2688, 464),
        ("expert down TP8", 2688, 232),
    ),
    "flux.1-dev": (("qkv", 9216, 3072), ("proj_out", 3072, 15360), ("x_embedder", 3072, 64), ("final", 64, 3072)),
}  # fmt: skip

SHAPES = ((512, 2048), (2048, 512), (4096, 4096), (11008, 4096), (17408, 5120), (5120, 17408))
DECODE_M = (1, 2, 4, 8, 16)
PREFILL_M = (32, 64, 128, 512)

# On a GPU decode has the larger shapes too, and prefill two that say what there is to say.
GPU_SHAPES = (*SHAPES, (28672, 8192), (248320, 2048))
GPU_DECODE_M = (1, 2, 4, 8)
GPU_PREFILL_SHAPES = ((4096, 4096), (11008, 4096))
GPU_PREFILL_M = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

# The quantised layers of one decode step of Qwen3.6-35B-A3B as published for another library's operator: of each of
# 40 layers gate, up and down of one expert, and the head.
QWEN_STEP = Item(0, 0, 4, label="Qwen3.6 step", chain=(Part(80, 512, 2048), Part(40, 2048, 512), Part(1, 248320, 2048)))
CHAINS = {"qwen-step": QWEN_STEP}
NAMES = ("default", "decode", "prefill", *CHAINS, *MODELS)


def default_suite() -> list[Item]:
    """The figures of record of the CPU: decode from memory on all threads, and one hot layer on one thread."""
    cold = [Item(n, k, 1, dtype) for n, k in ((11008, 4096), (4096, 14336)) for dtype in DTYPES]
    hot = [Item(4096, 4096, m, dtype, cold=False, threads=1) for m in (1, 8, 512) for dtype in DTYPES]
    return cold + hot


def suite(name: str, device: str = "cpu") -> list[Item]:
    """The items of one of NAMES, for "cpu" or "cuda"; default is decode on a GPU. ValueError for another name, and for
    a chain on the CPU.
    """
    gpu = device != "cpu"
    if name in CHAINS:
        if not gpu:
            raise ValueError(f"suite: {name} is timed as one CUDA graph, got device cpu")
        return [CHAINS[name]]
    if name == "default" and not gpu:
        return default_suite()
    if name in ("default", "decode"):
        return product(GPU_SHAPES, GPU_DECODE_M) if gpu else product(SHAPES, DECODE_M)
    if name == "prefill":
        return product(GPU_PREFILL_SHAPES, GPU_PREFILL_M) if gpu else product(SHAPES, PREFILL_M)
    if name in MODELS:
        return [Item(n, k, m, label=label) for label, n, k in MODELS[name] for m in (1, 8, 64)]
    raise ValueError(f"suite: got {name!r}, expected {', '.join(NAMES)}")


def product(shapes: Iterable[tuple[int, int]], rows: Sequence[int]) -> list[Item]:
    return [Item(n, k, m) for n, k in shapes for m in rows]


def vary(items: Iterable[Item], *, m: Iterable[int] | None = None, dtypes: Iterable[str] | None = None) -> list[Item]:
    """The same shapes with other values of M or other dtypes."""
    result: dict[Item, None] = {}  # a set that keeps the order
    for item in items:
        for rows in m or (item.m,):
            for dtype in dtypes or (item.dtype,):
                result[replace(item, m=rows, dtype=dtype)] = None
    return list(result)


def parse_shape(text: str) -> tuple[int, int]:
    """(N, K) of "NxK"."""
    parts = text.lower().replace("×", "x").split("x")  # noqa: RUF001
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"shape: got {text!r}, expected NxK, such as 4096x14336")
    n, k = int(parts[0]), int(parts[1])
    if n < 1 or k < 2 or k % 2:
        raise ValueError(f"shape: got {text!r}, expected N >= 1 and an even K >= 2")
    return n, k


def parse_numbers(text: str, name: str) -> list[int]:
    """The positive integers of "1,8,512"."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{name}: got {text!r}, expected positive integers separated by commas")
    return [int(part) for part in parts]


def parse_dtypes(text: str) -> list[str]:
    """dtypes of "bf16,fp16"."""
    names = [SHORT_DTYPES.get(part.strip(), part.strip()) for part in text.split(",")]
    for name in names:
        if name not in DTYPES:
            raise ValueError(f"dtype: got {name!r}, expected {', '.join(DTYPES)} (or {', '.join(SHORT_DTYPES)})")
    return names

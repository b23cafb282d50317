"""A small valid checkpoint of every format, those that are refused by name included."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from tests.checkpoints import (
    Tensor,
    compressed,
    f8,
    f32,
    fouroversix,
    gguf_blocks,
    gguf_text,
    mlx,
    modelopt,
    single_file,
    torchao,
    torchao_header,
    transformer_engine,
    u8,
    weight_bytes,
)

GGUF_F32, GGUF_MXFP4, GGUF_NVFP4 = 0, 39, 40
HEADER = {"_quantization_metadata": '{"format_version": "1.0", "layers": {"p": {"format": "nvfp4"}}}'}


@dataclass
class Checkpoint:
    """Tensors by name, and the header's metadata."""

    name: str
    tensors: dict[str, Tensor]
    metadata: dict[str, str] = field(default_factory=dict)


def floats(values: np.ndarray) -> Tensor:
    return "F32", list(values.shape), values.astype("<f4").tobytes()


def halves(values: np.ndarray) -> Tensor:
    return "BF16", list(values.shape), (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()


def experts(*, transposed: bool) -> dict[str, Tensor]:
    made = [weight_bytes(24, 64, seed) for seed in range(3)]
    b, scales = (np.stack(parts) for parts in zip(*made, strict=True))
    if transposed:
        b, scales = b.transpose(0, 2, 1), scales.transpose(0, 2, 1)
    return {
        "e.up.weight": u8(b),
        "e.up.weight_scale": f8(scales),
        "e.up.weight_scale_2": floats(np.array([0.5, 0.25, 2.0])),
        "e.up.bias": floats(np.ones((3, 24))),
    }


@cache
def checkpoints() -> tuple[Checkpoint, ...]:
    bias = {"p.bias": floats(np.linspace(-1, 1, 20))}
    b, scales = weight_bytes(20, 96, 3)
    scales[0, 0] = 0x78
    attention = {k: t for i, x in enumerate("qkv") for k, t in modelopt(f"a.{x}_proj", 16, 32, i, 0.1 + i).items()}
    marked = single_file("p", 20, 96, 3, 0.01, mark={"format": "nvfp4", "orig_shape": [20, 96]})
    swizzled = torchao("p", 20, 96, 4, 0.25, swizzled=True)
    oss = {"p_blocks": u8(np.zeros((2, 4, 2, 16), np.uint8)), "p_scales": u8(np.zeros((2, 4, 2), np.uint8))}
    awq = {**modelopt("p", 8, 64, 1, 0.5), **modelopt("q", 8, 64, 2, 0.5)}
    awq |= {f"{name}.pre_quant_scale": floats(np.linspace(0.5, 2, 64)) for name in "pq"}
    return (
        Checkpoint("modelopt", {**modelopt("p", 20, 96, 1, 0.01), **bias, "p.input_scale": f32(0.5)}),
        Checkpoint("modelopt q k v", attention),
        Checkpoint("modelopt awq", awq),
        Checkpoint("compressed", {**compressed("p", 20, 96, 2, 512.0), "p.input_global_scale": f32(3.0), **bias}),
        Checkpoint("comfyui", marked | bias),
        Checkpoint("comfyui header", single_file("p", 20, 96, 3, 0.01), HEADER),
        Checkpoint("diffusers", single_file("p", 20, 96, 3, 0.01, high=False), HEADER | {"tool": "modelopt"}),
        Checkpoint("torchao", torchao("p", 20, 96, 4, 0.25, swizzled=False), torchao_header("p", swizzled=False)),
        Checkpoint("torchao swizzled", swizzled, torchao_header("p", swizzled=True)),
        Checkpoint("torchao no header", torchao("p", 20, 96, 4, None, swizzled=True)),
        Checkpoint("transformer engine", {
            **transformer_engine("p", 20, 96, 5, 3.0), "p._nvfp4_e4m3_max": ("F32", [], np.float32(256).tobytes()),
            "p._with_gemm_swizzled_scales": ("BOOL", [1], b"\0"),
        }),
        Checkpoint("mlx", mlx("p", 20, 96, 6, 2.0)),
        Checkpoint("fouroversix", fouroversix("p", b, scales, 2.0)),
        Checkpoint("experts", experts(transposed=False)),
        Checkpoint("experts transposed", experts(transposed=True)),
        Checkpoint("mxfp4", {"p.weight_packed": u8(b), "p.weight_scale": ("F8_E8M0", [20, 3], bytes(60))}),
        Checkpoint("gpt-oss", oss),
        Checkpoint("fp-quant", {"p.qweight": u8(b), "p.scales": u8(scales)}),
        Checkpoint("rotated", single_file("p", 20, 96, 3, 0.01, mark={"format": "nvfp4", "convrot": True})),
        Checkpoint("floats", {
            "f.weight": floats(np.linspace(-3, 3, 8 * 32).reshape(8, 32)), "g.weight": halves(np.ones((4, 16))),
            "norm.weight": floats(np.ones(8)), "h.weight": ("F16", [2, 6], np.ones(12, "<f2").tobytes()),
        }),
    )  # fmt: skip


GGUFTensor = tuple[int, list[int], bytes]


@cache
def gguf_tensors() -> dict[str, GGUFTensor]:
    b, scales = weight_bytes(6, 128, 7)
    stack = [weight_bytes(4, 64, seed) for seed in range(3)]
    blocks = b"".join(gguf_blocks(*each) for each in stack)
    return {
        "p.weight": (GGUF_NVFP4, [6, 128], gguf_blocks(b, scales)),
        "p.scale": (GGUF_F32, [1], np.float32(0.5).tobytes()),
        "p.bias": (GGUF_F32, [6], np.ones(6, "<f4").tobytes()),
        "e.weight": (GGUF_NVFP4, [3, 4, 64], blocks),
        "e.scale": (GGUF_F32, [3], np.ones(3, "<f4").tobytes()),
        "m.weight": (GGUF_MXFP4, [2, 32], bytes(34)),
    }


def gguf_pairs() -> tuple[bytes, int]:
    """Metadata of every kind of value, an array of strings and one of arrays."""
    number = gguf_text("general.alignment") + (4).to_bytes(4, "little") + (32).to_bytes(4, "little")
    text = gguf_text("general.name") + (8).to_bytes(4, "little") + gguf_text("x")
    strings = gguf_text("tokens") + (9).to_bytes(4, "little") + (8).to_bytes(4, "little") + (2).to_bytes(8, "little")
    strings += gguf_text("a") + gguf_text("bc")
    nested = gguf_text("nested") + (9).to_bytes(4, "little") + (9).to_bytes(4, "little") + (1).to_bytes(8, "little")
    nested += (0).to_bytes(4, "little") + (3).to_bytes(8, "little") + b"abc"
    return number + text + strings + nested, 4


SIDECARS = {
    "config.json": json.dumps({"quantization_config": {"quant_method": "modelopt", "weight_dtype": "nvfp4"}}),
    "hf_quant_config.json": json.dumps({"producer": {"name": "modelopt"}}),
}

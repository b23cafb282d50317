"""I. Checkpoint files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import fp4linear
from tests import reference
from tests.cases.conventions import check, each_dtype, each_m, equal, published, rows, write_safetensors
from tests.child import run_child
from tests.strategies import DTYPES
from tests.tolerance import assert_within_contract

I1_B, I1_SCALES = reference.make(8, 64, 61)
I1_SCALE2 = np.float32(2.7901787e-4 * 64)
I1_X = reference.x_of(3, 64, 62)


def write_i1(directory: Path, with_input_scale: bool, exclude: bool = True) -> Path:
    tensors = {
        "p.weight": ("U8", I1_B),
        "p.weight_scale": ("F8_E4M3", I1_SCALES),
        "p.weight_scale_2": ("F32", np.array(I1_SCALE2)),
    }
    if with_input_scale:
        tensors["p.input_scale"] = ("F32", np.array(0.25, np.float32))
    write_safetensors(directory / "model.safetensors", tensors)
    if exclude:
        quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["p"]}
        (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
        config = {"quantization_config": {"quant_method": "modelopt", "ignore": ["p"]}}
        (directory / "config.json").write_text(json.dumps(config))
    return directory / "model.safetensors"


@each_dtype
@each_m
@pytest.mark.parametrize("with_input_scale", [True, False])
def test_I1_modelopt_trio(tmp_path: Path, with_input_scale: bool, dtype: str, m: int) -> None:
    """The tensors decide, not the exclude list; input_scale is not part of the weight."""
    y = reference.linear(I1_X, I1_B, I1_SCALES, I1_SCALE2).y
    published(y[0, 0], -0.102607)
    published(y[2, 7], -0.479665)
    x = rows(I1_X, m).astype(DTYPES[dtype])
    layer = fp4linear.load(write_i1(tmp_path, with_input_scale), "p")
    check(layer, x, I1_B, I1_SCALES, I1_SCALE2)
    check(fp4linear.load(tmp_path, "p"), x, I1_B, I1_SCALES, I1_SCALE2)
    b, scales, scale2 = layer.canonical()
    assert (b == I1_B).all() and (scales == I1_SCALES).all() and scale2 == I1_SCALE2


def test_I1_reads_without_torch(tmp_path: Path) -> None:
    code = """
        import sys
        sys.modules["torch"] = None   # any import of it is an error
        import numpy as np, fp4linear
        layer = fp4linear.load(sys.argv[1], "p")
        print(layer.forward(np.zeros((1, 64), np.float16)).shape)
    """
    assert run_child(code, arguments=(str(write_i1(tmp_path, True)),)).stdout == "(1, 8)\n"


I3_X = reference.x_of(1, 32, 1031)
GATE, UP = reference.make(16, 32, 31), reference.make(16, 32, 32)
GATE_SCALE2, UP_SCALE2 = np.float32(2.0**-8), np.float32(1.25 * 2.0**-8)


@each_dtype
@each_m
def test_I3_gate_and_up_with_different_scale2(tmp_path: Path, dtype: str, m: int) -> None:
    published(reference.linear(I3_X, *GATE, GATE_SCALE2).y[0, 0], -0.034162)
    published(reference.linear(I3_X, *UP, UP_SCALE2).y[0, 0], 0.886659)
    tensors = {}
    for name, (b, scales), scale2 in (("gate", GATE, GATE_SCALE2), ("up", UP, UP_SCALE2)):
        tensors[f"mlp.{name}_proj.weight"] = ("U8", b)
        tensors[f"mlp.{name}_proj.weight_scale"] = ("F8_E4M3", scales)
        tensors[f"mlp.{name}_proj.weight_scale_2"] = ("F32", np.array(scale2))
    write_safetensors(tmp_path / "model.safetensors", tensors)
    x = rows(I3_X, m).astype(DTYPES[dtype])
    gate = check(fp4linear.load(tmp_path / "model.safetensors", "mlp.gate_proj"), x, *GATE, GATE_SCALE2)
    up = check(fp4linear.load(tmp_path / "model.safetensors", "mlp.up_proj"), x, *UP, UP_SCALE2)

    # Fused: one factor a row, never the greater of the two.
    fused = fp4linear.Fp4Linear(
        np.concatenate([GATE[0], UP[0]]), np.concatenate([GATE[1], UP[1]]), np.repeat([GATE_SCALE2, UP_SCALE2], 16)
    )
    both = [reference.linear(x, *GATE, GATE_SCALE2), reference.linear(x, *UP, UP_SCALE2)]
    want = reference.Expected(*(np.concatenate(parts, axis=1) for parts in zip(*both, strict=True)))
    assert_within_contract(fused.forward(x), want)
    equal(fused.forward(x), np.concatenate([gate, up], axis=1).astype(np.float64))


def test_I5_gguf_block(tmp_path: Path) -> None:
    """One 64-value block of type 40 in a GGUF v3 file."""

    def text(value: str) -> bytes:
        return len(value).to_bytes(8, "little") + value.encode()

    block = bytes([0x38, 0x40, 0x7F, 0x01]) + bytes(7 * i % 256 for i in range(32))
    header = b"GGUF" + (3).to_bytes(4, "little") + (1).to_bytes(8, "little") + (0).to_bytes(8, "little")
    info = text("p.weight") + (2).to_bytes(4, "little") + (64).to_bytes(8, "little") + (1).to_bytes(8, "little")
    info += (40).to_bytes(4, "little") + (0).to_bytes(8, "little")
    head = header + info
    (tmp_path / "model.gguf").write_bytes(head + b"\0" * (-len(head) % 32) + block)
    w = fp4linear.load(tmp_path / "model.gguf", "p").dequantize()[0]
    assert w[:16].tolist() == [0, 6, -4, 3, -2, 1.5, -1, 0.5, 0, 0, 0, 0.5, 0.5, 1, 1, 1.5]
    assert w[16:32].tolist() == [0, -12, 8, -6, 4, -3, 2, -1, 3, 3, 4, 4, 6, 6, 8, 8]
    assert not w[32:48].any()  # GGUF reads 0x7F as 0
    assert w[48:51].tolist() == [0, -0.01171875, 0.0078125]

"""`fp4linear.load` on files that the formats' own libraries wrote."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import fp4linear
from fp4linear.files import layers
from tests.interop import gguf_blocks, required, weights

BIAS = np.array([1.5, -2.0, 0.0, 4.0] * 40, np.float32)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize(("n", "k"), [(160, 96), (128, 64)])  # the latter's scale shapes don't tell
def test_torchao(tmp_path: Path, swizzled: bool, n: int, k: int) -> None:
    torch = pytest.importorskip("torch")
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", exc_type=ImportError)
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support", exc_type=ImportError)
    save_file = pytest.importorskip("safetensors.torch").save_file
    weight = nvfp4.NVFP4Tensor.to_nvfp4(
        torch.from_numpy(weights(n, k, 1)), per_tensor_scale=torch.tensor(2.0**-9), is_swizzled_scales=swizzled
    )
    state = {"a.p.weight": weight, "a.p.bias": torch.from_numpy(BIAS[:n])}
    tensors, metadata = support.flatten_tensor_state_dict(state)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "m.safetensors", metadata)
    assert [(layer.format, layer.shape, layer.problem) for layer in layers(tmp_path)] == [("torchao", (n, k), None)]
    layer = fp4linear.load(tmp_path, "a.p")
    assert np.array_equal(layer.dequantize(), weight.dequantize(torch.float32).numpy())
    assert np.array_equal(layer.bias, BIAS[:n])


def test_gguf(tmp_path: Path) -> None:
    gguf = required("gguf")
    random = np.random.default_rng(5)
    b, scales = random.integers(0, 256, (96, 64), dtype=np.uint8), random.integers(0, 0x7F, (96, 8), dtype=np.uint8)
    blocks = gguf_blocks(b, scales)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.ffn_up.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.NVFP4)
    writer.add_tensor("blk.0.ffn_up.scale", np.array([0.25], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    layer = fp4linear.load(path, "blk.0.ffn_up")
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.NVFP4) * np.float32(0.25)
    assert np.array_equal(layer.dequantize(), expected)
    assert np.array_equal(layer.canonical()[0], b)
    assert np.array_equal(layer.canonical()[1], scales)


@pytest.mark.parametrize(("n", "k"), [(128, 64), (100, 96)])
def test_comfy_kitchen(tmp_path: Path, n: int, k: int) -> None:
    torch = pytest.importorskip("torch")
    layout = required("comfy_kitchen.tensor.nvfp4").TensorCoreNVFP4Layout
    save_file = pytest.importorskip("safetensors.torch").save_file
    w = weights(n, k, 3)
    qdata, params = layout.quantize(torch.from_numpy(w), scale=2.0**-9)
    tensors = {"p.weight" + suffix: tensor for suffix, tensor in layout.state_dict_tensors(qdata, params).items()}
    mark = json.dumps({"format": "nvfp4"}).encode()
    tensors["p.comfy_quant"] = torch.tensor(list(mark), dtype=torch.uint8)
    tensors["p.bias"] = torch.from_numpy(BIAS[:n])
    save_file(tensors, tmp_path / "m.safetensors")
    layer = fp4linear.load(tmp_path, "p")
    expected = layout.dequantize(qdata, params)[:n, :k].numpy()
    assert np.array_equal(layer.dequantize(), expected)
    assert np.array_equal(layer.bias, BIAS[:n])

"""Files made by other packages, where they are installed: read by us, and ours read by them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fp4linear
from fp4linear.files import convert_file, inspect, open_tensors

N, K = 48, 128


@pytest.mark.parametrize("swizzled", [False, True])
def test_torchao(tmp_path: Path, swizzled: bool) -> None:
    torch = pytest.importorskip("torch")
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    save = pytest.importorskip("safetensors.torch")
    w = torch.from_numpy(np.random.default_rng(1).standard_normal((N, K)).astype("f4"))
    tensor = nvfp4.NVFP4Tensor.to_nvfp4(
        w, per_tensor_scale=nvfp4.per_tensor_amax_to_scale(w.abs().max()), is_swizzled_scales=swizzled
    )
    data, header = support.flatten_tensor_state_dict({"a.weight": tensor, "a.bias": torch.ones(N)})
    theirs, ours = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    save.save_file(data, theirs, metadata=header)
    (report,) = inspect(theirs).layers
    assert (report.format, report.problem, report.out_features, report.in_features) == ("torchao", None, N, K)
    expected = tensor.dequantize(torch.float32).numpy()
    # Theirs multiplies the scales first and rounds twice.
    np.testing.assert_allclose(fp4linear.load(theirs, "a").dequantize(), expected, rtol=2**-23, atol=0)
    convert_file(theirs, ours, "torchao")
    data, header = save.load_file(ours), dict(open_tensors(ours).metadata("a.bias"))
    back = support.unflatten_tensor_state_dict(data, header)
    back = back[0] if isinstance(back, tuple) else back
    assert isinstance(back["a.weight"], nvfp4.NVFP4Tensor)
    assert np.array_equal(back["a.weight"].dequantize(torch.float32).numpy(), expected)
    assert torch.equal(back["a.bias"], torch.ones(N))


@pytest.mark.parametrize(("n", "k"), [(48, 128), (37, 100), (128, 64)])
def test_comfy_kitchen(tmp_path: Path, n: int, k: int) -> None:
    torch = pytest.importorskip("torch")
    layout = pytest.importorskip("comfy_kitchen.tensor.nvfp4").TensorCoreNVFP4Layout
    save = pytest.importorskip("safetensors.torch")
    w = torch.from_numpy(np.random.default_rng(1).standard_normal((n, k)).astype("f4"))
    codes, params = layout.quantize(w)
    tensors = {"p.weight" + key: value.contiguous() for key, value in layout.state_dict_tensors(codes, params).items()}
    tensors["p.comfy_quant"] = torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8)
    tensors["p.bias"] = torch.zeros(n)
    theirs, ours = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    save.save_file(tensors, theirs)
    assert [layer.format for layer in inspect(theirs).layers] == ["comfyui"]
    expected = layout.dequantize(codes, params).float().numpy()[:n, :k]
    got = fp4linear.load(theirs, "p").dequantize()
    np.testing.assert_allclose(got[:, :k], expected, rtol=2**-23, atol=0)
    assert not got[:, k:].any()
    convert_file(theirs, ours, "comfyui")
    before, after = open_tensors(theirs), open_tensors(ours)
    for name in ("p.weight", "p.weight_scale", "p.weight_scale_2", "p.bias"):
        assert after.info(name).shape == before.info(name).shape
        assert after.array(name).tobytes() == before.array(name).tobytes()


@pytest.mark.parametrize("rule", ["static_6", "static_4", "mse", "mae", "abs_max"])
@pytest.mark.parametrize(("n", "k"), [(128, 64), (48, 96)])
def test_fouroversix(tmp_path: Path, rule: str, n: int, k: int) -> None:
    torch = pytest.importorskip("torch")
    fouroversix = pytest.importorskip("fouroversix.quantize")
    save = pytest.importorskip("safetensors.torch")
    w = np.random.default_rng(n).standard_normal((n, k)).astype("f4")
    config = fouroversix.QuantizationConfig(backend="pytorch", scale_rule=rule)
    made = fouroversix.quantize_to_fp4(torch.from_numpy(w), config)
    shapes = torch.tensor([*made.original_shape, *made.padded_shape], dtype=torch.int32)
    tensors = {"values": made.values, "scale_factors": made.scale_factors, "amax": made.amax.reshape(1).float()}
    tensors = {f"p.quantized_weight_{name}": value.contiguous() for name, value in tensors.items()}
    path = tmp_path / "m.safetensors"
    save.save_file(tensors | {"p.quantized_weight_metadata": shapes}, path)
    assert [layer.format for layer in inspect(path).layers] == ["fouroversix"]
    layer = fp4linear.load(path, "p")
    largest = {"static_6": 2688.0, "static_4": 1792.0}.get(rule, 1536.0)
    assert layer.canonical()[2] == np.float32(np.float64(abs(w).max()) / largest)
    # A wrong order of nibbles, a wrong layout or a wrong factor gives errors as large as the weights.
    assert np.linalg.norm(layer.dequantize() - w) < 0.12 * np.linalg.norm(w)


@pytest.mark.parametrize("with_global", [False, True])
def test_mlx(tmp_path: Path, with_global: bool) -> None:
    mx = pytest.importorskip("mlx.core")
    w = np.random.default_rng(1).standard_normal((N, K)).astype("f4")
    options = {"global_scale": mx.array(float(abs(w).max()))} if with_global else {}
    codes, scales = mx.quantize(mx.array(w), mode="nvfp4", **options)
    path = tmp_path / "m.safetensors"
    mx.save_safetensors(
        str(path), {"p.weight": codes, "p.scales": scales} | {f"p.{name}": value for name, value in options.items()}
    )
    assert [layer.format for layer in inspect(path).layers] == ["mlx"]
    expected = np.array(mx.dequantize(codes, scales, mode="nvfp4", **options).astype(mx.float32))
    got = fp4linear.load(path, "p").dequantize()
    # Theirs multiplies in another order.
    np.testing.assert_allclose(got, expected, rtol=2**-21, atol=0)

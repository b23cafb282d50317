"""`fp4linear.load` and `fp4linear.files.layers`: tensors decide; other formats are refused by name."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fp4linear
from fp4linear.files import FORMAT_NAMES, FormatError, layers, open_tensors, read_layer, save_modelopt
from tests.checkpoints import f32, modelopt, weight_bytes, write_file, write_shards, x_of


def within(y: np.ndarray, reference: np.ndarray, x: np.ndarray, weight: np.ndarray) -> bool:
    """The contract's tolerance for fp16 results. NaN is outside."""
    terms = np.abs(x.astype(np.float64)) @ np.abs(weight.astype(np.float64)).T
    return bool(np.all(np.abs(y.astype(np.float64) - reference) <= 2**-11 * np.abs(reference) + 2**-15 * terms))


@pytest.mark.parametrize("input_scale", [True, False])
def test_i1_modelopt_trio(tmp_path: Path, input_scale: bool) -> None:
    scale2 = float(np.float32(2.7901787e-4 * 64))
    tensors = modelopt("p", 8, 64, 61, scale2)
    if input_scale:
        tensors["p.input_scale"] = f32(123.0)
    path = write_file(tmp_path / "model.safetensors", tensors)
    quantization = {"quant_algo": "NVFP4", "exclude_modules": ["p"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    x = x_of(3, 64, 62)
    for name in ("p", "p.weight"):
        layer = fp4linear.load(path, name)
        y = layer.forward(x)
        reference = fp4linear.reference(x, *weight_bytes(8, 64, 61), np.float32(scale2))
        assert within(y, reference, x, layer.dequantize())
        assert reference[0, 0] == pytest.approx(-0.102607, abs=1e-6)
        assert reference[2, 7] == pytest.approx(-0.479665, abs=1e-6)


def test_i3_gate_and_up_with_different_globals(tmp_path: Path) -> None:
    path = write_file(
        tmp_path / "m.safetensors", modelopt("gate", 16, 32, 31, 2**-8) | modelopt("up", 16, 32, 32, 1.25 * 2**-8)
    )
    x = x_of(1, 32, 1031)
    layer = fp4linear.load(path, ["gate", "up"])
    assert (layer.out_features, layer.in_features) == (32, 32)
    y = layer.forward(x).astype(np.float64)
    assert y[0, 0] == pytest.approx(-0.034162, abs=2e-5)
    assert y[0, 16] == pytest.approx(0.886659, abs=5e-4)
    scale2 = np.asarray(layer.canonical()[2])
    assert scale2.tolist() == [2**-8] * 16 + [1.25 * 2**-8] * 16


def test_fused_layers_with_one_global_keep_it_scalar(tmp_path: Path) -> None:
    tensors = modelopt("q", 3, 32, 1, 0.5) | modelopt("k", 5, 32, 2, 0.5) | {"k.bias": ("F32", [5], b"\0\0\x80?" * 5)}
    path = write_file(tmp_path / "m.safetensors", tensors)
    layer = fp4linear.load(path, ["q", "k"])
    b, scales, scale2 = layer.canonical()
    assert np.asarray(scale2).size == 1
    assert np.array_equal(b, np.concatenate([weight_bytes(3, 32, 1)[0], weight_bytes(5, 32, 2)[0]]))
    assert np.array_equal(scales, np.concatenate([weight_bytes(3, 32, 1)[1], weight_bytes(5, 32, 2)[1]]))
    zeros = layer.forward(np.zeros((1, 32), np.float16))
    assert zeros.tolist() == [[0.0] * 3 + [1.0] * 5]


def test_fused_layers_of_different_width_are_refused(tmp_path: Path) -> None:
    path = write_file(tmp_path / "m.safetensors", modelopt("a", 4, 32, 1, 0.5) | modelopt("b", 4, 48, 2, 0.5))
    with pytest.raises(FormatError, match="one in_features"):
        fp4linear.load(path, ["a", "b"])


def ones(divisor: float) -> dict[str, Any]:
    return {
        "p.weight_packed": np.full((1, 8), 0x22, np.uint8),
        "p.weight_scale": np.full((1, 1), 0x38, np.uint8),
        "p.weight_global_scale": np.array([divisor], np.float32),
    }


def test_b6_compressed_tensors_divides() -> None:
    x = np.ones((1, 16), np.float16)
    assert fp4linear.load(ones(3584.0), "p").forward(x)[0, 0] == np.float16(16 / 3584)
    y = fp4linear.load(ones(3584.0), "p.weight_packed").forward(x.astype(ml_dtypes.bfloat16))
    assert y[0, 0] == ml_dtypes.bfloat16(16 / 3584)


@pytest.mark.parametrize("divisor", [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45])
def test_b7_bad_divisors(divisor: float) -> None:
    with pytest.raises(ValueError, match="weight_global_scale"):
        fp4linear.load(ones(divisor), "p")


@pytest.mark.parametrize("scale2", [np.inf, -np.inf, np.nan])
def test_b7_bad_multipliers(tmp_path: Path, scale2: float) -> None:
    path = write_file(tmp_path / "m.safetensors", modelopt("p", 2, 16, 1, scale2))
    with pytest.raises(ValueError, match="weight_scale_2"):
        fp4linear.load(path, "p")


@given(st.floats(2.0**-100, 2.0**100, width=32))
@settings(max_examples=100, deadline=None)
def test_divisors_are_inverted_with_one_rounding(divisor: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        part = read_layer(open_tensors(ones(divisor)), "p")
    assert part.scale2 == np.float32(1.0 / np.float64(np.float32(divisor)))


def test_suspicious_globals_warn(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="is it a multiplier"):
        fp4linear.load(ones(2.8e-4), "p")
    path = write_file(tmp_path / "m.safetensors", modelopt("p", 2, 16, 1, 3584.0))
    with pytest.warns(UserWarning, match="is it a divisor"):
        fp4linear.load(path, "p")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fp4linear.load(ones(3584.0), "p")


def test_bias_is_found_replaced_and_left_out(tmp_path: Path) -> None:
    tensors = modelopt("p", 2, 16, 1, 0.5)
    tensors["p.bias"] = ("BF16", [2], np.array([1.5, -2], ml_dtypes.bfloat16).tobytes())
    path = write_file(tmp_path / "m.safetensors", tensors)
    zero = np.zeros((1, 16), np.float16)
    assert fp4linear.load(path, "p").forward(zero).tolist() == [[1.5, -2.0]]
    assert fp4linear.load(path, "p", bias=None).forward(zero).tolist() == [[0.0, 0.0]]
    assert fp4linear.load(path, "p", bias=np.array([3, 4], np.float32)).forward(zero).tolist() == [[3.0, 4.0]]


def test_bias_of_a_wrong_shape(tmp_path: Path) -> None:
    path = write_file(tmp_path / "m.safetensors", modelopt("p", 2, 16, 1, 0.5) | {"p.bias": f32(1.0)})
    with pytest.raises(FormatError, match=r"p\.bias"):
        fp4linear.load(path, "p")


def test_global_scale_rounded_to_bf16(tmp_path: Path) -> None:
    tensors = modelopt("p", 2, 16, 1, 0.5)
    tensors["p.weight_scale_2"] = ("BF16", [1], np.array([2.8e-4], ml_dtypes.bfloat16).tobytes())
    part = read_layer(open_tensors(write_file(tmp_path / "m.safetensors", tensors)), "p")
    assert part.scale2 == np.float32(ml_dtypes.bfloat16(2.8e-4))


def test_f4_weight_is_the_same_bytes(tmp_path: Path) -> None:
    tensors = modelopt("p", 2, 32, 5, 0.5)
    tensors["p.weight"] = ("F4", [2, 32], tensors["p.weight"][2])
    part = read_layer(open_tensors(write_file(tmp_path / "m.safetensors", tensors)), "p")
    assert np.array_equal(part.b, weight_bytes(2, 32, 5)[0])


def test_nan_scales_follow_the_argument(tmp_path: Path) -> None:
    tensors = modelopt("p", 2, 16, 1, 0.5)
    tensors["p.weight_scale"] = ("F8_E4M3", [2, 1], b"\x38\x7f")
    path = write_file(tmp_path / "m.safetensors", tensors)
    with pytest.raises(ValueError, match="NaN"):
        fp4linear.load(path, "p")
    x = np.ones((1, 16), np.float16)
    assert fp4linear.load(path, "p", nan_scales="zero").forward(x)[0, 1] == 0
    assert np.isnan(fp4linear.load(path, "p", nan_scales="propagate").forward(x)[0, 1])


@pytest.mark.parametrize("wrap", ["uint8", "float8_e4m3fn"])
def test_a_mapping_of_arrays(wrap: str) -> None:
    b, scales = weight_bytes(4, 48, 9)
    raw = scales if wrap == "uint8" else scales.view(ml_dtypes.float8_e4m3fn)
    arrays = {"p.weight": b, "p.weight_scale": raw, "p.weight_scale_2": 0.25}
    canonical = fp4linear.load(arrays, "p").canonical()
    assert np.array_equal(canonical[0], b)
    assert np.array_equal(canonical[1], scales)
    assert canonical[2] == 0.25


def test_a_mapping_of_something_else() -> None:
    arrays = {"p.weight": [[1, 2]], "p.weight_scale": [[1]]}
    with pytest.raises(TypeError, match=r"p\.weight.*list"):
        fp4linear.load(arrays, "p")
    with pytest.raises(TypeError, match="path_or_mapping"):
        fp4linear.load(7, "p")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="name"):
        fp4linear.load({}, [])


def test_shards_and_directories(tmp_path: Path) -> None:
    first, second = modelopt("a", 4, 32, 1, 0.5), modelopt("b", 4, 32, 2, 0.25)
    second["a.weight_scale_2"] = first.pop("a.weight_scale_2")  # one layer over two files
    index = write_shards(tmp_path, {"model-1.safetensors": first, "model-2.safetensors": second})
    for source in (index, tmp_path, str(tmp_path)):
        assert [layer.name for layer in layers(source)] == ["a", "b"]
        assert np.array_equal(fp4linear.load(source, "b").canonical()[0], weight_bytes(4, 32, 2)[0])
        assert fp4linear.load(source, "a").canonical()[2] == 0.5


def test_a_missing_shard_only_hurts_its_layers(tmp_path: Path) -> None:
    index = write_shards(
        tmp_path, {"1.safetensors": modelopt("a", 4, 32, 1, 0.5), "2.safetensors": modelopt("b", 4, 32, 2, 0.25)}
    )
    (tmp_path / "2.safetensors").unlink()
    assert fp4linear.load(index, "a").in_features == 32
    with pytest.raises(FormatError, match=r"2\.safetensors"):
        fp4linear.load(index, "b")


@pytest.mark.parametrize(
    "shard", ["../m.safetensors", "/etc/hostname", "a/../../m.safetensors", "..\\m", "C:\\m", "", "a\0b"]
)
def test_index_paths_stay_below_the_index(tmp_path: Path, shard: str) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    write_file(tmp_path / "m.safetensors", modelopt("a", 4, 32, 1, 0.5))
    index = inside / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a.weight": shard}}))
    with pytest.raises(FormatError, match="not a path below the index"):
        fp4linear.load(index, "a")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', '{"a":' * 9999])
def test_damaged_index(tmp_path: Path, text: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(FormatError, match=r"index\.json"):
        layers(index)


def test_index_that_lies_about_a_shard(tmp_path: Path) -> None:
    index = write_shards(tmp_path, {"1.safetensors": modelopt("a", 4, 32, 1, 0.5)})
    write_file(tmp_path / "1.safetensors", modelopt("other", 4, 32, 1, 0.5))
    with pytest.raises(FormatError, match="where the index says"):
        fp4linear.load(index, "a")


def test_directories_without_a_choice(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no index"):
        layers(tmp_path)
    for name in ("x", "y"):
        write_file(tmp_path / f"{name}.safetensors", modelopt("a", 4, 32, 1, 0.5))
    with pytest.raises(FormatError, match="2 files match"):
        layers(tmp_path)
    write_file(tmp_path / "model.safetensors", modelopt("b", 4, 32, 1, 0.5))
    assert [layer.name for layer in layers(tmp_path)] == ["b"]


U8 = np.uint8
F8 = ml_dtypes.float8_e4m3fn
REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    (
        r"torchao.*expected \[4, 1\] or \[32, 16\]",
        "p",
        {"p._weight_qdata": np.zeros((4, 8), U8), "p._weight_scale": np.zeros((4, 2), F8)},
    ),
    (
        "transformer-engine.*there is no p.amax_rowwise",
        "p",
        {"p.rowwise_data": np.zeros((4, 8), U8), "p.rowwise_scale_inv": np.zeros((128, 4), U8)},
    ),
    ("FP-Quant", "p", {"p.qweight": np.zeros((4, 8), U8), "p.scales": np.zeros((4, 1), F8)}),
    ("mlx.*another mode", "p", {"p.weight": np.zeros((4, 2), np.uint32), "p.scales": np.zeros((4, 9), U8)}),
    ("MXFP4", "p", {"p.weight": np.zeros((4, 32), U8), "p.weight_scale": np.zeros((4, 2), U8)}),
    ("MXFP4", "p", {"p.weight_packed": np.zeros((4, 32), U8), "p.weight_scale": np.zeros((4, 2), U8)}),
    ("MXFP4", "p", {"p_blocks": np.zeros((2, 4, 2, 16), U8), "p_scales": np.zeros((2, 4, 2), U8)}),
    ("there is no p_scale_2", "p[0]", {"p": np.zeros((1, 8, 4), U8), "p_scale": np.zeros((1, 1, 4), F8)}),
    (
        "there is no p.weight_scale_2",
        "p[0]",
        {"p.weight": np.zeros((1, 8, 4), U8), "p.weight_scale": np.zeros((1, 1, 4), F8)},
    ),
    (
        "comfyui.*there is no p.weight_scale_2",
        "p",
        {"p.weight": np.zeros((4, 8), U8), "p.weight_scale": np.zeros((4, 1), F8), "p.comfy_quant": np.zeros(2, U8)},
    ),
    (
        "NVFP4_AWQ",
        "p",
        {
            "p.weight": np.zeros((4, 8), U8),
            "p.weight_scale": np.zeros((4, 1), F8),
            "p.weight_scale_2": 0.5,
            "p.pre_quant_scale": np.ones(16, np.float32),
        },
    ),
    (
        "low-rank",
        "p",
        {
            "p.weight": np.zeros((4, 8), U8),
            "p.weight_scale": np.zeros((4, 1), F8),
            "p.weight_scale_2": 0.5,
            "p.svdquant_lora_a": np.ones((2, 16), np.float32),
        },
    ),
    ("no p.weight_scale_2", "p", {"p.weight": np.zeros((4, 8), U8), "p.weight_scale": np.zeros((4, 1), F8)}),
    (
        "swizzled, and no mark tells the order of nibbles",
        "p",
        {"p.weight": np.zeros((160, 48), U8), "p.weight_scale": np.zeros((256, 8), F8), "p.weight_scale_2": 0.5},
    ),
    (
        r"expected \[4, 1\]",
        "p",
        {"p.weight": np.zeros((4, 8), U8), "p.weight_scale": np.zeros((4, 2), F8), "p.weight_scale_2": 0.5},
    ),
    (
        "weight_zero_point",
        "p",
        {
            "p.weight_packed": np.zeros((4, 8), U8),
            "p.weight_scale": np.zeros((4, 1), F8),
            "p.weight_global_scale": 9.0,
            "p.weight_zero_point": np.zeros(1, U8),
        },
    ),
    ("F32.*quantize", "p", {"p.weight": np.zeros((4, 8), np.float32)}),
    ("no such layer", "q", {"p.weight": np.zeros((4, 8), np.float32)}),
    (
        "one factor",
        "p",
        {
            "p.weight": np.zeros((4, 8), U8),
            "p.weight_scale": np.zeros((4, 1), F8),
            "p.weight_scale_2": np.ones(3, np.float32),
        },
    ),
    (
        "weight_scale_2.*F64",
        "p",
        {
            "p.weight": np.zeros((4, 8), U8),
            "p.weight_scale": np.zeros((4, 1), F8),
            "p.weight_scale_2": np.ones(1),
        },
    ),
]


@pytest.mark.parametrize(("message", "name", "arrays"), REFUSED, ids=lambda value: str(value)[:20])
def test_refused_by_name(message: str, name: str, arrays: dict[str, Any]) -> None:
    with pytest.raises(
        FormatError, match=message.rpartition(".*")[2] if "there is" in message else message.split(".*")[-1]
    ):
        fp4linear.load(arrays, name)


@pytest.mark.parametrize(("message", "name", "arrays"), REFUSED[:12], ids=lambda value: str(value)[:20])
def test_refused_formats_are_listed_with_the_reason(message: str, name: str, arrays: dict[str, Any]) -> None:
    (layer,) = layers(arrays)
    assert layer.name == name
    assert layer.problem
    assert re.search(message, layer.format + ": " + layer.problem)


def test_single_file_mark_in_the_header(tmp_path: Path) -> None:
    path = write_file(tmp_path / "m.safetensors", modelopt("p", 4, 32, 1, 0.5), {"_quantization_metadata": "{}"})
    with pytest.raises(FormatError, match="either order of nibbles"):
        fp4linear.load(path, "p")
    with pytest.raises(FormatError, match="tensors are modelopt-diffusers"):
        fp4linear.load(path, "p", format="modelopt")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("m.gguf", b"GGUF\x03\0\0\0" + bytes(64), "there is no such layer"),
        ("m.safetensors", b"GGUF\x07\0\0\0" + bytes(64), "GGUF version 7"),
        ("m.onnx", b"\x08\x0a", "ONNX is not supported here: fp4linear.onnx"),
        ("m.bin", b"PK\x03\x04" + bytes(64), "pickled or zipped"),
    ],
)
def test_other_kinds_of_file(tmp_path: Path, file: str, content: bytes, message: str) -> None:
    path = tmp_path / file
    path.write_bytes(content)
    with pytest.raises(FormatError, match=message):
        fp4linear.load(path, "p")


def test_layout_that_no_tensor_shows_is_asked_for(tmp_path: Path) -> None:
    tensors = modelopt("p", 128, 64, 1, 0.5)  # [128, 4]: row-major and swizzled scales have one shape
    path = write_file(tmp_path / "m.safetensors", tensors)
    with pytest.raises(FormatError, match='format="modelopt"'):
        fp4linear.load(path, "p")
    assert np.array_equal(fp4linear.load(path, "p", format="modelopt").canonical()[1], weight_bytes(128, 64, 1)[1])
    # Another layer of the file shows that its scales are row-major.
    mixed = write_file(tmp_path / "mixed.safetensors", tensors | modelopt("q", 3, 64, 1, 0.5))
    assert fp4linear.load(mixed, "p").out_features == 128
    # So does the exporter's mark beside the file, and the one that save_modelopt writes into it.
    (tmp_path / "hf_quant_config.json").write_text("{}")
    assert fp4linear.load(path, "p").out_features == 128
    (tmp_path / "hf_quant_config.json").unlink()
    save_modelopt(tmp_path / "ours.safetensors", {"p": (*weight_bytes(128, 64, 1), 0.5)})
    assert fp4linear.load(tmp_path / "ours.safetensors", "p").out_features == 128
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "modelopt"}}))
    assert fp4linear.load(path, "p").out_features == 128


def test_format_argument(tmp_path: Path) -> None:
    path = write_file(tmp_path / "m.safetensors", modelopt("p", 4, 32, 1, 0.5))
    with pytest.raises(ValueError, match="format: got 'awq', expected one of gguf, torchao, transformer-engine"):
        fp4linear.load(path, "p", format="awq")
    with pytest.raises(FormatError, match="no compressed-tensors layer: its tensors are modelopt"):
        fp4linear.load(path, "p", format="compressed-tensors")


def test_wrong_names_get_a_hint(tmp_path: Path) -> None:
    path = write_file(tmp_path / "m.safetensors", modelopt("model.layers.0.mlp.up_proj", 4, 32, 1, 0.5))
    with pytest.raises(FormatError, match=r"did you mean 'model\.layers\.0\.mlp\.up_proj'"):
        fp4linear.load(path, "layers.0.mlp.up_proj")


def test_saved_layers_come_back_bit_for_bit(tmp_path: Path) -> None:
    b, scales = weight_bytes(24, 80, 3)
    bias = np.arange(24, dtype=np.float32)
    layer = fp4linear.Fp4Linear(b, scales, 0.125, bias)
    strided = (np.asfortranarray(b), np.repeat(scales, 2, axis=1)[:, ::2], np.float32(0.125), bias)
    path = tmp_path / "m.safetensors"
    save_modelopt(path, {"object": layer, "tuple": strided}, metadata={"note": "x"})
    for name in ("object", "tuple"):
        got = fp4linear.load(path, name).canonical()
        assert np.array_equal(got[0], b)
        assert np.array_equal(got[1], scales)
        assert got[2] == np.float32(0.125)
        zero = np.zeros((1, 80), np.float16)
        assert fp4linear.load(path, name).forward(zero).tolist() == [bias.tolist()]
    assert open_tensors(path).metadata("tuple.weight")["note"] == "x"


def test_saving_what_the_format_cannot_hold(tmp_path: Path) -> None:
    b, scales = weight_bytes(4, 32, 3)
    with pytest.raises(ValueError, match="4 factors"):
        save_modelopt(tmp_path / "m.safetensors", {"p": (b, scales, np.ones(4, np.float32))})
    layer = fp4linear.Fp4Linear(b, scales[:, :1], 1.0, block_size=32)
    with pytest.raises(ValueError, match="block_size 32"):
        save_modelopt(tmp_path / "m.safetensors", {"p": layer})
    assert not list(tmp_path.iterdir())


tensor_values = st.sampled_from(
    [
        np.zeros(shape, dtype)
        for shape in ((), (1,), (2,), (2, 8), (2, 1), (2, 16), (2, 2, 8), (2, 16, 2), (128, 4), (128, 32), (512,))
        for dtype in (U8, F8, "f4", "u4")
    ]
)
suffixes = [
    "._weight_scale", ".rowwise_scale_inv", ".amax_rowwise", ".quantized_weight_values", ".global_scale",
    "_weight_scale", ".quantized_weight_scale_factors", ".quantized_weight_amax", "_scale_2", "_weight_scale_2",
    ".weight", ".weight_packed", ".weight_scale", ".weight_scale_2", ".weight_global_scale", ".bias", ".scales",
    ".qweight", "._weight_qdata", ".rowwise_data", "_blocks", "_scales", "_scale", "", ".comfy_quant",
    ".pre_quant_scale", ".svd",
]  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(["p" + suffix for suffix in suffixes]), tensor_values, max_size=6))
def test_fuzz_any_set_of_tensors(arrays: dict[str, np.ndarray]) -> None:
    for layer in layers(arrays):
        assert layer.problem is None or layer.problem
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            part = read_layer(open_tensors(arrays), "p")
        except FormatError:
            return
    assert part.b.ndim == part.scales.ndim == 2
    assert part.scales.shape == (part.b.shape[0], -(-2 * part.b.shape[1] // 16))
    assert np.isfinite(part.scale2).all()


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["p" + suffix for suffix in suffixes]), tensor_values, max_size=6),
    st.sampled_from([None, *FORMAT_NAMES]),
    st.sampled_from([None, False, True]),
    st.sampled_from([None, "low", "high"]),
)
def test_fuzz_what_the_caller_says(
    arrays: dict[str, np.ndarray], format: str | None, swizzled: bool | None, nibbles: Any
) -> None:
    tensors = open_tensors(arrays)
    for layer in ["p", *(found.name for found in layers(tensors))]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                part = read_layer(tensors, layer, format, swizzled=swizzled, nibbles=nibbles, awq=True)
            except FormatError:
                continue
        assert part.scales.shape == (part.b.shape[0], -(-2 * part.b.shape[1] // 16))


def test_a_header_length_that_looks_like_a_pickle(tmp_path: Path) -> None:
    header = json.dumps({"__metadata__": {"a": "x" * 700}}).encode()[:-4]
    header = json.dumps({"__metadata__": {"a": "x" * (0x280 - len(header) + 700 - 4)}}).encode()
    assert len(header) == 0x280
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    assert path.read_bytes().startswith(b"\x80\x02")
    assert layers(path) == []

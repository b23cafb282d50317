"""Converting: bit for bit, whole files, atomic; what a target can't hold is an error."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fp4linear
from fp4linear.files import FormatError, convert_file, layers, load_awq, open_tensors, read_layer
from fp4linear.files.writers import WRITERS, divisor_of
from tests.checkpoints import (
    Tensor,
    compressed,
    f8,
    f32,
    gguf_blocks,
    gguf_bytes,
    mlx,
    modelopt,
    single_file,
    torchao,
    transformer_engine,
    u8,
    weight_bytes,
    write_file,
    write_shards,
)

TARGETS = list(WRITERS)
OTHERS: dict[str, Tensor] = {
    "norm.weight": ("BF16", [3], np.arange(3).astype(ml_dtypes.bfloat16).tobytes()),
    "ids": ("I64", [2], np.arange(2).tobytes()),
    "empty": ("F32", [0, 4], b""),
}


def assert_holds(path: Path, name: str, n: int, k: int, seed: int, scale2: float) -> None:
    part = read_layer(open_tensors(path), name)
    b, scales = weight_bytes(n, k, seed)
    assert np.array_equal(part.b, b)
    assert np.array_equal(part.scales, scales)
    assert part.scale2.tobytes() == np.float32(scale2).tobytes()


@pytest.mark.parametrize(("first", "second"), list(itertools.product(TARGETS, TARGETS)))
def test_there_and_back_keeps_every_bit(tmp_path: Path, first: str, second: str) -> None:
    bias = np.arange(20, dtype="f4")
    tensors = modelopt("a.p", 20, 80, 1, 2**-9) | modelopt("a.q", 128, 64, 2, 0.75 * 2**-12)
    tensors |= OTHERS | {"a.p.bias": ("F32", [20], bias.tobytes()), "a.p.input_scale": f32(0.25)}
    if "compressed-tensors" in (first, second):  # 1 / 0.75 isn't exact
        tensors |= {"a.q.weight_scale_2": f32(2**-12)}
    factor = np.frombuffer(tensors["a.q.weight_scale_2"][2], "f4")[0]
    source = write_file(tmp_path / "0.safetensors", tensors, {"note": "kept"})
    one, two, back = (tmp_path / f"{i}.safetensors" for i in (1, 2, 3))
    convert_file(source, one, first, format="modelopt")
    found = {layer.name: layer for layer in layers(one)}
    assert {layer.format for layer in found.values()} == {first}
    assert found["a.p"].shape == (20, 80)
    assert all(layer.problem is None for layer in found.values())
    assert_holds(one, "a.p", 20, 80, 1, 2**-9)
    assert_holds(one, "a.q", 128, 64, 2, factor)
    convert_file(one, two, second)
    convert_file(two, back, "modelopt")
    after = open_tensors(back)
    for name, (dtype, shape, data) in tensors.items():
        assert (after.info(name).dtype, list(after.info(name).shape)) == (dtype, shape)
        assert after.array(name).tobytes() == data, name
    assert set(after) == set(tensors)
    assert after.metadata("ids")["note"] == "kept"
    assert "a.p.weight" not in after.metadata("ids")
    assert "_quantization_metadata" not in after.metadata("ids")


def test_the_bytes_of_comfyui(tmp_path: Path) -> None:
    source = write_file(tmp_path / "in.safetensors", modelopt("p", 20, 80, 1, 0.5))
    convert_file(source, tmp_path / "out.safetensors", "comfyui")
    got, expected = open_tensors(tmp_path / "out.safetensors"), single_file("p", 20, 80, 1, 0.5)
    for name, (dtype, shape, data) in expected.items():
        assert (got.info(name).dtype, list(got.info(name).shape), got.array(name).tobytes()) == (dtype, shape, data)
    mark = {"format": "nvfp4", "orig_shape": [20, 80]}
    assert json.loads(got.array("p.comfy_quant").tobytes()) == mark
    header = json.loads(got.metadata("p.weight")["_quantization_metadata"])
    assert header == {"format_version": "1.0", "layers": {"p": mark}}


def test_input_scales_change_their_name_and_convention(tmp_path: Path) -> None:
    source = write_file(tmp_path / "in.safetensors", modelopt("p", 4, 32, 1, 0.5) | {"p.input_scale": f32(0.25)})
    for target, name, value in (
        ("compressed-tensors", "p.input_global_scale", 4.0),
        ("torchao", "p._weight_act_per_tensor_scale", 0.25),
        ("comfyui", "p.input_scale", 0.25),
    ):
        convert_file(source, tmp_path / "out.safetensors", target, force=True)
        assert open_tensors(tmp_path / "out.safetensors").array(name) == np.float32(value)
    zero = write_file(tmp_path / "zero.safetensors", modelopt("p", 4, 32, 1, 0.5) | {"p.input_scale": f32(0.0)})
    with pytest.raises(FormatError, match=r"p\.input_scale.*reciprocal"):
        convert_file(zero, tmp_path / "no.safetensors", "compressed-tensors")
    assert not (tmp_path / "no.safetensors").exists()


SOURCES: list[tuple[str, dict[str, Tensor], float, dict[str, Any]]] = [
    ("compressed-tensors", compressed("p", 16, 64, 3, 3584.0), float(np.float32(1 / 3584)), {}),
    ("torchao", torchao("p", 16, 64, 3, 0.5, swizzled=True), 0.5, {}),
    ("comfyui", single_file("p", 16, 64, 3, 0.5, mark={"format": "nvfp4"}), 0.5, {}),
    ("comfyui", single_file("p", 16, 64, 3, 0.5), 0.5, {"format": "comfyui"}),
    ("modelopt-diffusers", single_file("p", 16, 64, 3, 0.5, high=False), 0.5, {"format": "modelopt-diffusers"}),
    ("transformer-engine", transformer_engine("p", 16, 64, 3, 1344.0), 0.5, {}),
    ("mlx", mlx("p", 16, 64, 3, 1344.0), 0.5, {}),
]


@pytest.mark.parametrize(("format", "tensors", "scale2", "options"), SOURCES, ids=[s[0] for s in SOURCES])
def test_from_every_format(
    tmp_path: Path, format: str, tensors: dict[str, Tensor], scale2: float, options: dict[str, Any]
) -> None:
    source = write_file(tmp_path / "in.safetensors", tensors | OTHERS)
    seen: list[tuple[str, int]] = []
    (report,) = convert_file(
        source, tmp_path / "out.safetensors", "modelopt", progress=lambda *step: seen.append(step), **options
    )
    assert (report.name, report.source_format, report.out_features, report.in_features) == ("p", format, 16, 64)
    assert_holds(tmp_path / "out.safetensors", "p", 16, 64, 3, scale2)
    suffixes = {name.removeprefix("p") for name in open_tensors(tmp_path / "out.safetensors")} - set(OTHERS)
    assert suffixes == {".weight", ".weight_scale", ".weight_scale_2"}
    before = open_tensors(source)
    assert sum(nbytes for _, nbytes in seen) == sum(before.info(name).nbytes for name in before)


def test_from_gguf(tmp_path: Path) -> None:
    raw = gguf_blocks(*weight_bytes(6, 128, 8))
    tensors = {"p.weight": (40, [6, 128], raw), "p.scale": (0, [1], np.float32(0.5).tobytes()), "n": (0, [1], bytes(4))}
    source, target = tmp_path / "m.gguf", tmp_path / "out.safetensors"
    source.write_bytes(gguf_bytes(tensors))
    convert_file(source, target, "modelopt")
    assert_holds(target, "p", 6, 128, 8, 0.5)
    assert set(open_tensors(target)) == {"p.weight", "p.weight_scale", "p.weight_scale_2", "n"}
    source.write_bytes(gguf_bytes(tensors | {"e.weight": (2, [1, 32], bytes(18))}))
    with pytest.raises(FormatError, match=r"e\.weight.*GGUF_Q4_0, which safetensors can't hold"):
        convert_file(source, target, "modelopt", force=True)


def test_a_padded_bias_is_cut_with_its_layer(tmp_path: Path) -> None:
    tensors = single_file("p", 5, 32, 4, 0.5, mark={"format": "nvfp4", "orig_shape": [5, 32]})
    tensors["p.bias"] = ("F32", [16], np.arange(16, dtype="f4").tobytes())
    convert_file(write_file(tmp_path / "in.safetensors", tensors), tmp_path / "out.safetensors", "modelopt")
    assert_holds(tmp_path / "out.safetensors", "p", 5, 32, 4, 0.5)
    assert open_tensors(tmp_path / "out.safetensors").array("p.bias").tolist() == [0, 1, 2, 3, 4]


def test_experts_become_layers(tmp_path: Path) -> None:
    made = [weight_bytes(16, 64, 5 + e) for e in range(2)]
    b, scales = (np.stack(arrays).transpose(0, 2, 1) for arrays in zip(*made, strict=True))
    bias = np.random.default_rng(1).standard_normal((2, 16)).astype("f4")
    tensors = {
        "m.experts.up": u8(b),
        "m.experts.up_weight_scale": f8(scales),
        "m.experts.up_weight_scale_2": ("F32", [2], np.array([0.5, 0.25], "f4").tobytes()),
        "m.experts.up_bias": ("F32", [2, 16], bias.tobytes()),
    }
    source, target = write_file(tmp_path / "in.safetensors", tensors | OTHERS), tmp_path / "out.safetensors"
    convert_file(source, target, "compressed-tensors")
    for e in range(2):
        assert_holds(target, f"m.experts.{e}.up", 16, 64, 5 + e, 2.0 ** -(e + 1))
        assert np.array_equal(open_tensors(target).array(f"m.experts.{e}.up.bias"), bias[e])
    assert not [name for name in open_tensors(target) if name.startswith("m.experts.up")]


def test_awq_stays_with_modelopt(tmp_path: Path) -> None:
    factors = np.random.default_rng(1).uniform(0.5, 2, 64).astype("f4")
    awq = modelopt("p", 8, 64, 1, 0.5) | {"p.pre_quant_scale": ("F32", [64], factors.tobytes())}
    source, target = write_file(tmp_path / "in.safetensors", awq), tmp_path / "out.safetensors"
    convert_file(source, target, "modelopt")
    assert np.array_equal(load_awq(target, "p").pre_quant_scale, factors)
    for other in set(TARGETS) - {"modelopt"}:
        with pytest.raises(FormatError, match="pre_quant_scale multiplies x"):
            convert_file(source, target, other, force=True)


@given(st.floats(2.0**-120, 2.0**120, width=32))
@settings(max_examples=300, deadline=None)
def test_divisors_are_exact_or_known_not_to_be(scale2: float) -> None:
    value = np.asarray(scale2, np.float32)
    divisor, exact = divisor_of("p", value)
    back = np.float32(1 / np.float64(divisor))
    assert exact == (back == value)
    assert abs(float(back) - scale2) <= 2.0**-23 * scale2
    if not exact:  # no neighbour either
        for near in (np.nextafter(divisor, np.float32(0)), np.nextafter(divisor, np.float32(np.inf))):
            assert np.float32(1 / np.float64(near)) != value


def test_rounding_is_refused_unless_allowed(tmp_path: Path) -> None:
    scale2 = np.float32(1.9)
    while divisor_of("p", np.asarray(scale2))[1]:
        scale2 = np.nextafter(scale2, np.float32(1))
    scale2 = scale2 * np.float32(2**-10)
    source = write_file(tmp_path / "in.safetensors", modelopt("p", 4, 32, 1, float(scale2)))
    target = tmp_path / "out.safetensors"
    with pytest.raises(FormatError, match="no float32 number has the reciprocal"):
        convert_file(source, target, "compressed-tensors")
    assert list(tmp_path.iterdir()) == [source]
    (report,) = convert_file(source, target, "compressed-tensors", rounding=True)
    assert report.rounded
    got = float(read_layer(open_tensors(target), "p").scale2)
    assert 0 < abs(got - float(scale2)) <= 2.0**-23 * float(scale2)


def test_what_a_target_cannot_hold(tmp_path: Path) -> None:
    rows = modelopt("p", 4, 34, 1, 0.5)
    rows["p.weight_scale_2"] = ("F32", [4], np.array([1, 1, 1, 2], "f4").tobytes())
    source, target = write_file(tmp_path / "in.safetensors", rows), tmp_path / "out.safetensors"
    with pytest.warns(UserWarning), pytest.raises(FormatError, match="one a row"):
        convert_file(source, target, "modelopt")
    with pytest.raises(FormatError, match="in_features 34"):
        convert_file(source, target, "torchao")
    zero = write_file(tmp_path / "zero.safetensors", modelopt("p", 4, 32, 1, 0.0))
    with pytest.raises(FormatError, match="no finite reciprocal"):
        convert_file(zero, target, "compressed-tensors", rounding=True)
    svd = modelopt("p", 4, 32, 1, 0.5) | {"p.svdquant_lora_a": ("F32", [1], bytes(4))}
    with pytest.raises(FormatError, match="low-rank"):
        convert_file(write_file(tmp_path / "svd.safetensors", svd), target, "modelopt")
    clash = modelopt("p", 4, 32, 1, 0.5) | {"p.weight_packed": ("F32", [1], bytes(4))}
    with pytest.raises(FormatError, match=r"'p\.weight_packed' twice"):
        convert_file(write_file(tmp_path / "clash.safetensors", clash), target, "compressed-tensors")
    assert not target.exists()


def test_arguments(tmp_path: Path) -> None:
    source, target = write_file(tmp_path / "in.safetensors", modelopt("p", 4, 32, 1, 0.5)), tmp_path / "out.safetensors"
    with pytest.raises(ValueError, match="to: got 'gguf', expected one of modelopt, compressed-tensors"):
        convert_file(source, target, "gguf")
    with pytest.raises(ValueError, match="no NVFP4 layer"):
        convert_file(write_file(tmp_path / "f.safetensors", OTHERS), target, "modelopt")
    target.write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="--force"):
        convert_file(source, target, "modelopt")
    assert target.read_bytes() == b"mine"
    convert_file(source, target, "comfyui", force=True)
    assert layers(target)[0].format == "comfyui"
    convert_file(target, target, "modelopt", force=True)  # in place
    assert layers(target)[0].format == "modelopt"


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    source, target = write_file(tmp_path / "in.safetensors", modelopt("p", 4, 32, 1, 0.5)), tmp_path / "out.safetensors"
    target.write_bytes(b"mine")

    def stop(name: str, nbytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_file(source, target, "modelopt", force=True, progress=stop)
    assert target.read_bytes() == b"mine"
    assert sorted(os.listdir(tmp_path)) == ["in.safetensors", "out.safetensors"]


def test_shards_become_one_file(tmp_path: Path) -> None:
    shards = {"1.safetensors": modelopt("a", 4, 32, 1, 0.5), "2.safetensors": modelopt("b", 4, 32, 2, 0.25) | OTHERS}
    shards["2.safetensors"]["a.input_scale"] = f32(0.5)
    index = write_shards(tmp_path, shards)
    seen: list[int] = []
    convert_file(index, tmp_path / "out.safetensors", "torchao", progress=lambda _, nbytes: seen.append(nbytes))
    assert sum(seen) == sum(open_tensors(index).info(name).nbytes for name in open_tensors(index))
    assert_holds(tmp_path / "out.safetensors", "b", 4, 32, 2, 0.25)
    assert_holds(tmp_path / "out.safetensors", "a", 4, 32, 1, 0.5)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 140), st.integers(0, 80).map(lambda half: 2 * half), st.integers(0, 2**32 - 1))
def test_any_shape_through_comfyui(tmp_path: Path, n: int, k: int, seed: int) -> None:
    b, scales = weight_bytes(n, k, seed)
    arrays = {"p.weight": b, "p.weight_scale": scales, "p.weight_scale_2": 0.5}
    path = tmp_path / "x.safetensors"
    convert_file(arrays, path, "comfyui", force=True, format="modelopt")
    assert_holds(path, "p", n, k, seed, 0.5)
    assert fp4linear.load(path, "p").in_features == k

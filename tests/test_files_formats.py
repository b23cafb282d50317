"""Layers in the formats of other exporters: the same codes, scales and factor that went in, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fp4linear
from fp4linear.files import AwqLinear, FormatError, inspect, layers, load_awq, open_tensors, read_layer
from tests.checkpoints import (
    Tensor,
    f8,
    f32,
    fouroversix,
    mlx,
    modelopt,
    padded,
    single_file,
    swizzle,
    torchao,
    torchao_header,
    transformer_engine,
    u8,
    weight_bytes,
    write_file,
    x_of,
)

MARK = {"_quantization_metadata": '{"format_version": "1.0", "layers": {"p": {"format": "nvfp4"}}}'}
BY_MODELOPT = MARK | {"quantization_tool": "modelopt"}
SHAPES = [(48, 64), (128, 64), (130, 192), (5, 32), (16, 16)]


def write(tmp_path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> Path:
    return write_file(tmp_path / "m.safetensors", tensors, metadata)


def assert_layer(layer: Any, n: int, k: int, seed: int, scale2: float) -> None:
    b, scales = weight_bytes(n, k, seed)
    got = layer.canonical()
    assert np.array_equal(got[0], b)
    assert np.array_equal(got[1], scales)
    assert np.float32(got[2]) == np.float32(scale2)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("header", [False, True])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_torchao(tmp_path: Path, n: int, k: int, swizzled: bool, header: bool) -> None:
    tensors = torchao("p", n, k, 3, 0.25, swizzled=swizzled) | {"p.bias": ("F32", [n], np.ones(n, "f4").tobytes())}
    path = write(tmp_path, tensors, torchao_header("p", swizzled=swizzled) if header else None)
    (info,) = layers(path)
    assert (info.name, info.format, info.problem, info.shape) == ("p", "torchao", None, (n, k))
    layer = fp4linear.load(path, "p.weight")
    assert_layer(layer, n, k, 3, 0.25)
    assert layer.forward(np.zeros((1, k), np.float16)).tolist() == [[1.0] * n]


def test_torchao_without_a_global(tmp_path: Path) -> None:
    path = write(tmp_path, torchao("p", 4, 32, 3, None, swizzled=False))
    assert_layer(fp4linear.load(path, "p"), 4, 32, 3, 1.0)


def test_torchao_header_and_shape_that_disagree(tmp_path: Path) -> None:
    path = write(tmp_path, torchao("p", 48, 64, 3, 1.0, swizzled=False), torchao_header("p", swizzled=True))
    with pytest.raises(FormatError, match=r"_weight_scale is \[48, 4\], expected \[32, 16\] or \[128, 4\]"):
        fp4linear.load(path, "p")
    assert_layer(fp4linear.load(path, "p", swizzled=False), 48, 64, 3, 1.0)


def test_torchao_of_other_types(tmp_path: Path) -> None:
    tensors = torchao("p", 4, 32, 3, 1.0, swizzled=False)
    path = write(tmp_path, tensors, torchao_header("p", swizzled=False, kind="MXTensor"))
    with pytest.raises(FormatError, match=r"MXFP4 is not supported.*not NVFP4"):
        fp4linear.load(path, "p")
    path = write(tmp_path, tensors, torchao_header("p", swizzled=False, kind="Int4Tensor"))
    assert layers(path) == []


@pytest.mark.parametrize(("n", "k"), [*SHAPES, (33, 34)])
@pytest.mark.parametrize("original", [False, True])
def test_comfyui(tmp_path: Path, n: int, k: int, original: bool) -> None:
    mark: dict[str, Any] = {"format": "nvfp4"} | ({"orig_shape": [n, k]} if original else {})
    bias = {"p.bias": ("F32", [n], np.arange(n, dtype="f4").tobytes())}
    path = write(tmp_path, single_file("p", n, k, 4, 0.125, mark=mark) | bias)
    layer = fp4linear.load(path, "p")
    b, scales = weight_bytes(n, k, 4)
    if not original and k % 16:  # columns of padding stay: nothing but the mark tells their number
        b, scales = padded(b, 1, 8), padded(scales, 1, 1)
    got = layer.canonical()
    assert np.array_equal(got[0], b)
    assert np.array_equal(got[1], scales)
    assert layer.out_features == n  # rows of padding go: the bias tells
    assert layer.forward(np.zeros((1, layer.in_features), np.float32)).tolist() == [list(range(n))]


def test_comfyui_without_bias_or_shape_keeps_its_padding(tmp_path: Path) -> None:
    layer = fp4linear.load(write(tmp_path, single_file("p", 5, 32, 4, 0.125, mark={"format": "nvfp4"})), "p")
    assert layer.out_features == 16
    assert not np.asarray(layer.canonical()[0])[5:].any()


@pytest.mark.parametrize("said", [[1, 32], [-3, 32], [17, 32], [16, 64], [True, 32], ["16", 32], [16], 7])
def test_comfyui_shapes_that_are_not_believed(tmp_path: Path, said: Any) -> None:
    path = write(tmp_path, single_file("p", 16, 32, 4, 0.5, mark={"format": "nvfp4", "orig_shape": said}))
    if said == [1, 32] and type(said[0]) is int:  # within the padding: 1 row of 16
        assert fp4linear.load(path, "p").out_features == 1
    else:
        assert_layer(fp4linear.load(path, "p"), 16, 32, 4, 0.5)


def test_marks_of_other_kinds(tmp_path: Path) -> None:
    path = write(tmp_path, single_file("p", 16, 32, 4, 0.5, mark={"format": "mxfp8"}))
    with pytest.raises(FormatError, match="its mark says format 'mxfp8'"):
        fp4linear.load(path, "p")
    path = write(tmp_path, single_file("p", 16, 32, 4, 0.5, mark={"format": "nvfp4", "convrot": True}))
    with pytest.raises(FormatError, match="Hadamard-rotated NVFP4 is not supported"):
        fp4linear.load(path, "p")
    with pytest.raises(FormatError, match="x must be Hadamard-rotated"):  # whatever the caller says
        fp4linear.load(path, "p", format="comfyui")
    with pytest.raises(FormatError, match="x must be Hadamard-rotated"):
        fp4linear.load(path, "p", format="modelopt-diffusers")


def test_header_mark_asks_for_the_order_of_nibbles(tmp_path: Path) -> None:
    n, k = 48, 64
    high = write_file(tmp_path / "high.safetensors", single_file("p", n, k, 4, 0.5, high=True), MARK)
    low = write_file(tmp_path / "low.safetensors", single_file("p", n, k, 4, 0.5, high=False), MARK)
    with pytest.raises(FormatError, match='either order of nibbles: pass format="comfyui"'):
        fp4linear.load(high, "p")
    assert_layer(fp4linear.load(high, "p", format="comfyui"), n, k, 4, 0.5)
    assert_layer(fp4linear.load(high, "p", nibbles="high"), n, k, 4, 0.5)
    assert_layer(fp4linear.load(low, "p", format="modelopt-diffusers"), n, k, 4, 0.5)
    assert_layer(fp4linear.load(low, "p", nibbles="low"), n, k, 4, 0.5)
    assert_layer(fp4linear.load(low, "p", format="comfyui", nibbles="low"), n, k, 4, 0.5)
    with pytest.raises(ValueError, match="nibbles: got 'both'"):
        fp4linear.load(low, "p", nibbles="both")  # type: ignore[arg-type]


def test_modelopt_diffusers_named_by_the_header(tmp_path: Path) -> None:
    path = write(tmp_path, single_file("p", 48, 64, 4, 0.5, high=False), BY_MODELOPT)
    assert layers(path)[0].format == "modelopt-diffusers"
    assert_layer(fp4linear.load(path, "p"), 48, 64, 4, 0.5)
    plain = write(tmp_path, modelopt("p", 48, 64, 4, 0.5), BY_MODELOPT)
    assert_layer(fp4linear.load(plain, "p"), 48, 64, 4, 0.5)


def test_scales_of_one_shape_are_asked_for(tmp_path: Path) -> None:
    swizzled = single_file("p", 128, 64, 4, 0.5, high=False)
    path = write(tmp_path, swizzled, BY_MODELOPT)
    with pytest.raises(FormatError, match="pass swizzled=True or swizzled=False"):
        fp4linear.load(path, "p")
    assert_layer(fp4linear.load(path, "p", swizzled=True), 128, 64, 4, 0.5)
    plain = write(tmp_path, modelopt("p", 128, 64, 4, 0.5), BY_MODELOPT)
    assert_layer(fp4linear.load(plain, "p", swizzled=False), 128, 64, 4, 0.5)
    unmarked = write(tmp_path, swizzled)
    assert_layer(fp4linear.load(unmarked, "p", swizzled=True), 128, 64, 4, 0.5)
    with pytest.raises(TypeError, match="swizzled: got int"):
        fp4linear.load(unmarked, "p", swizzled=1)  # type: ignore[arg-type]


def test_options_that_mean_nothing_for_a_format(tmp_path: Path) -> None:
    path = write(tmp_path, mlx("p", 4, 32, 1, None))
    with pytest.raises(FormatError, match="swizzled=True means nothing for mlx"):
        fp4linear.load(path, "p", swizzled=True)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_transformer_engine(tmp_path: Path, n: int, k: int, swizzled: bool) -> None:
    tensors = transformer_engine("p", n, k, 5, 3.7, swizzled=swizzled)
    path = write(tmp_path, tensors)
    expected = np.float32(np.float64(np.float32(3.7)) / 2688)
    assert_layer(fp4linear.load(path, "p", swizzled=swizzled), n, k, 5, expected)
    flagged = write(tmp_path, tensors | {"p._with_gemm_swizzled_scales": ("BOOL", [1], bytes([swizzled]))})
    assert_layer(fp4linear.load(flagged, "p"), n, k, 5, expected)
    public = {name.replace("._", "."): tensor for name, tensor in tensors.items()}
    assert_layer(fp4linear.load(write(tmp_path, public), "p", swizzled=swizzled), n, k, 5, expected)


def test_transformer_engine_of_256_and_of_rows(tmp_path: Path) -> None:
    tensors = transformer_engine("p", 4, 32, 5, 3.0)
    maximum = {"p._nvfp4_e4m3_max": ("I32", [1], np.int32(256).tobytes())}
    assert_layer(fp4linear.load(write(tmp_path, tensors | maximum), "p"), 4, 32, 5, 3.0 / (6 * 256))
    amax = np.array([1, 2, 3, 4], "f4")
    rows = tensors | {"p._amax_rowwise": ("F32", [4], amax.tobytes())}
    scale2 = np.asarray(fp4linear.load(write(tmp_path, rows), "p").canonical()[2])
    assert np.array_equal(scale2, (amax.astype(np.float64) / 2688).astype("f4"))
    maximum = {"p._nvfp4_e4m3_max": ("I32", [1], np.int32(300).tobytes())}
    with pytest.raises(FormatError, match="nvfp4_e4m3_max is 300"):
        fp4linear.load(write(tmp_path, tensors | maximum), "p")
    del tensors["p._amax_rowwise"]
    with pytest.raises(FormatError, match=r"there is no p\.amax_rowwise"):
        fp4linear.load(write(tmp_path, tensors), "p")


@pytest.mark.parametrize("amax", [None, 2.5])
def test_mlx(tmp_path: Path, amax: float | None) -> None:
    path = write(tmp_path, mlx("p", 6, 96, 7, amax))
    assert layers(path)[0].shape == (6, 96)
    assert_layer(fp4linear.load(path, "p"), 6, 96, 7, 1.0 if amax is None else 2.5 / 2688)


def test_mlx_of_other_modes() -> None:
    words = np.zeros((4, 8), np.uint32)
    with pytest.raises(FormatError, match="MXFP4 is not supported"):
        fp4linear.load({"p.weight": words, "p.scales": np.zeros((4, 2), np.uint8)}, "p")
    with pytest.raises(FormatError, match="another mode of MLX"):
        fp4linear.load({"p.weight": words, "p.scales": np.zeros((4, 8), np.uint8)}, "p")
    affine = {"p.weight": words, "p.scales": np.zeros((4, 1), np.float16), "p.biases": np.zeros((4, 1), np.float16)}
    assert layers(affine) == []


@pytest.mark.parametrize(
    ("largest", "code", "divisor"),
    [
        (0x78, 7, 1536.0),
        (0x7C, 6, 1536.0),
        (0x7B, 6, 1536.0),
        (0x7E, 7, 2688.0),
        (0x7E, 6, 1792.0),
        (0x7E, 0xF, 2688.0),
    ],
)
def test_fouroversix_finds_the_rule_that_chose_the_scales(
    tmp_path: Path, largest: int, code: int, divisor: float
) -> None:
    b, scales = weight_bytes(40, 96, 9)
    scales[3, 1] = min(largest, 0x78)  # another block that holds amax, where this rule has one
    scales[7, 3] = largest
    b[7, 24:32] = 0x21  # the block of the largest scale: codes 1 and 2
    b[7, 27] = code << 4
    path = write(tmp_path, fouroversix("p", b, scales, 5.5))
    assert layers(path)[0].shape == (40, 96)
    got = fp4linear.load(path, "p").canonical()
    assert np.array_equal(got[0], b)
    assert np.array_equal(got[1], scales)
    assert np.float32(got[2]) == np.float32(5.5 / divisor)


def test_fouroversix_look_alikes(tmp_path: Path) -> None:
    b, scales = weight_bytes(40, 96, 9)
    for largest in (0x38, 0x77, 0x7A, 0x7D):
        scales[:] = largest
        with pytest.raises(FormatError, match="no block holds the largest scale"):
            fp4linear.load(write(tmp_path, fouroversix("p", b, scales, 1.0)), "p")
    scales[3, 2] = 0x80 | 0x38
    with pytest.raises(FormatError, match="IF4"):
        fp4linear.load(write(tmp_path, fouroversix("p", b, scales, 1.0)), "p")
    tensors = fouroversix("p", b, scales, 1.0)
    factors = tensors["p.quantized_weight_scale_factors"]
    tensors["p.quantized_weight_scale_factors"] = ("F8_E8M0", factors[1], factors[2])
    with pytest.raises(FormatError, match="MXFP4"):
        fp4linear.load(write(tmp_path, tensors), "p")
    for shape in ((40, 97), (400, 96), (-1, 96), (40, 2)):
        with pytest.raises(FormatError, match="doesn't hold the shapes"):
            fp4linear.load(write(tmp_path, fouroversix("p", b, scales, 1.0, shape)), "p")


@pytest.mark.parametrize("key", ["dtype", "weight_dtype"])
@pytest.mark.parametrize("kind", ["if4", "nvint4", "nvfp4_bs8", "nvfp4"])
def test_fouroversix_of_integer_codes_by_the_config(tmp_path: Path, key: str, kind: str) -> None:
    b, scales = weight_bytes(40, 96, 9)
    scales[7, 3] = 0x78
    path = write(tmp_path, fouroversix("p", b, scales, 1.0))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {key: kind}}))
    if kind == "nvfp4":
        assert fp4linear.load(path, "p").out_features == 40
    else:
        with pytest.raises(FormatError, match=f"config.json says {key} '{kind}', which is not NVFP4"):
            fp4linear.load(path, "p")


def test_a_mark_of_impossible_length_tells_nothing(tmp_path: Path) -> None:
    tensors = single_file("p", 16, 32, 4, 0.5)
    text = b'{"format": "mxfp8"}' + b" " * 100_000
    path = write(tmp_path, tensors | {"p.comfy_quant": ("U8", [len(text)], text)})
    assert_layer(fp4linear.load(path, "p"), 16, 32, 4, 0.5)


def awq_file(tmp_path: Path, factors: np.ndarray, name: str = "p") -> Path:
    tensors = modelopt("p", 8, 64, 11, 0.5) | modelopt("q", 4, 64, 12, 0.25)
    for layer in ("p", "q"):
        tensors[f"{layer}.pre_quant_scale"] = ("F32", list(factors.shape), factors.astype("f4").tobytes())
    return write(tmp_path, tensors)


def test_awq_multiplies_x(tmp_path: Path) -> None:
    factors = (2.0 ** np.random.default_rng(1).integers(-3, 4, 64)).astype("f4")  # exact in every type
    path = awq_file(tmp_path, factors)
    with pytest.raises(FormatError, match=r"p\.pre_quant_scale multiplies x .*load_awq applies it"):
        fp4linear.load(path, "p")
    layer = load_awq(path, "p")
    assert isinstance(layer, AwqLinear)
    x = x_of(3, 64, 2)
    plain = fp4linear.Fp4Linear(*weight_bytes(8, 64, 11), 0.5)
    for dtype in (np.float16, np.float32, ml_dtypes.bfloat16):
        typed = x.astype(dtype)
        y = layer(typed)
        assert y.dtype == dtype
        assert np.array_equal(y, plain.forward((typed * factors.astype(dtype)).astype(dtype)))
        assert not np.array_equal(y, plain.forward(typed))
    out = np.full((3, 8), np.nan, np.float16)
    assert layer.forward(x, out=out) is out
    assert np.array_equal(out, layer(x))
    fused = load_awq(path, ["p", "q"])
    assert np.array_equal(fused(x)[:, :8], layer(x))
    assert inspect(path).layers[0].problem is None
    assert "load_awq" in inspect(path).layers[0].notes[0]


def test_awq_rounds_the_product_once(tmp_path: Path) -> None:
    factors = np.random.default_rng(3).uniform(0.5, 2, 64).astype("f4")
    layer, x = load_awq(awq_file(tmp_path, factors), "p"), x_of(2, 64, 5)
    expected = (x.astype(np.float64) * factors).astype("f4").astype(np.float16)  # fp16 * fp32 fits float64
    assert np.array_equal(layer.scaled(x), expected)


def test_awq_with_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    factors = np.random.default_rng(3).uniform(0.5, 2, 64).astype("f4")
    layer, x = load_awq(awq_file(tmp_path, factors), "p"), x_of(2, 64, 5)
    y = layer(torch.from_numpy(x))
    assert isinstance(y, torch.Tensor)
    assert np.array_equal(y.numpy(), layer(x))


def test_awq_with_jax(tmp_path: Path) -> None:
    jnp = pytest.importorskip("jax.numpy")
    factors = np.random.default_rng(3).uniform(0.5, 2, 64).astype("f4")
    layer, x = load_awq(awq_file(tmp_path, factors), "p"), x_of(2, 64, 5)
    y = layer(jnp.asarray(x))
    assert isinstance(y, jnp.ndarray)
    assert np.array_equal(np.asarray(y), layer(x))


def test_awq_errors(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"expected \[64\]"):
        load_awq(awq_file(tmp_path, np.ones(63)), "p")
    with pytest.raises(FormatError, match="aren't finite"):
        load_awq(awq_file(tmp_path, np.full(64, np.inf)), "p")
    with pytest.raises(ValueError, match="has no pre_quant_scale"):
        load_awq(write(tmp_path, modelopt("p", 8, 64, 11, 0.5)), "p")
    layer = load_awq(awq_file(tmp_path, np.ones(64)), "p")
    with pytest.raises(TypeError, match="x: got list"):
        layer([1.0])
    tensors = modelopt("p", 8, 64, 1, 0.5) | modelopt("q", 8, 64, 1, 0.5)
    tensors["p.pre_quant_scale"] = ("F32", [64], np.ones(64, "f4").tobytes())
    with pytest.raises(FormatError, match="one pre_quant_scale"):
        load_awq(write(tmp_path, tensors), ["p", "q"])


STACKS = [
    (".weight", ".weight_scale", ".weight_scale_2", False),
    (".weight_packed", ".weight_scale", ".weight_global_scale", True),
    ("", "_weight_scale", "_weight_scale_2", False),
    ("", "_scale", "_scale_2", False),
]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("per_expert", [False, True])
@pytest.mark.parametrize("names", STACKS, ids=lambda names: names[0] + names[1])
def test_experts(tmp_path: Path, names: tuple[str, str, str, bool], transposed: bool, per_expert: bool) -> None:
    experts, n, k = 3, 24, 64
    made = [weight_bytes(n, k, 20 + e) for e in range(experts)]
    b, scales = (np.stack(arrays) for arrays in zip(*made, strict=True))
    if transposed:
        b, scales = b.transpose(0, 2, 1), scales.transpose(0, 2, 1)
    factors = np.array([2.0**-e for e in range(experts)] if per_expert else [0.5], "f4")
    stored = 1 / factors if names[3] else factors
    bias = np.random.default_rng(1).standard_normal((experts, n)).astype("f4")
    tensors = {
        "mlp.experts.up" + names[0]: u8(b),
        "mlp.experts.up" + names[1]: f8(scales),
        "mlp.experts.up" + names[2]: ("F32", list(stored.shape), stored.tobytes()),
        "mlp.experts.up.bias": ("F32", list(bias.shape), bias.tobytes()),
    }
    path = write(tmp_path, tensors)
    found = layers(path)
    assert [(layer.name, layer.problem, layer.shape) for layer in found] == [
        (f"mlp.experts.up[{e}]", None, (n, k)) for e in range(experts)
    ]
    for e in range(experts):
        layer = fp4linear.load(path, f"mlp.experts.up[{e}]")
        assert_layer(layer, n, k, 20 + e, factors[e if per_expert else 0])
        assert np.array_equal(layer.forward(np.zeros((1, k), np.float32))[0], bias[e])
    with pytest.raises(FormatError, match=r"name one, such as 'mlp\.experts\.up\[0\]'"):
        fp4linear.load(path, "mlp.experts.up")
    with pytest.raises(FormatError, match="holds 3 experts"):
        fp4linear.load(path, "mlp.experts.up[3]")


def test_experts_that_cannot_be_split() -> None:
    def stack(**change: Any) -> dict[str, Any]:
        arrays = {
            "p.weight": np.zeros((2, 24, 32), np.uint8),
            "p.weight_scale": np.zeros((2, 24, 4), ml_dtypes.float8_e4m3fn),
            "p.weight_scale_2": np.ones(2, np.float32),
        }
        arrays |= {"p." + name: value for name, value in change.items()}
        return {name: value for name, value in arrays.items() if value is not None}

    for change, message in (
        ({"weight_scale": np.zeros((2, 24, 5), np.uint8)}, "fits p.weight.*neither as"),
        ({"weight_scale": np.zeros((3, 24, 4), np.uint8)}, "neither as"),
        ({"weight_scale_2": np.ones((2, 2), np.float32)}, "one for each of 2 experts"),
        ({"weight_scale_2": None}, "there is no p.weight_scale_2"),
        ({"pre_quant_scale": np.ones((2, 64), np.float32)}, "not supported for stacks"),
        ({"weight_scale_2": np.array([np.inf, 1], np.float32)}, "got inf for expert 0"),
        ({"bias": np.zeros(24, np.float32)}, r"expected \[E, 24\]"),
    ):
        with pytest.raises(FormatError, match=message):
            fp4linear.load(stack(**change), "p[0]")
    dead = {
        "p.weight_packed": np.zeros((2, 24, 32), np.uint8),
        "p.weight_scale": np.zeros((2, 24, 4), np.uint8),
        "p.weight_global_scale": np.array([0, 2], np.float32),
    }
    with pytest.raises(FormatError, match="0 marks a dead expert"):
        fp4linear.load(dead, "p[0]")
    assert fp4linear.load(dead, "p[1]").canonical()[2] == 0.5


def test_mxfp4_experts_are_one_refused_layer() -> None:
    arrays = {"p.weight": np.zeros((2, 24, 32), np.uint8), "p.weight_scale": np.zeros((2, 24, 2), np.uint8)}
    (layer,) = layers(arrays)
    assert (layer.name, layer.format) == ("p", "MXFP4")


def test_a_stack_of_impossible_length_is_one_problem() -> None:
    scales = np.zeros((100_000, 1, 1), ml_dtypes.float8_e4m3fn)
    arrays = {"p.weight": np.zeros((100_000, 1, 8), np.uint8), "p.weight_scale": scales}
    (layer,) = layers(arrays)
    assert layer.name == "p"
    assert layer.problem


def test_swizzled_modelopt_names_without_a_mark_ask(tmp_path: Path) -> None:
    path = write(tmp_path, single_file("p", 160, 96, 4, 0.5))
    with pytest.raises(FormatError, match='no mark tells the order of nibbles: pass format="comfyui"'):
        fp4linear.load(path, "p")
    assert_layer(fp4linear.load(path, "p", format="comfyui"), 160, 96, 4, 0.5)


def test_views_of_the_file_are_not_copied(tmp_path: Path) -> None:
    part = read_layer(open_tensors(write(tmp_path, torchao("p", 4, 32, 1, 0.5, swizzled=False))), "p")
    assert part.b.base is not None
    assert not part.b.flags.writeable


def test_swizzle_of_the_tests_is_a_permutation() -> None:
    scales = np.arange(130 * 7, dtype=np.uint32).astype(np.uint8).reshape(130, 7)
    assert np.array_equal(np.sort(swizzle(scales)[swizzle(np.ones_like(scales)) == 1]), np.sort(scales.reshape(-1)))
    assert f32(1.0)[0] == "F32"


def test_a_bias_as_long_as_the_padded_weight(tmp_path: Path) -> None:
    tensors = single_file("p", 5, 32, 4, 0.5, mark={"format": "nvfp4", "orig_shape": [5, 32]})
    bias = np.arange(16, dtype="f4")
    layer = fp4linear.load(write(tmp_path, tensors | {"p.bias": ("F32", [16], bias.tobytes())}), "p")
    assert layer.forward(np.zeros((1, 32), np.float32)).tolist() == [[0, 1, 2, 3, 4]]
    with pytest.raises(FormatError, match=r"p\.bias.*expected \[5\]"):
        fp4linear.load(write(tmp_path, tensors | {"p.bias": ("F32", [40], bytes(160))}), "p")

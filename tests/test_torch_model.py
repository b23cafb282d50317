"""quantize_model and load_model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fp4linear
from fp4linear.files import FormatError, save_modelopt
from tests.checkpoints import compressed, f32, modelopt, single_file, weight_bytes, write_file, write_shards

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch import nn  # noqa: E402

from fp4linear.torch import Fp4LinearModule, load_model, quantize_model  # noqa: E402
from tests.test_torch_module import same  # noqa: E402

HIDDEN, HEADS, KV, FF, VOCAB = 64, 64, 32, 96, 40


class Attention(nn.Module):
    def __init__(self, fused: bool, bias: bool = False) -> None:
        super().__init__()
        self.fused = fused
        if fused:
            self.qkv_proj = nn.Linear(HIDDEN, HEADS + 2 * KV, bias=bias)
        else:
            self.q_proj = nn.Linear(HIDDEN, HEADS, bias=bias)
            self.k_proj = nn.Linear(HIDDEN, KV, bias=bias)
            self.v_proj = nn.Linear(HIDDEN, KV, bias=bias)
        self.o_proj = nn.Linear(HEADS, HIDDEN, bias=False)

    def forward(self, x: Any) -> Any:
        if self.fused:
            q, k, v = self.qkv_proj(x).split([HEADS, KV, KV], -1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(q + torch.cat([k, v], -1).tanh())


class Mlp(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        if fused:
            self.gate_up_proj = nn.Linear(HIDDEN, 2 * FF, bias=False)
        else:
            self.gate_proj = nn.Linear(HIDDEN, FF, bias=False)
            self.up_proj = nn.Linear(HIDDEN, FF, bias=False)
        self.down_proj = nn.Linear(FF, HIDDEN, bias=False)

    def forward(self, x: Any) -> Any:
        gate, up = self.gate_up_proj(x).chunk(2, -1) if self.fused else (self.gate_proj(x), self.up_proj(x))
        return self.down_proj(gate.relu() * up)


class Block(nn.Module):
    def __init__(self, fused: bool, bias: bool) -> None:
        super().__init__()
        self.self_attn = Attention(fused, bias)
        self.mlp = Mlp(fused)
        self.input_layernorm = nn.LayerNorm(HIDDEN, bias=False)

    def forward(self, x: Any) -> Any:
        return x + self.mlp(self.self_attn(self.input_layernorm(x)))


class Config:
    def __init__(self, tie: bool) -> None:
        self.tie_word_embeddings = tie


class Decoder(nn.Module):
    """The names of a Hugging Face decoder."""

    def __init__(self, fused: bool = False, bias: bool = False, tied: bool = False, config_ties: bool = False) -> None:
        super().__init__()
        self.config = Config(config_ties)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.model.layers = nn.ModuleList(Block(fused, bias) for _ in range(2))
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def get_input_embeddings(self) -> Any:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def forward(self, tokens: Any) -> Any:
        x = self.model.embed_tokens(tokens)
        for block in self.model.layers:
            x = block(x)
        return self.lm_head(x)


TOKENS = torch.arange(12).view(2, 6)


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def exported(model: nn.Module, keep: tuple[str, ...] = ("lm_head",)) -> dict[str, Any]:
    """What ModelOpt would write of a float model: every nn.Linear as NVFP4 but those kept, as NumPy arrays."""
    arrays: dict[str, Any] = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    for name, module in linears(model).items():
        if name not in keep:
            q = fp4linear.quantize(module.weight.detach().numpy())
            arrays |= {f"{name}.weight": q.b, f"{name}.weight_scale_2": q.scale2, f"{name}.input_scale": np.float32(3)}
            arrays[f"{name}.weight_scale"] = q.scales.view(np.uint8)
    return arrays


def write(path: Path, arrays: dict[str, Any]) -> Path:
    kinds = {"uint8": "U8", "float32": "F32", "float16": "F16", "int64": "I64"}
    tensors = {}
    for name, value in arrays.items():
        value = np.asarray(value)
        kind = "F8_E4M3" if name.endswith("weight_scale") else kinds[value.dtype.name]
        tensors[name] = (kind, list(value.shape), np.ascontiguousarray(value).tobytes())
    return write_file(path, tensors)


def reference_of(model: nn.Module, keep: tuple[str, ...] = ("lm_head",)) -> nn.Module:
    """The model itself, quantised layer by layer."""
    for name, module in linears(model).items():
        if name not in keep:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, Fp4LinearModule.from_linear(module))
    return model


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# quantize_model


def test_quantize_swaps_every_linear_but_the_head(capsys: pytest.CaptureFixture[str]) -> None:
    model = Decoder(bias=True).eval()
    weights = {name: module.weight.detach().clone() for name, module in linears(model).items()}
    before = model(TOKENS)
    report = quantize_model(model)
    assert set(linears(model)) == {"lm_head"} and report.skipped == {"lm_head": "excluded"}
    assert {layer.name for layer in report.layers} == set(weights) - {"lm_head"}
    for layer in report.layers:
        module = model.get_submodule(layer.name)
        assert isinstance(module, Fp4LinearModule) and not module.training
        b, scales, scale2 = module.layer.canonical()
        want = fp4linear.quantize(weights[layer.name].numpy())
        assert (b == want.b).all() and (scales == want.scales).all() and scale2 == want.scale2
        assert layer.bytes_after == module.layer.nbytes < layer.bytes_before
        assert layer.bytes_before >= 4 * layer.in_features * layer.out_features
    assert report.bytes_after < 0.2 * report.bytes_before
    assert f"{len(report.layers)} layers to NVFP4" in str(report) and "lm_head: left as it is, excluded" in str(report)
    difference = (model(TOKENS) - before).square().mean() / before.square().mean()
    assert 0 < difference < 0.05
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        ((), 0), ("lm_head", 1), ("*.mlp.*", 6), ("mlp", 0), ("model.layers.0", 7), ("model.layers.0.*", 7),
        ("down_proj", 2),
        (re.compile(r"layers\.1\..*_proj$"), 7), (["lm_head", "o_proj"], 3),
        (lambda name, module: module.out_features == FF, 4), (("*",), 15),
    ],
)  # fmt: skip
def test_exclude(exclude: Any, left: int) -> None:
    model = Decoder()
    report = quantize_model(model, exclude, progress=False)
    assert len(linears(model)) == left == len(report.skipped)
    assert report.unmatched == (["mlp"] if exclude == "mlp" else [])


def test_options_and_method() -> None:
    model = nn.Sequential(nn.Linear(64, 8))
    weight = model[0].weight.detach().numpy()
    quantize_model(model, method="mse", path="cpu_gemm", progress=False)
    assert "path='cpu_gemm'" in repr(model[0].layer)
    assert (model[0].layer.canonical()[0] == fp4linear.quantize(weight, method="mse").b).all()


def test_what_can_not_be_quantised_says_why() -> None:
    class Special(nn.Linear):
        pass

    model = nn.ModuleDict({
        "odd": nn.Linear(7, 4), "nan": nn.Linear(8, 4), "special": Special(8, 4), "empty": nn.Linear(8, 0),
        "meta": nn.Linear(8, 4, device="meta"), "hooked": nn.Linear(8, 4), "attention": nn.MultiheadAttention(8, 2),
        "encoder": nn.TransformerEncoderLayer(8, 2, 16), "good": nn.Linear(8, 4),
    })  # fmt: skip
    nn.init.constant_(model["nan"].weight, float("nan"))
    model["hooked"].register_forward_hook(lambda *_: None)
    report = quantize_model(model, (), progress=False)
    assert [layer.name for layer in report.layers] == ["good"]
    reasons = {
        "odd": "even", "nan": "finite", "special": "Special", "empty": "no weights", "meta": "meta device",
        "hooked": "hooks", "attention.out_proj": "NonDynamically", "encoder.self_attn.out_proj": "NonDynamically",
        "encoder.linear1": "TransformerEncoderLayer", "encoder.linear2": "TransformerEncoderLayer",
    }  # fmt: skip
    assert set(report.skipped) == set(reasons)
    for name, words in reasons.items():
        assert words in report.skipped[name]
    model["encoder"].eval()(torch.randn(3, 1, 8))


def test_a_tied_head_is_left_alone() -> None:
    model = Decoder(tied=True)
    report = quantize_model(model, (), progress=False)
    assert "tied to model.embed_tokens" in report.skipped["lm_head"]
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_shared_modules_and_shared_weights() -> None:
    one, two = nn.Linear(64, 8, bias=False), nn.Linear(64, 8, bias=False)
    two.weight = one.weight
    model = nn.ModuleDict({"a": one, "b": one, "c": two})
    report = quantize_model(model, (), progress=False)
    assert model["a"] is model["b"] and model["a"] is not model["c"]
    assert model["a"].layer is model["c"].layer
    assert [layer.name for layer in report.layers] == ["a", "c"]


def test_a_linear_itself_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model: an nn\.Linear"):
        quantize_model(nn.Linear(8, 8))


def test_a_quantised_model_goes_through_its_state_dict() -> None:
    model = Decoder(bias=True)
    quantize_model(model, progress=False)
    with torch.device("meta"):
        fresh = Decoder(bias=True)
    for name, module in linears(fresh).items():
        if name != "lm_head":
            parent, _, last = name.rpartition(".")
            with torch.device("meta"):
                made = Fp4LinearModule(module.in_features, module.out_features, module.bias is not None)
            setattr(fresh.get_submodule(parent), last, made)
    fresh.load_state_dict(model.state_dict(), assign=True)
    assert same(fresh(TOKENS), model(TOKENS))


# load_model


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("kind", ["mapping", "file", "shards", "directory"])
def test_load(tmp_path: Path, kind: str, meta: bool, bias: bool) -> None:
    source = Decoder(bias=bias)
    arrays = exported(source)
    checkpoint: Any = arrays
    if kind != "mapping":
        write(tmp_path / "model.safetensors", arrays)
        # An exclude list that the tensors contradict.
        config = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["*"]}}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(config))
        checkpoint = tmp_path if kind == "directory" else tmp_path / "model.safetensors"
    if kind == "shards":
        names = sorted(arrays)
        files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, some in files.items():
            write(tmp_path / file, {name: arrays[name] for name in some})
        index = {"weight_map": {name: file for file, some in files.items() for name in some}}
        checkpoint = tmp_path / "model.safetensors.index.json"
        checkpoint.write_text(json.dumps(index))
    with torch.device("meta" if meta else "cpu"):
        model = Decoder(bias=bias).eval()
    report = load_model(model, checkpoint, progress=False)
    assert not report.missing and not report.unexpected and not report.left_on_meta
    assert len(report.layers) == 14 and all(name.endswith("input_scale") for name in report.ignored)
    assert set(linears(model)) == {"lm_head"}
    assert not any(module.training for module in model.modules())
    want = reference_of(source)
    assert same(model(TOKENS), want(TOKENS))
    got = model.state_dict()
    assert all(same(got[name], tensor) for name, tensor in want.state_dict().items())


@pytest.mark.parametrize("into_fused", [True, False])
@pytest.mark.parametrize("bias", [False, True])
def test_fused_and_unfused(into_fused: bool, bias: bool) -> None:
    source, model = Decoder(fused=not into_fused, bias=bias), Decoder(fused=into_fused, bias=bias)
    report = load_model(model, exported(source), progress=False)
    name = "model.layers.1.self_attn." + ("qkv_proj" if into_fused else "k_proj")
    origin = "model.layers.1.self_attn."
    assert report.layers[name] == (
        f"{origin}q_proj + {origin}k_proj + {origin}v_proj" if into_fused else f"{origin}qkv_proj"
    )
    want = reference_of(source)
    torch.testing.assert_close(model(TOKENS), want(TOKENS), rtol=1e-5, atol=1e-6)
    fused, parts = (model, want) if into_fused else (want, model)
    attention, split = fused.model.layers[1].self_attn, parts.model.layers[1].self_attn
    x = torch.randn(3, HIDDEN)
    assert same(attention.qkv_proj(x), torch.cat([split.q_proj(x), split.k_proj(x), split.v_proj(x)], -1))
    if into_fused:
        assert attention.qkv_proj.layer.scale2.shape == (HEADS + 2 * KV,)


@pytest.mark.parametrize("into_fused", [True, False])
def test_fused_float_tensors(into_fused: bool) -> None:
    source, model = Decoder(fused=not into_fused, bias=True), Decoder(fused=into_fused, bias=True)
    arrays = {name: tensor.numpy() for name, tensor in source.state_dict().items()}
    report = load_model(model, arrays, progress=False)
    assert not report.layers and not report.missing and not report.unexpected
    torch.testing.assert_close(model(TOKENS), source(TOKENS))


def test_compressed_tensors(tmp_path: Path) -> None:
    path = write_file(
        tmp_path / "x.safetensors", compressed("0", 32, 64, 3, 4.0) | {"0.bias": ("F32", [32], bytes(128))}
    )
    model = nn.Sequential(nn.Linear(64, 32))
    report = load_model(model, path, progress=False)
    assert report.layers == {"0": "0"}
    x = torch.randn(3, 64)
    assert same(model(x), fp4linear.load(path, "0").forward(x))


def test_shards_of_one_fused_layer(tmp_path: Path) -> None:
    shards = {"a.safetensors": modelopt("q_proj", 32, 80, 1, 0.5), "b.safetensors": modelopt("k_proj", 8, 80, 2, 0.25)}
    shards["b.safetensors"] |= modelopt("v_proj", 8, 80, 3, 0.125)
    index = write_shards(tmp_path, shards)
    model = nn.ModuleDict({"qkv_proj": nn.Linear(80, 48, bias=False)})
    load_model(model, index, progress=False)
    x = torch.randn(2, 80)
    want = torch.cat([fp4linear.load(index, name).forward(x) for name in ("q_proj", "k_proj", "v_proj")], -1)
    assert same(model["qkv_proj"](x), want)


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("how", ["one object", "config", "argument"])
def test_tied_heads(how: str, meta: bool) -> None:
    source = Decoder(tied=True)
    arrays = exported(source)
    del arrays["lm_head.weight"]
    with torch.device("meta" if meta else "cpu"):
        model = Decoder(tied=how == "one object", config_ties=how == "config")
    options = {"tied": {"lm_head.weight": "model.embed_tokens.weight"}} if how == "argument" else {}
    report = load_model(model, arrays, progress=False, **options)
    assert report.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert model.lm_head.weight is model.model.embed_tokens.weight and not model.lm_head.weight.is_meta
    assert same(model(TOKENS), reference_of(source)(TOKENS))


@pytest.mark.parametrize("tied", [False, True])
def test_a_quantised_head_of_a_tied_model(tied: bool) -> None:
    source = Decoder(tied=tied)
    arrays = exported(source, keep=())
    embedding = source.model.embed_tokens.weight.detach().clone()
    model = Decoder(tied=True)
    load_model(model, arrays, progress=False)
    assert isinstance(model.lm_head, Fp4LinearModule)
    assert same(model.model.embed_tokens.weight.detach(), embedding)


@pytest.mark.parametrize("meta", [False, True])
def test_a_quantised_head_alone_fills_the_embedding(meta: bool) -> None:
    arrays = exported(Decoder(tied=True), keep=())
    del arrays["model.embed_tokens.weight"]
    with torch.device("meta" if meta else "cpu"):
        model = Decoder(tied=True)
    report = load_model(model, arrays, progress=False)
    assert report.tied == {"model.embed_tokens.weight": "lm_head.weight"}
    assert same(model.model.embed_tokens.weight.detach(), model.lm_head.dequantize())


def test_a_quantised_head_fills_the_embedding_by_the_config_again_and_again() -> None:
    arrays = exported(Decoder(tied=True), keep=())
    del arrays["model.embed_tokens.weight"]
    model = Decoder(config_ties=True)
    for _ in range(2):  # the second time the head is an Fp4LinearModule
        report = load_model(model, arrays, progress=False)
        assert report.tied == {"model.embed_tokens.weight": "lm_head.weight"}
        assert same(model.model.embed_tokens.weight.detach(), model.lm_head.dequantize())


def test_a_shared_module_and_a_shared_weight() -> None:
    source = nn.Sequential(nn.Linear(32, 8))
    one, two = nn.Linear(32, 8), nn.Linear(32, 8, bias=False)
    two.weight = one.weight
    model = nn.ModuleDict({"again": one, "0": one, "two": two})
    report = load_model(model, exported(source), progress=False)
    assert model["0"] is model["again"] and report.layers == {"0": "0"} and report.tied == {"two.weight": "0.weight"}
    x = torch.randn(3, 32)
    assert same(model["again"](x), reference_of(source)(x))
    assert same(two.weight.detach(), model["0"].dequantize())


def test_layers_without_a_place_are_unexpected() -> None:
    arrays = exported(Decoder())
    q = fp4linear.quantize(np.ones((8, 32), np.float32))
    arrays |= {"more.weight": q.b, "more.weight_scale": q.scales, "more.weight_scale_2": q.scale2}
    with pytest.raises(RuntimeError, match=r"Unexpected.*'more\.weight', 'more\.weight_scale', 'more\.weight_scale_2'"):
        load_model(Decoder(), arrays, progress=False)
    arrays = {name: value for name, value in arrays.items() if not name.startswith("more")}
    arrays |= {"odd._weight_qdata": q.b, "odd._weight_scale": q.scales, "odd._weight_per_tensor_scale": q.scale2}
    with pytest.raises(RuntimeError, match=r"Unexpected.*'odd"):
        load_model(Decoder(), arrays, progress=False)


def test_a_quantised_embedding_is_dequantised() -> None:
    w = torch.randn(VOCAB, HIDDEN)
    q = fp4linear.quantize(w.numpy())
    arrays = {"0.weight": q.b, "0.weight_scale": q.scales, "0.weight_scale_2": q.scale2}
    model = nn.Sequential(nn.Embedding(VOCAB, HIDDEN, dtype=torch.bfloat16))
    report = load_model(model, arrays, progress=False)
    assert report.dequantized == {"0.weight": "0"} and not report.layers
    assert same(model[0].weight.detach(), torch.from_numpy(fp4linear.dequantize(*q)).bfloat16())


def test_types_and_devices() -> None:
    arrays = exported(Decoder(bias=True))
    model = Decoder(bias=True).bfloat16()
    load_model(model, arrays, progress=False)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.steps.dtype == torch.int64
    with torch.device("meta"):
        model = Decoder(bias=True)
    load_model(model, arrays, dtype=torch.float16, device="cpu", progress=False)
    assert {p.dtype for p in model.parameters()} == {torch.float16}


def test_rename_and_a_second_load() -> None:
    source = Decoder()
    arrays = {name.removeprefix("model."): value for name, value in exported(source).items()}
    model = Decoder()

    def rename(name: str) -> str:
        return name if name.startswith(("lm_head", "steps")) else "model." + name

    load_model(model, arrays, rename=rename, progress=False)
    other = Decoder()
    load_model(model, exported(other), progress=False)  # over the modules of the first
    assert same(model(TOKENS), reference_of(other)(TOKENS))


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


Q_PROJ, UP_PROJ = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"
NARROW = {f"{UP_PROJ}.weight": np.zeros((FF, 16), np.uint8), f"{UP_PROJ}.weight_scale": np.zeros((FF, 2), np.uint8)}


@pytest.mark.parametrize(
    ("removed", "added", "message"),
    [
        ("model.layers.0.input_layernorm.weight", {}, r"Missing key.*'model\.layers\.0\.input_layernorm\.weight'"),
        ("lm_head.weight", {}, r"Missing key.*'lm_head\.weight'"),
        (None, {"extra": np.zeros(3)}, r"Unexpected key.*'extra'"),
        (None, {f"{Q_PROJ}.bias": np.zeros(HEADS, np.float32)}, r"Unexpected.*q_proj\.bias"),
        (
            None,
            {"lm_head.weight": np.zeros((3, HIDDEN), np.float32)},
            r"size mismatch for lm_head\.weight.*\[3, 64\].*\[40, 64\]",
        ),
        (None, NARROW, r"size mismatch for model\.layers\.0\.mlp\.up_proj.*NVFP4 \[96, 32\].*\[96, 64\]"),
    ],
)
def test_strict(removed: str | None, added: dict[str, Any], message: str) -> None:
    arrays = exported(Decoder()) | added
    if removed:
        del arrays[removed]
    model = Decoder()
    before = snapshot(model)
    with pytest.raises(RuntimeError, match=message):
        load_model(model, arrays, progress=False)
    assert all(same(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert len(linears(model)) == 15


@pytest.mark.parametrize("keep", [(), ("model.layers.0.self_attn.qkv_proj",)])
def test_a_fused_tensor_with_rows_left_over(keep: tuple[str, ...]) -> None:
    source = Decoder(fused=True)
    source.model.layers[0].self_attn.qkv_proj = nn.Linear(HIDDEN, HEADS + 2 * KV + 16, bias=False)
    with pytest.raises(RuntimeError, match=r"size mismatch for model\.layers\.0\.self_attn\.q_proj.*\[144, 64\]"):
        load_model(Decoder(), exported(source, keep=("lm_head", *keep)), progress=False)


def test_not_strict() -> None:
    arrays = exported(Decoder(bias=True))
    del arrays["model.layers.0.self_attn.q_proj.bias"], arrays["steps"]
    arrays["extra"] = np.zeros(3, np.float32)
    model = Decoder(bias=True)
    kept = model.model.layers[0].self_attn.q_proj.bias.detach().clone()
    report = load_model(model, arrays, strict=False, progress=False)
    assert report.missing == ["model.layers.0.self_attn.q_proj.bias", "steps"] and report.unexpected == ["extra"]
    assert same(model.model.layers[0].self_attn.q_proj.bias.detach(), kept)
    assert "missing (2)" in str(report) and "unexpected (1): extra" in str(report)


def test_half_quantised_parts_can_not_be_fused() -> None:
    arrays = exported(Decoder(), keep=("lm_head", "model.layers.0.self_attn.k_proj"))
    with pytest.raises(RuntimeError, match=r"Missing.*qkv_proj\.weight.*\n.*Unexpected.*q_proj\.weight"):
        load_model(Decoder(fused=True), arrays, progress=False)


@pytest.mark.parametrize("order", ["high", "low"])
def test_what_a_file_leaves_in_doubt_is_asked_for(tmp_path: Path, order: Any) -> None:
    """Two layers that a header marks without saying which nibble comes first, and one of another format."""
    n, k = 32, 64
    mark = {"format": "nvfp4"}
    tensors = compressed("b", n, k, 2, 500.0)
    for name, seed in (("a", 1), ("c", 3)):
        tensors |= single_file(name, n, k, seed, 0.25, high=order == "high")
    metadata = {"_quantization_metadata": json.dumps({"layers": {"a": mark, "c": mark}})}
    path = write_file(tmp_path / "x.safetensors", tensors, metadata)

    def model() -> Any:
        return nn.ModuleDict({name: nn.Linear(k, n, bias=False) for name in "abc"})

    with pytest.raises(FormatError, match="either order of nibbles"):
        load_model(model(), path, progress=False)
    filled = model()
    load_model(filled, path, nibbles=order, progress=False)
    for seed, name in enumerate("abc", 1):
        for got, want in zip(filled[name].layer.canonical(), weight_bytes(n, k, seed), strict=False):
            np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match="nibbles: got 'both'"):
        load_model(model(), path, nibbles="both", progress=False)  # type: ignore[arg-type]


def test_unsupported_kinds_of_nvfp4_are_refused() -> None:
    arrays = exported(Decoder())
    arrays["model.layers.0.mlp.up_proj.pre_quant_scale"] = np.ones(HIDDEN, np.float32)
    with pytest.raises(FormatError, match="AWQ"):
        load_model(Decoder(), arrays, progress=False)


def test_buffers_that_stay_on_meta_are_reported() -> None:
    with torch.device("meta"):
        model = Decoder()
        model.register_buffer("frequencies", torch.zeros(3), persistent=False)
    report = load_model(model, exported(Decoder()), progress=False)
    assert report.left_on_meta == ["frequencies"]


def test_a_file_written_here_fills_a_model(tmp_path: Path) -> None:
    model = Decoder(bias=True)
    quantize_model(model, progress=False)
    layers = {name: m.layer for name, m in model.named_modules() if isinstance(m, Fp4LinearModule)}
    save_modelopt(tmp_path / "layers.safetensors", layers)
    fresh = Decoder(bias=True)
    report = load_model(fresh, tmp_path / "layers.safetensors", strict=False, progress=False)
    assert set(report.layers) == set(layers) and "lm_head.weight" in report.missing
    for name, layer in layers.items():
        x = torch.randn(3, layer.in_features)
        assert same(fresh.get_submodule(name)(x), layer.forward(x))


def test_one_scalar_tensor(tmp_path: Path) -> None:
    path = write_file(tmp_path / "x.safetensors", {"scale": f32(3.0)})
    model = nn.Module()
    model.scale = nn.Parameter(torch.zeros(()))
    assert load_model(model, path, progress=False).tensors == ["scale"] and model.scale.item() == 3

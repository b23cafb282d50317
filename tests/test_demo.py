"""The demo: the encoder in NumPy, the fallback without a model, and the verdict."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import fp4linear
from fp4linear import demo
from fp4linear.bench import timing
from fp4linear.demo import checks, minilm
from fp4linear.demo.encoder import Encoder, erf, gelu, layer_names
from fp4linear.files import layers
from tests.checkpoints import Tensor, write_file

HIDDEN, INNER, HEADS, BLOCKS = 32, 64, 4, 2
CONFIG = {"num_attention_heads": HEADS, "num_hidden_layers": BLOCKS, "layer_norm_eps": 1e-12}


def model_tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(5)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (50, HIDDEN),
        "embeddings.position_embeddings.weight": (16, HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, HIDDEN),
        "embeddings.LayerNorm.weight": (HIDDEN,),
        "embeddings.LayerNorm.bias": (HIDDEN,),
    }
    for name in layer_names(BLOCKS):
        n, k = (HIDDEN, HIDDEN)
        if name.endswith("intermediate.dense"):
            n = INNER
        elif name.endswith("output.dense") and "attention" not in name:
            k = INNER
        shapes |= {name + ".weight": (n, k), name + ".bias": (n,)}
    for block in range(BLOCKS):
        for norm in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes |= {f"encoder.layer.{block}.{norm}.{part}": (HIDDEN,) for part in ("weight", "bias")}
    return {name: random.standard_normal(shape).astype(np.float32) * np.float32(0.5) for name, shape in shapes.items()}


def slow_embed(tensors: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """The encoder for one sentence in float64, a token at a time where that is clearer."""
    t = {name: value.astype(np.float64) for name, value in tensors.items()}

    def norm(v: np.ndarray, name: str) -> np.ndarray:
        return (v - v.mean()) / math.sqrt(v.var() + 1e-12) * t[name + ".weight"] + t[name + ".bias"]

    def linear(v: np.ndarray, name: str) -> np.ndarray:
        return t[name + ".weight"] @ v + t[name + ".bias"]

    e = "embeddings."
    hidden = [
        norm(
            t[e + "word_embeddings.weight"][token]
            + t[e + "position_embeddings.weight"][position]
            + t[e + "token_type_embeddings.weight"][0],
            e + "LayerNorm",
        )
        for position, token in enumerate(ids)
    ]
    size = HIDDEN // HEADS
    for block in range(BLOCKS):
        prefix = f"encoder.layer.{block}."
        q, k, v = ([linear(h, f"{prefix}attention.self.{part}") for h in hidden] for part in ("query", "key", "value"))
        following = []
        for i, h in enumerate(hidden):
            context = np.zeros(HIDDEN)
            for head in range(HEADS):
                s = slice(head * size, (head + 1) * size)
                weights = np.array([math.exp(q[i][s] @ other[s] / math.sqrt(size)) for other in k])
                context[s] = sum(w * other[s] for w, other in zip(weights / weights.sum(), v, strict=True))
            h = norm(h + linear(context, prefix + "attention.output.dense"), prefix + "attention.output.LayerNorm")
            inner = linear(h, prefix + "intermediate.dense")
            inner = np.array([0.5 * a * (1 + math.erf(a / math.sqrt(2))) for a in inner])
            following.append(norm(h + linear(inner, prefix + "output.dense"), prefix + "output.LayerNorm"))
        hidden = following
    mean = np.mean(hidden, axis=0)
    return mean / np.linalg.norm(mean)


def test_erf_and_gelu() -> None:
    x = np.linspace(-6, 6, 2001, dtype=np.float32)
    assert np.abs(erf(x) - [math.erf(v) for v in x]).max() < 4e-7
    assert np.abs(gelu(x) - [0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x]).max() < 2e-6


def test_encoder_is_bert_and_padding_does_not_matter() -> None:
    tensors = model_tensors()
    linears = {
        name: demo.dense_linear(tensors[name + ".weight"], tensors[name + ".bias"]) for name in layer_names(BLOCKS)
    }
    encoder = Encoder(tensors, linears, CONFIG)
    sentences = [[3, 7, 9], [1, 2, 3, 4, 5, 6, 7], [49]]
    got = encoder.embed(sentences)
    assert got.dtype == np.float32
    for row, ids in zip(got, sentences, strict=True):
        assert np.abs(row - slow_embed(tensors, ids)).max() < 2e-5


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times mean nothing in a test."""
    monkeypatch.setattr(checks, "SECONDS", 0.0)
    monkeypatch.setattr(timing, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(timing, "SETTLE_SECONDS", 0.0)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> minilm.ModelFiles:
    """A small BERT in place of the package, with token ids in place of its tokenizer."""
    tensors: dict[str, Tensor] = {
        name: ("F32", list(value.shape), value.tobytes()) for name, value in model_tensors().items()
    }
    tensors["embeddings.position_ids"] = ("I64", [1, 16], np.arange(16).tobytes())
    weights = write_file(tmp_path / "model.safetensors", tensors)
    found = minilm.ModelFiles(weights, tmp_path / "tokenizer.json", CONFIG, "0")
    monkeypatch.setattr(minilm, "find", lambda: found)
    monkeypatch.setattr(minilm, "token_ids", lambda files, texts: [[1, 5, 9, 2], [1, 2]][: len(texts)])
    monkeypatch.setattr(demo, "GOOD_COSINE", 0.8)  # random weights are harder to quantise than a trained model's
    return found


def run(**options: object) -> tuple[bool, str]:
    out = io.StringIO()
    good = demo.run(console=Console(file=out, width=160), **options)  # type: ignore[arg-type]
    return good, out.getvalue()


def test_demo_runs_a_model_through_a_file(model: minilm.ModelFiles, tmp_path: Path) -> None:
    output = tmp_path / "nvfp4.safetensors"
    good, text = run(output=output, sentences=["a", "b"], every_layer=True)
    assert good, text
    assert {layer.name for layer in layers(output)} == set(layer_names(BLOCKS))
    assert text.count("cosine to the float model 0.") + text.count("cosine to the float model 1.") == 2
    assert text.count("cpu_gemv") == len(layer_names(BLOCKS))
    assert "PASS: 12 of 12 layers" in text


def test_demo_groups_layers_of_one_shape(model: minilm.ModelFiles) -> None:
    text = run(sentences=["a", "b"])[1]
    assert "(+7)" in text
    assert text.count("cpu_gemv") == 3


def test_demo_fails_where_a_layer_is_wrong(model: minilm.ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fp4linear.load

    class Wrong:
        def __init__(self, layer: fp4linear.Fp4Linear) -> None:
            self._layer = layer

        def __getattr__(self, name: str) -> object:
            return getattr(self._layer, name)

        def forward(self, x: np.ndarray) -> np.ndarray:
            return self._layer.forward(x) * np.float32(1.001)

    monkeypatch.setattr("fp4linear.files.load", lambda *arguments, **options: Wrong(real(*arguments, **options)))
    good, text = run(sentences=["a", "b"])
    assert not good
    assert "FAIL: 0 of 12 layers" in text


def test_demo_fails_where_the_sentences_are_far_off(model: minilm.ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "GOOD_COSINE", 0.99999)
    good, text = run(sentences=["a", "b"])
    assert not good
    assert "FAIL: 12 of 12 layers" in text


def test_demo_without_the_model_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minilm, "DISTRIBUTION", "no-such-distribution")
    monkeypatch.setattr(demo, "FALLBACK_LAYERS", (("first", 48, 96), ("second", 33, 464)))
    good, text = run()
    assert good, text
    assert "No real model" in text
    assert "no-such-distribution" in text
    assert "Seeded random weights" in text
    assert "4 of 4 layers" in text
    assert "cosine" not in text


def test_demo_without_tokenizers_says_so(model: minilm.ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: object) -> None:
        raise ModuleNotFoundError("No module named 'tokenizers'")

    monkeypatch.setattr(minilm, "token_ids", missing)
    monkeypatch.setattr(demo, "FALLBACK_LAYERS", (("first", 48, 96),))
    good, text = run()
    assert good, text
    assert "fp4linear[demo]" in text


def test_real_model() -> None:
    """The package's own files, where they are installed."""
    files = minilm.find()
    if files is None:
        pytest.skip(f"{minilm.DISTRIBUTION} is not installed")
    pytest.importorskip("tokenizers")
    assert json.dumps(files.config)
    ids = minilm.token_ids(files, ["This is an example sentence", "x " * 1000])
    assert ids[0] == [101, 2023, 2003, 2019, 2742, 6251, 102]
    assert len(ids[1]) == 256
    good, text = run(method="max_abs", sentences=["A cat sleeps on the warm windowsill."])
    assert good, text
    assert "36 of 36 layers" in text

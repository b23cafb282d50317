"""ONNX graphs, which have no magic: recognised by the name."""

from __future__ import annotations

from pathlib import Path

NAME = "ONNX"
REASON = "fp4linear.onnx reads weights inside of a graph"


def recognises(head: bytes, path: Path) -> bool:
    return path.suffix.lower() in (".onnx", ".ort")

"""The marks of single files: X.comfy_quant (JSON in bytes) and the header's _quantization_metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .base import json_object, json_tensor

if TYPE_CHECKING:
    from ..checkpoint import Tensors

HEADER_MARK = "_quantization_metadata"
TENSOR_MARK = ".comfy_quant"
ROTATIONS = ("convrot", "hadamard", "rotation")  # keys of a mark whose weight was rotated before it was quantised


def mark_of(tensors: Tensors, layer: str) -> dict[str, Any]:
    """What the marks say of the layer: its own X.comfy_quant, or its entry in the header. Empty where they don't."""
    return json_tensor(tensors, layer + TENSOR_MARK) or header_entries(tensors, layer + ".weight").get(layer, {})


def header_entries(tensors: Tensors, tensor: str) -> dict[str, dict[str, Any]]:
    """The layers of the header's mark, parsed once for each text."""
    text = tensors.metadata(tensor).get(HEADER_MARK, "")
    parsed: dict[str, dict[str, dict[str, Any]]] = tensors.cache.setdefault("header marks", {})
    if text not in parsed:
        entries = json_object(text.encode("utf-8", "replace"), tensors.source).get("layers")
        good = entries if isinstance(entries, dict) else {}
        parsed[text] = {name: entry for name, entry in good.items() if isinstance(entry, dict)}
    return parsed[text]


def has_single_file_marks(tensors: Tensors, layer: str) -> bool:
    return layer + TENSOR_MARK in tensors or HEADER_MARK in tensors.metadata(layer + ".weight")


def mark_problem(tensors: Tensors, layer: str) -> str | None:
    """A mark that says the bytes are something else."""
    mark = mark_of(tensors, layer)
    if any(mark.get(key) for key in ROTATIONS):
        return "its mark says that x must be Hadamard-rotated before the layer, which is not supported"
    kind = mark.get("format", "nvfp4")
    return None if kind == "nvfp4" else f"its mark says format {str(kind)[:40]!r}, expected 'nvfp4'"

"""NVFP4 layers in checkpoint files: reading, listing, writing. Needs no torch; nothing in a file is trusted."""

from __future__ import annotations

from .checkpoint import Tensors, open_tensors
from .errors import FormatError
from .inspection import FileReport, LayerReport, inspect
from .loading import LayerInfo, layers, load, read_layer
from .quantizing import QuantizedLayer, quantize_file
from .saving import save_modelopt

__all__ = [
    "FileReport",
    "FormatError",
    "LayerInfo",
    "LayerReport",
    "QuantizedLayer",
    "Tensors",
    "inspect",
    "layers",
    "load",
    "open_tensors",
    "quantize_file",
    "read_layer",
    "save_modelopt",
]

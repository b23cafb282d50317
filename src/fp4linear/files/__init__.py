"""NVFP4 layers in checkpoint files: reading, listing, writing. Needs no torch; nothing in a file is trusted.

A source is a .safetensors or GGUF file, an index of shards, a directory with either, or a mapping from tensor names to
NumPy arrays::

    for info in fp4linear.files.layers("checkpoint/"):
        print(info.name, info.format, info.shape, info.problem)
    layer = fp4linear.load("checkpoint/", "model.layers.0.mlp.down_proj")
    fp4linear.files.convert_file("flux.safetensors", "out.safetensors", "modelopt", format="comfyui")

docs/formats.md says which formats there are, what is asked and what is refused.
"""

from __future__ import annotations

from .awq import AwqLinear, load_awq
from .checkpoint import Tensors, open_tensors
from .converting import ConvertedLayer, convert_file
from .errors import FormatError
from .formats.registry import SUPPORTED
from .inspection import FileReport, LayerReport, inspect
from .loading import LayerInfo, layers, load, read_layer
from .quantizing import QuantizedLayer, quantize_file
from .saving import save_modelopt

FORMAT_NAMES = tuple(SUPPORTED)
"""What `format=` takes."""

__all__ = [
    "FORMAT_NAMES",
    "AwqLinear",
    "ConvertedLayer",
    "FileReport",
    "FormatError",
    "LayerInfo",
    "LayerReport",
    "QuantizedLayer",
    "Tensors",
    "convert_file",
    "inspect",
    "layers",
    "load",
    "load_awq",
    "open_tensors",
    "quantize_file",
    "read_layer",
    "save_modelopt",
]

"""All formats in the order in which they may claim a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Format, Refused
from .comfyui import ComfyUI
from .compressed_tensors import CompressedTensors
from .experts_3d import Experts3D
from .fouroversix import FourOverSix
from .fp_quant import FPQuant
from .gguf import GGUF
from .mlx import MLX
from .modelopt import ModelOpt
from .modelopt_diffusers import ModelOptDiffusers
from .mxfp4 import MXFP4
from .rotated import Rotated
from .torchao import TorchAO
from .transformer_engine import TransformerEngine

if TYPE_CHECKING:
    from ..checkpoint import Tensors

# Special ones before those whose names they share.
FORMATS: tuple[Format, ...] = (
    GGUF(),
    TorchAO(),
    TransformerEngine(),
    FourOverSix(),
    FPQuant(),
    MXFP4(),
    MLX(),
    Rotated(),
    Experts3D(),
    ComfyUI(),
    ModelOptDiffusers(),
    CompressedTensors(),
    ModelOpt(),
)
SUPPORTED: dict[str, Format] = {f.name: f for f in FORMATS if not isinstance(f, Refused)}


def format_of(tensors: Tensors, layer: str) -> Format | None:
    """The first format that claims the layer."""
    return next((f for f in FORMATS if f.claims(tensors, layer)), None)


def find_layers(tensors: Tensors) -> dict[str, Format]:
    """Every layer that some format claims, in the order of the checkpoint."""
    found: dict[str, Format] = {}
    for tensor in tensors:
        for candidate in FORMATS:
            for layer in candidate.layers_of(tensors, tensor):
                if layer not in found:
                    found[layer] = format_of(tensors, layer) or candidate
    return found

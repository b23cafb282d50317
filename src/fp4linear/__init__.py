"""NVFP4 linear layers for NumPy, PyTorch, JAX and CuPy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fp4linear._activations import QuantizedActivations, quantize_activations
from fp4linear._core import Fp4Linear, Plan, __version__
from fp4linear._quantize import Quantized, dequantize, quantize
from fp4linear._reference import reference, reference_native

if TYPE_CHECKING:
    from fp4linear.files import load

__all__ = [
    "Fp4Linear",
    "Plan",
    "Quantized",
    "QuantizedActivations",
    "__version__",
    "dequantize",
    "load",
    "quantize",
    "quantize_activations",
    "reference",
    "reference_native",
]


def __getattr__(name: str) -> Any:
    # The file formats are only imported by those who load files: it keeps `import fp4linear` quick.
    if name == "load":
        from fp4linear.files import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

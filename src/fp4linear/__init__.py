"""NVFP4 linear layers for NumPy, PyTorch, JAX and CuPy arrays, on the CPU and on NVIDIA GPUs.

A weight is 4-bit E2M1 codes, an E4M3 scale for every 16 of them and one float32 global scale. x stays as it is, sums
are float32, and the result is rounded once, to x's type::

    y[m, n] = round(scale2 * sum_k x[m, k] * e2m1(b[n, k]) * e4m3(scales[n, k // 16]) + bias[n])

Here: `load` a layer of a checkpoint or `quantize` a float weight, make an `Fp4Linear` of the arrays and call it;
`reference` is the definition in float64, to check against.

In packages of their own, which are imported by name::

    fp4linear.files   what a checkpoint holds (`layers`, `inspect`), conversion between formats, AWQ
    fp4linear.torch   nn.Module, torch.compile, gradients, whole models, tensor parallelism
    fp4linear.jax     the weight as a pytree: jit, vmap, grad, shard_map
    fp4linear.onnx    layers out of ONNX models and into them

On the command line: fp4linear info, inspect, quantize, convert, bench, demo, selftest.

Example:
    >>> import numpy as np, fp4linear
    >>> w = np.random.default_rng(0).standard_normal((64, 128), dtype=np.float32)
    >>> q = fp4linear.quantize(w)  # b uint8 [64, 64], scales uint8 [64, 8], scale2
    >>> layer = fp4linear.Fp4Linear(*q)
    >>> x = np.ones((3, 128), np.float16)
    >>> y = layer(x)
    >>> y.shape, y.dtype.name, bool(np.allclose(y, fp4linear.reference(x, *q), rtol=1e-3, atol=1e-2))
    ((3, 64), 'float16', True)
"""

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

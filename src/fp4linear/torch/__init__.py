"""NVFP4 linear layers in PyTorch models: a module, an op, whole models, tensor parallelism. Needs torch 2.10 or later::

    report = fp4linear.torch.quantize_model(model)  # nn.Linear -> Fp4LinearModule, in place
    report = fp4linear.torch.load_model(model, "checkpoint/", device="cuda")  # or from an NVFP4 checkpoint

docs/torch.md says what works with torch.compile, CUDA graphs, gradients and torch.func.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .loading import LoadReport, load_model
from .module import Fp4LinearModule
from .quantizing import QuantizedLinear, QuantizeReport, quantize_model

if TYPE_CHECKING:
    from .parallel import ColumnParallel, RowParallel

__all__ = [
    "ColumnParallel",
    "Fp4LinearModule",
    "LoadReport",
    "QuantizeReport",
    "QuantizedLinear",
    "RowParallel",
    "load_model",
    "quantize_model",
]


def __getattr__(name: str) -> Any:
    # torch.distributed takes most of a second, and not every build of torch has it.
    if name in ("ColumnParallel", "RowParallel"):
        from . import parallel

        return getattr(parallel, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""ModelOpt's NVFP4_AWQ: a layer and the factors that multiply x before it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from .checkpoint import open_tensors
from .loading import Source, fuse, read_layer

if TYPE_CHECKING:
    from fp4linear import Fp4Linear


class AwqLinear:
    """y = layer(x * pre_quant_scale), in x's library, device and type.

    The product is rounded once to x's type before the layer rounds its own result: the factors can't be folded into
    the weight, whose block scales cover 16 of them, without quantising it anew.

    Args:
        layer: the `Fp4Linear`, N x K.
        pre_quant_scale: [K], taken as float32.

    Raises:
        ValueError: factors of another shape.

    Example:
        >>> import numpy as np, fp4linear
        >>> layer = fp4linear.Fp4Linear(*fp4linear.quantize(np.eye(4, 16, dtype=np.float32)))
        >>> awq = fp4linear.files.AwqLinear(layer, np.full(16, 2.0))
        >>> awq(np.ones(16, np.float32))
        array([2., 2., 2., 2.], dtype=float32)
    """

    def __init__(self, layer: Fp4Linear, pre_quant_scale: npt.ArrayLike) -> None:
        factors = np.asarray(pre_quant_scale, np.float32)
        if factors.shape != (layer.in_features,):
            raise ValueError(f"pre_quant_scale: got shape {list(factors.shape)}, expected [{layer.in_features}]")
        self.layer = layer
        self.pre_quant_scale = factors
        self._held: dict[tuple[str, str], Any] = {}  # by x's library and device

    def forward(self, x: Any, **options: Any) -> Any:
        """The layer's result. x: [..., K] of NumPy, torch or a library with `__array_namespace__`; options: as there.

        Raises TypeError for arrays of other libraries.
        """
        return self.layer.forward(self.scaled(x), **options)

    __call__ = forward

    def scaled(self, x: Any) -> Any:
        """x * pre_quant_scale, rounded once to x's type."""
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(x, torch.Tensor):
            factors = self._in("torch", x, lambda: torch.from_numpy(self.pre_quant_scale).to(x.device))
            return (x.to(torch.float32) * factors).to(x.dtype)
        if isinstance(x, np.ndarray):
            return (x.astype(np.float32) * self.pre_quant_scale).astype(x.dtype)
        if hasattr(x, "__array_namespace__"):
            library = x.__array_namespace__()
            factors = self._in(library.__name__, x, lambda: library.asarray(self.pre_quant_scale, device=x.device))
            return library.astype(library.astype(x, library.float32) * factors, x.dtype)
        raise TypeError(f"x: got {type(x).__name__}, expected an array of NumPy, torch or an array-API library")

    def _in(self, library: str, x: Any, make: Callable[[], Any]) -> Any:
        """The factors as an array of x's library on x's device, made once."""
        key = (library, str(x.device))
        if key not in self._held:
            self._held[key] = make()
        return self._held[key]

    def __repr__(self) -> str:
        return f"AwqLinear({self.layer!r})"


def load_awq(
    path_or_mapping: Source,
    name: str | Sequence[str],
    *,
    nan_scales: Literal["error", "zero", "propagate"] = "error",
    bias: npt.ArrayLike | Literal["auto"] | None = "auto",
    format: str | None = None,
    swizzled: bool | None = None,
    **options: Any,
) -> AwqLinear:
    """A layer with the `pre_quant_scale` of ModelOpt's NVFP4_AWQ, applied to x in every call.

    Args:
        path_or_mapping, name, nan_scales, bias, format, swizzled: as for `fp4linear.load`. Layers to fuse must share
            their factors.
        options: device, path, isa, threads, batch_invariant, as for `fp4linear.Fp4Linear`.

    Raises:
        ValueError: the layer has no pre_quant_scale.
        FormatError, TypeError: as `fp4linear.load` does.

    Example:
        >>> import numpy as np, fp4linear
        >>> q = fp4linear.quantize(np.eye(4, 16, dtype=np.float32))
        >>> tensors = {"up.weight": q.b, "up.weight_scale": q.scales, "up.weight_scale_2": q.scale2}
        >>> tensors["up.pre_quant_scale"] = np.full(16, 2.0, np.float32)
        >>> layer = fp4linear.files.load_awq(tensors, "up")
        >>> layer(np.ones(16, np.float32))
        array([2., 2., 2., 2.], dtype=float32)
    """
    from fp4linear import Fp4Linear

    tensors = open_tensors(path_or_mapping)
    names = [name] if isinstance(name, str) else list(name)
    if not names or not all(isinstance(n, str) for n in names):
        raise TypeError(f"name: got {name!r}, expected a string or a list of strings")
    parts = [read_layer(tensors, n, format, swizzled=swizzled, awq=True) for n in names]
    whole = parts[0] if len(parts) == 1 else fuse(tensors, names, parts)
    if whole.pre_quant_scale is None:
        raise ValueError(f"{tensors.source}: name: {name!r} has no pre_quant_scale: fp4linear.load reads it")
    layer = Fp4Linear(
        whole.b,
        whole.scales,
        float(whole.scale2) if whole.scale2.ndim == 0 else whole.scale2,
        whole.bias if isinstance(bias, str) and bias == "auto" else bias,
        nan_scales=nan_scales,
        **options,
    )
    return AwqLinear(layer, whole.pre_quant_scale)

"""`load`: layers from checkpoints; `layers`: what a checkpoint holds."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from .checkpoint import Tensors, open_tensors
from .errors import FormatError
from .formats.base import Asked, Format, Parts
from .formats.modelopt import pre_quant_scale_tensor
from .formats.registry import SUPPORTED, find_layers, format_of

if TYPE_CHECKING:
    from fp4linear import Fp4Linear

Source = str | os.PathLike[str] | Mapping[str, Any] | Tensors
NAME_SUFFIXES = (
    ".weight",
    ".weight_packed",
    "._weight_qdata",
    ".rowwise_data",
    "._rowwise_data",
)  # what a caller may leave on a layer's name


@dataclass(frozen=True)
class LayerInfo:
    """A quantised layer of a checkpoint.

    format: its name; problem: why it can't be loaded, or None; shape: (out_features, in_features), None where the
    tensors don't tell.
    """

    name: str
    format: str
    problem: str | None
    shape: tuple[int, int] | None


def load(
    path_or_mapping: Source,
    name: str | Sequence[str],
    *,
    nan_scales: Literal["error", "zero", "propagate"] = "error",
    bias: npt.ArrayLike | Literal["auto"] | None = "auto",
    device: str | None = None,
    path: str = "auto",
    format: str | None = None,
    swizzled: bool | None = None,
    nibbles: Literal["low", "high"] | None = None,
    isa: str | None = None,
    threads: int | None = None,
    batch_invariant: bool = False,
) -> Fp4Linear:
    """A layer from a checkpoint, in any of the formats of `fp4linear.files.FORMAT_NAMES` (docs/formats.md).

    Files are memory-mapped; only the layer's tensors are read, without torch. The tensors decide, whatever a config
    says. `input_scale` and `input_global_scale` are not applied: the layer is weight-only. A layer whose x must be
    multiplied first (AWQ) is refused: `fp4linear.files.load_awq` does both.

    Args:
        path_or_mapping: a .safetensors or GGUF file, an index of shards (`.safetensors.index.json`), a directory
            that holds one of them, a mapping from tensor names to NumPy arrays (uint8 or ml_dtypes' float8_e4m3fn
            bytes), or what `fp4linear.files.open_tensors` returned.
        name: "X" or "X.weight"; "X[3]" for expert 3 of a stack. A list of names makes one fused layer, rows
            concatenated in that order; where the global scales differ, every row keeps its own.
        nan_scales: what to do with NaN scale bytes, as for `Fp4Linear`.
        bias: "auto" takes X.bias where there is one; None is no bias; an array of [out_features] replaces it.
        device, path, isa, threads, batch_invariant: as for `Fp4Linear`.
        format: a format's name, where the tensors leave a doubt; None decides by the tensors.
        swizzled: True where block scales lie in the 128x4 layout, False where in rows; None decides by the tensors.
        nibbles: which nibble of a byte holds the even k, where the tensors leave a doubt.

    Raises:
        FormatError: (a ValueError) a damaged file, inconsistent tensors, or a format that isn't supported.
        ValueError: no such layer, or a value that `Fp4Linear` refuses.
        TypeError: an argument of a wrong type.

    Example:
        >>> import numpy as np, fp4linear
        >>> q = fp4linear.quantize(np.eye(4, 16, dtype=np.float32))
        >>> tensors = {"up.weight": q.b, "up.weight_scale": q.scales, "up.weight_scale_2": q.scale2}  # or a file's path
        >>> layer = fp4linear.load(tensors, "up")
        >>> layer.out_features, layer.in_features, bool((layer.canonical()[0] == q.b).all())
        (4, 16, True)
    """
    from fp4linear import Fp4Linear

    tensors = open_tensors(path_or_mapping)
    names = [name] if isinstance(name, str) else list(name)
    if not names or not all(isinstance(n, str) for n in names):
        raise TypeError(f"name: got {name!r}, expected a string or a list of strings")
    parts = [read_layer(tensors, n, format, swizzled=swizzled, nibbles=nibbles) for n in names]
    whole = parts[0] if len(parts) == 1 else fuse(tensors, names, parts)
    return Fp4Linear(
        whole.b,
        whole.scales,
        float(whole.scale2) if whole.scale2.ndim == 0 else whole.scale2,
        whole.bias if isinstance(bias, str) and bias == "auto" else bias,
        device=device,
        nan_scales=nan_scales,
        path=path,
        isa=isa,
        threads=threads,
        batch_invariant=batch_invariant,
    )


def layers(path_or_mapping: Source) -> list[LayerInfo]:
    """The quantised layers of a checkpoint in its order, those that can't be loaded included, with the reason.

    Args:
        path_or_mapping: as for `load`.

    Raises:
        FormatError: a damaged file, or a kind of file that isn't supported.
        TypeError: no path and no mapping.

    Example:
        >>> import numpy as np, fp4linear
        >>> q = fp4linear.quantize(np.eye(4, 16, dtype=np.float32))
        >>> tensors = {"up.weight": q.b, "up.weight_scale": q.scales, "up.weight_scale_2": q.scale2}
        >>> fp4linear.files.layers(tensors)
        [LayerInfo(name='up', format='modelopt', problem=None, shape=(4, 16))]
    """
    tensors = open_tensors(path_or_mapping)
    return [
        LayerInfo(name, found.name, problem_of(tensors, name, found, Asked()), found.shape(tensors, name))
        for name, found in find_layers(tensors).items()
    ]


def read_layer(
    tensors: Tensors,
    name: str,
    format: str | None = None,
    *,
    swizzled: bool | None = None,
    nibbles: Literal["low", "high"] | None = None,
    awq: bool = False,
) -> Parts:
    """One layer in canonical form, as views of the file where possible.

    Args:
        tensors: what `open_tensors` returned.
        name, format, swizzled, nibbles: as for `load`.
        awq: also give layers whose x must be multiplied by `pre_quant_scale`; the caller then does that.

    Returns:
        An object with b uint8 [N, K/2], scales uint8 [N, ceil(K/16)], scale2 float32 0-d or [N], bias float32 [N] or
        None, pre_quant_scale float32 [K] or None.

    Raises:
        FormatError, ValueError, TypeError: as `load` does.

    Example:
        >>> import numpy as np, fp4linear
        >>> q = fp4linear.quantize(np.eye(4, 16, dtype=np.float32))
        >>> tensors = {"up.weight": q.b, "up.weight_scale": q.scales, "up.weight_scale_2": q.scale2}
        >>> parts = fp4linear.files.read_layer(fp4linear.files.open_tensors(tensors), "up")
        >>> bool((parts.b == q.b).all() and (parts.scales == q.scales).all()), parts.bias
        (True, None)
    """
    asked = checked(format, swizzled, nibbles)
    layer, found = find_layer(tensors, name, asked)
    if reason := problem_of(tensors, layer, found, asked, awq=awq):
        what = "" if found.name in SUPPORTED else f"{found.name} is not supported: "
        raise FormatError(f"{tensors.source}: layer {layer!r}: {what}{reason}")
    return found.read(tensors, layer, asked)


def find_layer(tensors: Tensors, name: str, asked: Asked) -> tuple[str, Format]:
    """The layer's own name and its format. FormatError where there is no such layer, or none of the format asked."""
    for layer in layer_candidates(name):
        if asked.format is None:
            if found := format_of(tensors, layer):
                return layer, found
        elif SUPPORTED[asked.format].accepts(tensors, layer):
            return layer, SUPPORTED[asked.format]
    raise unknown_layer(tensors, name, asked.format)


def problem_of(tensors: Tensors, layer: str, found: Format, asked: Asked, *, awq: bool = False) -> str | None:
    """Why a layer can't be read with what the caller said, or None."""
    for option in ("swizzled", "nibbles"):
        if found.name in SUPPORTED and getattr(asked, option) is not None and option not in found.options:
            return f"{option}={getattr(asked, option)!r} means nothing for {found.name}: pass format= if it is another"
    if reason := found.unsupported(tensors, layer, asked):
        return reason
    scales = pre_quant_scale_tensor(tensors, layer)
    if scales is not None and not awq:
        return f"ModelOpt NVFP4_AWQ: {scales} multiplies x before the layer: fp4linear.files.load_awq applies it"
    return None


def checked(format: str | None, swizzled: bool | None, nibbles: Literal["low", "high"] | None) -> Asked:
    """What the caller said. ValueError for a value that no format knows."""
    if format is not None and format not in SUPPORTED:
        raise ValueError(f"format: got {format!r}, expected one of {', '.join(SUPPORTED)}")
    if nibbles not in (None, "low", "high"):
        raise ValueError(f"nibbles: got {nibbles!r}, expected 'low' or 'high'")
    if swizzled is not None and not isinstance(swizzled, bool):
        raise TypeError(f"swizzled: got {type(swizzled).__name__}, expected a bool")
    return Asked(format, swizzled, nibbles)


def layer_candidates(name: str) -> list[str]:
    stripped = [name[: -len(suffix)] for suffix in NAME_SUFFIXES if name.endswith(suffix)]
    return [name, *stripped]


def unknown_layer(tensors: Tensors, name: str, format: str | None) -> ValueError:
    """Says whether the tensor isn't there, or is there and isn't NVFP4."""
    layer = layer_candidates(name)[-1]
    for tensor in (layer + ".weight", layer + ".weight_packed", name):
        if tensor in tensors:
            info = tensors.info(tensor)
            how = " (`fp4linear quantize` makes NVFP4 of float weights)" if info.dtype in ("F16", "BF16", "F32") else ""
            other = format_of(tensors, layer)
            what = f"{format} layer" if format else "NVFP4 layer of a known format"
            if format and other is not None:
                how = f": its tensors are {other.name}"
            return FormatError(f"{tensors.source}: name {name!r}: {tensor} is {info} and no {what}{how}")
    close = difflib.get_close_matches(layer, list(find_layers(tensors)), n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    return FormatError(f"{tensors.source}: name {name!r}: there is no such layer{hint}")


def fuse(tensors: Tensors, names: Sequence[str], parts: Sequence[Parts]) -> Parts:
    """Rows of several layers as one layer. Differing globals become one scale2 a row: never their maximum."""
    widths = {name: part.b.shape[1] * 2 for name, part in zip(names, parts, strict=True)}
    if len(set(widths.values())) != 1:
        raise FormatError(f"{tensors.source}: name: layers to fuse must have one in_features, got {widths}")
    scale2 = np.concatenate([np.broadcast_to(part.scale2, part.b.shape[:1]) for part in parts])
    if len({part.scale2.tobytes() for part in parts}) == 1 and parts[0].scale2.ndim == 0:
        scale2 = parts[0].scale2
    factors = [part.pre_quant_scale for part in parts]
    if len({None if factor is None else factor.tobytes() for factor in factors}) != 1:
        raise FormatError(f"{tensors.source}: name: layers to fuse must have one pre_quant_scale, got different ones")
    bias = None
    if any(part.bias is not None for part in parts):
        zeros = (np.zeros(part.b.shape[0], np.float32) if part.bias is None else part.bias for part in parts)
        bias = np.concatenate(list(zeros))
    return Parts(
        np.concatenate([part.b for part in parts]),
        np.concatenate([part.scales for part in parts]),
        scale2,
        bias,
        factors[0],
    )

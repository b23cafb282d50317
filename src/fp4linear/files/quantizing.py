"""Float checkpoints to ModelOpt-style NVFP4 files, one tensor in memory at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from .checkpoint import Tensors, open_tensors
from .dtypes import FLOATS, Array
from .errors import FormatError
from .loading import Source
from .saving import Spec, modelopt_arrays, modelopt_metadata, modelopt_specs, write_safetensors

Method = Literal["max_abs", "four_over_six", "mse"]

# Left in float unless asked for: tables that are looked up, not multiplied; norms; the last layer and MoE routers,
# whose errors choose tokens and experts. Compared with the lower-case name.
DEFAULT_EXCLUDE = ("*embed*", "*norm*", "*lm_head*", "*wte", "*wpe", "*.ln_*", "*router*", "*.gate")
ERROR_CHUNK = 1 << 22  # weights whose error is summed at a time: 32 MiB of float64


@dataclass(frozen=True)
class QuantizedLayer:
    """One layer of the output. relative_error: Frobenius norm of the difference over that of the weight."""

    name: str
    out_features: int
    in_features: int
    bytes_before: int
    bytes_after: int
    relative_error: float
    max_abs_error: float


def quantize_file(
    source: Source,
    destination: str | os.PathLike[str],
    *,
    method: Method = "max_abs",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    force: bool = False,
    progress: Callable[[str, int], None] | None = None,
) -> list[QuantizedLayer]:
    """Quantises the 2-D float weights of a checkpoint into a ModelOpt-style file; other tensors are copied unchanged.

    Args:
        source: what `load` takes: a file, an index, a directory, or a mapping of arrays.
        destination: the .safetensors file to make. It appears when it is complete.
        method: as for `fp4linear.quantize`.
        include: globs over layer names ("X" of "X.weight"); none means all but DEFAULT_EXCLUDE.
        exclude: globs that win over include.
        force: replace an existing file.
        progress: called with a tensor's name and its bytes in the source, after each.

    Raises:
        FormatError: a damaged source. ValueError: nothing to quantise, or a weight that isn't finite.
        FileExistsError: destination exists and force is False.

    Example:
        >>> import numpy as np, os, tempfile, fp4linear
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = os.path.join(folder.name, "small.safetensors")
        >>> made = fp4linear.files.quantize_file({"up.weight": np.eye(32, 64, dtype=np.float32)}, path)
        >>> made[0].name, made[0].bytes_before, made[0].bytes_after
        ('up', 8192, 1156)
        >>> fp4linear.load(path, "up").out_features
        32
    """
    tensors = open_tensors(source)
    path = Path(destination)
    if path.exists() and not force:
        raise FileExistsError(f"{path}: exists already (--force or force=True replaces it)")
    chosen = choose(tensors, include, exclude)
    if not chosen:
        raise ValueError(f"{tensors.source}: no 2-D float weight to quantise matches include and exclude")
    specs: dict[str, Spec] = {}
    floats: list[str] = []
    for name in tensors:
        info = tensors.info(name)
        if name in chosen:
            specs |= modelopt_specs(chosen[name], *info.shape)
        else:
            specs[name] = (info.dtype, info.shape)
            if is_weight(tensors, name):
                floats.append(name.removesuffix(".weight"))
    reports: list[QuantizedLayer] = []

    def arrays() -> Iterator[tuple[str, Array]]:
        for name in tensors:
            if name in chosen:
                yield from quantize_tensor(tensors, name, chosen[name], method, reports)
            else:
                yield name, tensors.array(name)
            if progress is not None:
                progress(name, tensors.info(name).nbytes)

    metadata = dict(tensors.metadata(next(iter(tensors)))) | modelopt_metadata(floats)
    write_safetensors(path, specs, arrays(), metadata)
    return reports


def is_weight(tensors: Tensors, name: str) -> bool:
    """True for X.weight that can be packed: 2-D, float, an even number of columns, not quantised yet."""
    if not name.endswith(".weight"):
        return False
    info = tensors.info(name)
    packable = len(info.shape) == 2 and info.dtype in FLOATS and min(info.shape) > 0 and info.shape[1] % 2 == 0
    return packable and name + "_scale" not in tensors


def choose(tensors: Tensors, include: Sequence[str], exclude: Sequence[str]) -> dict[str, str]:
    """From X.weight to X for the layers to quantise. Default excludes hold only where nothing is included by name."""
    chosen = {}
    for name in tensors:
        layer = name.removesuffix(".weight")
        if include:
            wanted = any(fnmatchcase(layer, pattern) for pattern in include)
        else:
            wanted = not any(fnmatchcase(layer.lower(), pattern) for pattern in DEFAULT_EXCLUDE)
        if wanted and not any(fnmatchcase(layer, pattern) for pattern in exclude) and is_weight(tensors, name):
            chosen[name] = layer
    return chosen


def quantize_tensor(
    tensors: Tensors, name: str, layer: str, method: Method, reports: list[QuantizedLayer]
) -> Iterator[tuple[str, Array]]:
    from fp4linear import quantize

    weight = tensors.floats(name)
    try:
        b, scales, scale2 = quantize(weight, method=method)
    except ValueError as error:
        raise FormatError(f"{tensors.source}: tensor {name!r}: {error}") from error
    relative, largest = weight_error(weight, b, scales, scale2)
    before, after = tensors.info(name).nbytes, b.nbytes + scales.nbytes + 4
    n, k = weight.shape
    reports.append(QuantizedLayer(layer, n, k, before, after, relative, largest))
    yield from modelopt_arrays(layer, b, scales, scale2)


def weight_error(
    weight: npt.NDArray[np.float32], b: Array, scales: Array, scale2: npt.ArrayLike
) -> tuple[float, float]:
    """Relative Frobenius error and largest absolute error of a quantised weight."""
    from fp4linear import dequantize

    squares = difference = largest = 0.0
    step = max(1, ERROR_CHUNK // weight.shape[1])
    for row in range(0, weight.shape[0], step):
        rows = slice(row, row + step)
        exact = weight[rows].astype(np.float64)
        error = dequantize(b[rows], scales[rows], scale2) - exact
        squares += float(np.vdot(exact, exact))
        difference += float(np.vdot(error, error))
        largest = max(largest, float(np.abs(error).max()))
    return (difference / squares) ** 0.5 if squares else 0.0, largest

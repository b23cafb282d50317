"""Writing safetensors: streamed, contiguous, atomic.

The safetensors package wants every tensor in memory at once, and writes strided arrays wrongly without a word; a file
of float weights may be larger than the memory. So the header goes first, from dtypes and shapes alone, and the data
follow one tensor at a time, each to its place.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from .dtypes import BITS, RAW, Array, raw_shape
from .errors import FormatError
from .safetensors_file import is_impossible, show

if TYPE_CHECKING:
    from fp4linear import Fp4Linear

Spec = tuple[str, tuple[int, ...]]  # dtype by its safetensors name, shape


def write_safetensors(
    path: str | os.PathLike[str],
    specs: Mapping[str, Spec],
    arrays: Iterable[tuple[str, Array]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a file whose tensors come one by one, in any order; it takes its name when it is complete.

    Args:
        path: the file to make; replaced atomically where it exists.
        specs: every tensor's dtype and shape.
        arrays: (name, raw array) for every one of them, raw as `Tensors.array` gives it; any strides.
        metadata: the header's `__metadata__`.

    Raises ValueError where the arrays aren't what the specs announce, FormatError for shapes that no reader takes.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    # Widest items first, as the format's own library does: then every tensor is aligned.
    for name, (dtype, shape) in sorted(specs.items(), key=lambda item: (-BITS[item[1][0]], item[0])):
        if is_impossible(shape):
            raise FormatError(f"{os.fspath(path)}: tensor {show(name)}: shape {list(shape)} is impossible")
        size = math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    missing = set(specs)
    with atomic(Path(path)) as file:
        file.truncate(start + offset)
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name, raw in arrays:
            if name not in missing:
                raise ValueError(f"arrays: {name!r} came twice or isn't among the specs")
            dtype, shape = specs[name]
            expected = raw_shape(dtype, shape)
            if raw.dtype != RAW[dtype] or raw.shape != expected:
                raise ValueError(f"arrays: {name!r} is {raw.dtype} {raw.shape}, expected {RAW[dtype]} {expected}")
            file.seek(start + header[name]["data_offsets"][0])
            file.write(np.ascontiguousarray(raw).reshape(-1).view(np.uint8).data)
            missing.remove(name)
        if missing:
            raise ValueError(f"arrays: {len(missing)} tensors never came, the first of them {min(missing)!r}")


@contextmanager
def atomic(path: Path) -> Iterator[IO[bytes]]:
    """A file beside `path` that takes its name at the end, or vanishes on an error."""
    handle, temporary = tempfile.mkstemp(prefix=path.name + ".", suffix=".part", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            yield file
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp made it private
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def modelopt_specs(name: str, n: int, k: int) -> dict[str, Spec]:
    """The tensors of a layer [N, K] under ModelOpt's names."""
    return {
        name + ".weight": ("U8", (n, k // 2)),
        name + ".weight_scale": ("F8_E4M3", (n, -(-k // 16))),
        name + ".weight_scale_2": ("F32", ()),
    }


def modelopt_arrays(name: str, b: Array, scales: Array, scale2: Any) -> Iterator[tuple[str, Array]]:
    """The raw arrays that go with `modelopt_specs`."""
    factor = np.asarray(scale2, dtype=np.float32)
    if factor.size != 1:
        raise ValueError(f"scale2: layer {name!r} has {factor.size} factors, ModelOpt's format holds 1")
    yield name + ".weight", b.view(np.uint8)
    yield name + ".weight_scale", scales.view(np.uint8)
    yield name + ".weight_scale_2", factor.reshape(())


def modelopt_metadata(exclude: Iterable[str] = ()) -> dict[str, str]:
    """Header metadata that marks a file as ModelOpt's kind of NVFP4, in the words of hf_quant_config.json."""
    from fp4linear import __version__

    config = {
        "producer": {"name": "fp4linear", "version": __version__},
        "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": list(exclude)},
    }
    return {"format": "pt", "hf_quant_config": json.dumps(config)}


def save_modelopt(
    path: str | os.PathLike[str],
    layers: Mapping[str, Fp4Linear | tuple[Any, ...]],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes layers in ModelOpt's Hugging Face format: X.weight, X.weight_scale, X.weight_scale_2, X.bias.

    Args:
        path: the .safetensors file to make; replaced atomically where it exists.
        layers: from X to a layer, or to (b, scales, scale2) or (b, scales, scale2, bias), such as `quantize` returns.
        metadata: more entries for the header.

    Raises:
        ValueError: a layer with one scale2 a row or with another block size than 16: the format holds neither.

    Example:
        >>> import numpy as np, os, tempfile, fp4linear
        >>> q = fp4linear.quantize(np.eye(4, 16, dtype=np.float32))
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = os.path.join(folder.name, "small.safetensors")
        >>> fp4linear.files.save_modelopt(path, {"up": q, "down": fp4linear.Fp4Linear(*q)})
        >>> [info.name for info in fp4linear.files.layers(path)]
        ['down', 'up']
    """
    specs: dict[str, Spec] = {}
    arrays: list[tuple[str, Array]] = []
    for name, layer in layers.items():
        if not isinstance(layer, tuple) and layer.block_size != 16:
            raise ValueError(f"layers: {name!r} has block_size {layer.block_size}, ModelOpt's format holds 16")
        b, scales, scale2, *bias = layer if isinstance(layer, tuple) else (*layer.canonical(), layer.bias)
        codes = np.asarray(b)
        specs |= modelopt_specs(name, codes.shape[0], 2 * codes.shape[1])
        arrays += modelopt_arrays(name, codes, np.asarray(scales), scale2)
        if bias and bias[0] is not None:
            values = np.asarray(bias[0], dtype=np.float32)
            specs[name + ".bias"] = ("F32", values.shape)
            arrays.append((name + ".bias", values))
    write_safetensors(path, specs, arrays, modelopt_metadata() | dict(metadata or {}))

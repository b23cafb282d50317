"""Named tensors from anywhere: a file, a sharded checkpoint, a directory, or a mapping of arrays."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import numpy.typing as npt

from .dtypes import FLOATS, FROM_NUMPY, RAW, Array, to_float32
from .errors import FormatError
from .formats import onnx
from .gguf_file import GGUFFile
from .mapped import open_regular, size_of
from .safetensors_file import SafetensorsFile, TensorInfo, parse_json

MAX_JSON_BYTES = 100_000_000  # an index or a config larger than this is none
INDEX_SUFFIX = ".safetensors.index.json"


class Tensors(ABC):
    """What a format sees: names, dtypes, shapes and raw views. Iterates over the names."""

    source: str  # for messages

    def __init__(self) -> None:
        self.cache: dict[str, Any] = {}  # for facts that formats find once for the whole checkpoint

    @abstractmethod
    def __iter__(self) -> Iterator[str]: ...

    @abstractmethod
    def __contains__(self, name: object) -> bool: ...

    @abstractmethod
    def info(self, name: str) -> TensorInfo:
        """Dtype and shape. KeyError where there is no such tensor."""

    @abstractmethod
    def array(self, name: str) -> Array:
        """The tensor as a view, raw integers for dtypes that NumPy lacks."""

    def metadata(self, name: str) -> Mapping[str, str]:
        """The header metadata of the file that holds the tensor."""
        return {}

    def producer(self, name: str) -> str | None:
        """Who quantised the checkpoint, by the marks beside the tensor ("modelopt", …); None where there are none.

        A hint only, for what no tensor can show: exclude lists and configs are never believed against the tensors.
        """
        return None

    def quantization_config(self) -> Mapping[str, Any]:
        """What config.json beside the file says of quantisation: a hint as `producer` is."""
        return {}

    def floats(self, name: str) -> npt.NDArray[np.float32]:
        """A float tensor as fresh float32. FormatError where it isn't F16, BF16 or F32."""
        info = self.info(name)
        if info.dtype not in FLOATS:
            raise FormatError(f"{self.source}: tensor {name!r}: dtype {info.dtype}, expected F16, BF16 or F32")
        return to_float32(self.array(name), info.dtype)


class _OneFile(Tensors):
    """The tensors of a file that is open."""

    _file: SafetensorsFile | GGUFFile

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._file.tensors

    def info(self, name: str) -> TensorInfo:
        return self._file.tensors[name]

    def array(self, name: str) -> Array:
        return self._file.array(name)


class FileTensors(_OneFile):
    """One safetensors file."""

    _file: SafetensorsFile

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = str(path)
        self._file = SafetensorsFile(path)
        self._producer = header_producer(self._file.metadata) or sidecar_producer(path.parent)
        self._config = sidecar_config(path.parent)

    def metadata(self, name: str) -> Mapping[str, str]:
        return self._file.metadata

    def producer(self, name: str) -> str | None:
        return self._producer

    def quantization_config(self) -> Mapping[str, Any]:
        return self._config


class GGUFTensors(_OneFile):
    """One GGUF file. Types that safetensors lacks are named GGUF_…; their arrays are the bytes of their blocks."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = str(path)
        self._file = GGUFFile(path)

    def producer(self, name: str) -> str | None:
        return "gguf"


class ShardedTensors(Tensors):
    """The files of a `*.safetensors.index.json`, each opened when a tensor of it is first asked for."""

    def __init__(self, index: Path) -> None:
        super().__init__()
        self.source = str(index)
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise FormatError(f"{index}: weight_map: expected an object from tensor names to file names")
        self._directory = index.parent
        self._shard_of: dict[str, Path] = {name: self._shard_path(name, file) for name, file in weight_map.items()}
        self._shards: dict[Path, SafetensorsFile] = {}
        self._producer = sidecar_producer(self._directory)
        self._config = sidecar_config(self._directory)

    def _shard_path(self, name: str, file: str) -> Path:
        # Checked as written and not resolved: the shards of a download cache are symbolic links out of the directory.
        outside = "\0" in file or "\\" in file or PureWindowsPath(file).drive
        if not file or outside or PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
            raise FormatError(f"{self.source}: tensor {name!r}: shard {file!r} is not a path below the index")
        return self._directory / file

    def _shard(self, name: str) -> SafetensorsFile:
        path = self._shard_of[name]
        if path not in self._shards:
            self._shards[path] = SafetensorsFile(path)
        shard = self._shards[path]
        if name not in shard.tensors:
            raise FormatError(f"{self.source}: tensor {name!r} is not in {path.name}, where the index says it is")
        return shard

    def __iter__(self) -> Iterator[str]:
        return iter(self._shard_of)

    def __contains__(self, name: object) -> bool:
        return name in self._shard_of

    def info(self, name: str) -> TensorInfo:
        return self._shard(name).tensors[name]

    def array(self, name: str) -> Array:
        return self._shard(name).array(name)

    def metadata(self, name: str) -> Mapping[str, str]:
        return self._shard(name).metadata

    def producer(self, name: str) -> str | None:
        return header_producer(self._shard(name).metadata) or self._producer

    def quantization_config(self) -> Mapping[str, Any]:
        return self._config


class ArrayTensors(Tensors):
    """A mapping from names to NumPy arrays (ml_dtypes included) or numbers."""

    source = "the mapping"

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        super().__init__()
        self._arrays = arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    def _get(self, name: str) -> tuple[Array, str]:
        value = self._arrays[name]
        if isinstance(value, (bool, int, float)):
            value = np.float32(value)
        if not isinstance(value, (np.ndarray, np.generic)):
            raise TypeError(f"path_or_mapping: tensor {name!r} is a {type(value).__name__}, expected a NumPy array")
        array = np.asarray(value)
        # Unknown dtypes keep NumPy's name: no format claims them, and messages can show it.
        return array, FROM_NUMPY.get(array.dtype.name, array.dtype.name)

    def info(self, name: str) -> TensorInfo:
        array, dtype = self._get(name)
        return TensorInfo(name, dtype, array.shape, 0, array.nbytes)

    def array(self, name: str) -> Array:
        array, dtype = self._get(name)
        if dtype not in RAW:
            raise FormatError(f"{self.source}: tensor {name!r}: dtype {dtype} is not supported")
        return array.astype(array.dtype.newbyteorder("<"), copy=False).view(RAW[dtype])


def open_tensors(source: str | os.PathLike[str] | Mapping[str, Any] | Tensors) -> Tensors:
    """Opens a .safetensors or GGUF file, an index, a directory with either, or wraps a mapping of arrays.

    Raises:
        FormatError: a damaged file, or a kind of file that isn't supported.
        TypeError: no path and no mapping.

    Example:
        >>> import numpy as np, fp4linear
        >>> tensors = fp4linear.files.open_tensors({"norm.weight": np.ones(8, np.float32)})
        >>> list(tensors), tensors.info("norm.weight").shape, tensors.floats("norm.weight").dtype.name
        (['norm.weight'], (8,), 'float32')
    """
    if isinstance(source, Tensors):
        return source
    if isinstance(source, Mapping):
        return ArrayTensors(source)
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"path_or_mapping: got {type(source).__name__}, expected a path or a mapping of arrays")
    path = Path(source)
    try:
        if path.is_dir():
            path = find_in_directory(path)
        if not path.is_file():
            raise FormatError(f"{path}: no such file")
    except OSError as error:  # a name that is too long, a directory that may not be searched
        raise FormatError(f"{path}: can't be read: {error}") from error
    if path.name.endswith(".index.json"):
        return ShardedTensors(path)
    head = head_of(path)
    if head.startswith(b"GGUF"):
        return GGUFTensors(path)
    refuse_other_kinds(path, head)
    return FileTensors(path)


def find_in_directory(directory: Path) -> Path:
    """The index of a directory, or its only .safetensors or .gguf file."""
    for pattern in ("*" + INDEX_SUFFIX, "*.safetensors", "*.gguf"):
        found = sorted(directory.glob(pattern))
        preferred = [path for path in found if path.name.startswith("model.")]
        if len(found) == 1 or len(preferred) == 1:
            return (preferred or found)[0]
        if found:
            raise FormatError(f"{directory}: {len(found)} files match {pattern}: pass one of them, or an index")
    raise FormatError(f"{directory}: no *.safetensors or *.gguf file and no index in this directory")


def head_of(path: Path) -> bytes:
    """The first bytes of a file, by which kinds of file are told apart."""
    try:
        with open(path, "rb") as file:
            return file.read(16)
    except OSError as error:
        raise FormatError(f"{path}: can't be read: {error}") from error


def refuse_other_kinds(path: Path, head: bytes) -> None:
    """Names the file formats that are not read."""
    if onnx.recognises(head, path):
        raise FormatError(f"{path}: {onnx.NAME} is not supported here: {onnx.REASON}")
    # A safetensors file may start like a pickle: with the length of its header. The header itself starts with "{".
    if head.startswith((b"PK\x03\x04", b"\x80\x02")) and head[8:9] != b"{":
        raise FormatError(f"{path}: pickled or zipped arrays are not supported: save as safetensors")


def read_json(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            if size_of(file, path) > MAX_JSON_BYTES:
                raise FormatError(f"{path}: more than {MAX_JSON_BYTES} bytes of JSON")
            text = file.read(MAX_JSON_BYTES)
    except OSError as error:
        raise FormatError(f"{path}: can't be read: {error}") from error
    return parse_json(text, str(path))


def header_producer(metadata: Mapping[str, str]) -> str | None:
    """The quantiser by the header's hf_quant_config, which `save_modelopt` writes."""
    try:
        config = parse_json(metadata.get("hf_quant_config", "").encode(), "hf_quant_config")
    except FormatError:
        return None
    return "modelopt" if "quantization" in config else None


def sidecar_producer(directory: Path) -> str | None:
    """The quantiser named by hf_quant_config.json or config.json beside the file."""
    if (directory / "hf_quant_config.json").is_file():
        return "modelopt"
    method = sidecar_config(directory).get("quant_method")
    return method if isinstance(method, str) else None


def sidecar_config(directory: Path) -> dict[str, Any]:
    """The quantization_config of config.json beside the file, empty where there is none."""
    try:
        config = read_json(directory / "config.json").get("quantization_config")
    except FormatError:
        return {}
    return config if isinstance(config, dict) else {}

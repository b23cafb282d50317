"""A safetensors file as a read-only memory map.

The format: 8 bytes, little endian, the length of the header; the header, JSON (UTF-8, starting with `{`), one entry a
tensor with dtype, shape and [begin, end) relative to the end of the header; then the data, without holes.
The safetensors package can't give F8_E4M3, F4 or BF16 to NumPy, hence this reader. Nothing in the header is believed:
every number is checked against the file's size before it is used.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .dtypes import BITS, RAW, Array, raw_shape
from .errors import FormatError
from .mapped import MappedFile, open_regular, size_of

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
MAX_DIMENSIONS = 32  # what every NumPy ≥ 1.x can hold
MAX_ELEMENTS = 2**60 - 1  # of a shape: its bytes fit an int64 in every dtype
MAX_EMPTY = 2**24  # along the other axes of a tensor without elements, whose size no data bound
MAX_DIGITS = 20  # decimal digits of 2^64; longer numbers are no size, and slow to parse

_abbreviate = reprlib.Repr()  # what a message may quote of a header
_abbreviate.maxstring = _abbreviate.maxother = 200
show = _abbreviate.repr


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: `dtype` by its safetensors name, `shape` as stored, bytes [begin, end) of the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int = 0
    end: int = 0

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class SafetensorsFile:
    """Header and mapped data of one file. Raises FormatError, which names the file and the tensor."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with open_regular(self.path) as file:
                size = size_of(file, self.path)
                header, self._data_start = self._read_header(file.read, size)
                self.metadata, self.tensors = self._parse(header, size - self._data_start)
                # One map of the whole file; it stays valid when the name is replaced by another file.
                self._mapped = MappedFile(file, size, self.path)
        except OSError as error:
            raise FormatError(f"{self.path}: can't be read: {error}") from error

    def array(self, name: str) -> Array:
        """A view of the mapped file, no copy: raw integers for FP8, FP4, FP6 and BF16."""
        info = self.tensors[name]
        raw = self._mapped.view(self._data_start + info.begin, self._data_start + info.end)
        return raw.view(RAW[info.dtype]).reshape(raw_shape(info.dtype, info.shape))

    def _fail(self, what: str) -> FormatError:
        return FormatError(f"{self.path}: {what}")

    def _read_header(self, read: Any, size: int) -> tuple[bytes, int]:
        if size < 8:
            raise self._fail(f"not a safetensors file: {size} bytes, expected at least 8")
        length = int.from_bytes(read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise self._fail(f"not a safetensors file: header of {length} bytes, expected at most {MAX_HEADER_BYTES}")
        if length > size - 8:
            raise self._fail(f"truncated: header of {length} bytes, but only {size - 8} bytes follow its length")
        header: bytes = read(length)
        if len(header) != length:
            raise self._fail(f"truncated: header of {length} bytes, got {len(header)}")
        if not header.startswith(b"{"):
            raise self._fail("not a safetensors file: the header doesn't start with '{'")
        return header, 8 + length

    def _parse(self, header: bytes, data_size: int) -> tuple[dict[str, str], dict[str, TensorInfo]]:
        entries = parse_json(header, str(self.path))
        metadata = entries.pop("__metadata__", None)
        if metadata is None:  # MLX writes null where there is none
            metadata = {}
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise self._fail("__metadata__: expected an object with string values")
        tensors = {name: self._entry(name, entry, data_size) for name, entry in entries.items()}
        self._check_cover(tensors, data_size)
        return metadata, tensors

    def _entry(self, name: str, entry: object, data_size: int) -> TensorInfo:
        if not isinstance(entry, dict):
            raise self._fail(f"tensor {show(name)}: got {type(entry).__name__}, expected an object")
        if set(entry) != {"dtype", "shape", "data_offsets"}:
            raise self._fail(f"tensor {show(name)}: keys {show(sorted(entry))}, expected dtype, shape and data_offsets")
        dtype = entry["dtype"]
        if not isinstance(dtype, str) or dtype not in BITS:
            raise self._fail(f"tensor {show(name)}: dtype {show(dtype)} is unknown, expected one of {', '.join(BITS)}")
        shape = entry["shape"]
        # type(), not isinstance(): a bool is no size
        if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(type(d) is int for d in shape):
            raise self._fail(f"tensor {show(name)}: shape {show(shape)}, expected at most {MAX_DIMENSIONS} integers")
        if is_impossible(shape):
            raise self._fail(f"tensor {show(name)}: shape {shape} is impossible")
        offsets = entry["data_offsets"]
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(o) is int for o in offsets):
            raise self._fail(f"tensor {show(name)}: data_offsets {show(offsets)}, expected two integers")
        begin, end = offsets
        if not 0 <= begin <= end:
            raise self._fail(f"tensor {show(name)}: data_offsets [{begin}, {end}], expected 0 <= begin <= end")
        if end > data_size:
            raise self._fail(
                f"tensor {show(name)}: data_offsets [{begin}, {end}] end outside of the {data_size} data bytes"
            )
        bits = math.prod(shape) * BITS[dtype]
        if bits % 8 or bits // 8 != end - begin:
            raise self._fail(f"tensor {show(name)}: {end - begin} bytes, but {dtype} {shape} needs {bits / 8:g}")
        return TensorInfo(name, dtype, tuple(shape), begin, end)

    def _check_cover(self, tensors: dict[str, TensorInfo], data_size: int) -> None:
        covered = 0
        for info in sorted(tensors.values(), key=lambda info: (info.begin, info.end)):
            if info.begin != covered:
                what = "overlaps another tensor" if info.begin < covered else "leaves a hole before it"
                raise self._fail(f"tensor {show(info.name)}: data_offsets [{info.begin}, {info.end}]: {what}")
            covered = info.end
        if covered != data_size:
            raise self._fail(f"{data_size - covered} bytes after the last tensor belong to none")


def is_impossible(shape: Sequence[int]) -> bool:
    """A size that no data can have, or that would make a reader of no data take memory for it."""
    limit = MAX_EMPTY if 0 in shape else MAX_ELEMENTS
    return any(d < 0 for d in shape) or math.prod(max(d, 1) for d in shape) > limit


def parse_json(text: bytes, source: str) -> dict[str, Any]:
    """A JSON object, strictly: UTF-8, no duplicate keys, no NaN, no endless numbers, no endless depth."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in items:
            if key in result:
                raise FormatError(f"{source}: key {show(key)} appears twice in the JSON header")
            result[key] = value
        return result

    def integer(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            raise FormatError(f"{source}: a number of {len(digits)} digits in the JSON header")
        return int(digits)

    def constant(word: str) -> None:
        raise FormatError(f"{source}: {word} in the JSON header")

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=pairs, parse_int=integer, parse_constant=constant)
        if b"\\u" in text:  # a lone surrogate is no text, and nothing can write it: UnicodeEncodeError, a ValueError
            json.dumps(value, ensure_ascii=False).encode()
    except FormatError:
        raise
    except RecursionError:
        raise FormatError(f"{source}: the JSON header is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, UnicodeEncodeError
        raise FormatError(f"{source}: the JSON header can't be read: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(f"{source}: the JSON header is a {type(value).__name__}, expected an object")
    return value

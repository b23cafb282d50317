"""A GGUF file (versions 2 and 3, little endian) as a read-only memory map.

Nothing in it is believed: every count is checked against the bytes that are left before anything is read or kept, and
no memory is taken for a size that the file claims. Source of the layout: the GGUF specification of ggml.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .dtypes import RAW, Array
from .errors import FormatError
from .mapped import MappedFile, open_regular, size_of
from .safetensors_file import TensorInfo, is_impossible, show

NVFP4, NVFP4_VALUES, NVFP4_BYTES = "GGUF_NVFP4", 64, 36
ALIGNMENT = 32  # bytes, where the file doesn't say
MAX_NAME = 65536
MAX_DIMENSIONS = 4
STRING, ARRAY, UINT32 = 8, 9, 4
VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
MAX_DEPTH = 4  # of arrays in arrays

# Type number -> name, values a block, bytes a block. Plain types carry their safetensors name.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    28: ("F64", 1, 8), 30: ("BF16", 1, 2), 39: ("GGUF_MXFP4", 32, 17), 40: (NVFP4, NVFP4_VALUES, NVFP4_BYTES),
    2: ("GGUF_Q4_0", 32, 18), 3: ("GGUF_Q4_1", 32, 20), 6: ("GGUF_Q5_0", 32, 22), 7: ("GGUF_Q5_1", 32, 24),
    8: ("GGUF_Q8_0", 32, 34), 9: ("GGUF_Q8_1", 32, 40), 10: ("GGUF_Q2_K", 256, 84), 11: ("GGUF_Q3_K", 256, 110),
    12: ("GGUF_Q4_K", 256, 144), 13: ("GGUF_Q5_K", 256, 176), 14: ("GGUF_Q6_K", 256, 210), 15: ("GGUF_Q8_K", 256, 292),
    16: ("GGUF_IQ2_XXS", 256, 66), 17: ("GGUF_IQ2_XS", 256, 74), 18: ("GGUF_IQ3_XXS", 256, 98),
    19: ("GGUF_IQ1_S", 256, 50), 20: ("GGUF_IQ4_NL", 32, 18), 21: ("GGUF_IQ3_S", 256, 110),
    22: ("GGUF_IQ2_S", 256, 82), 23: ("GGUF_IQ4_XS", 256, 136), 29: ("GGUF_IQ1_M", 256, 56),
    34: ("GGUF_TQ1_0", 256, 54), 35: ("GGUF_TQ2_0", 256, 66), 41: ("GGUF_Q1_0", 128, 18),
}  # fmt: skip


class GGUFFile:
    """The tensors of one file. Raises FormatError, which names the file and the tensor."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with open_regular(self.path) as file:
                size = size_of(file, self.path)
                if size < 24:
                    raise FormatError(f"{self.path}: not a GGUF file: {size} bytes, expected at least 24")
                self._mapped = MappedFile(file, size, self.path)
        except OSError as error:
            raise FormatError(f"{self.path}: can't be read: {error}") from error
        self._parse(_Cursor(self._mapped.bytes, self._fail))

    def array(self, name: str) -> Array:
        """A view of the mapped file, no copy: plain types in their shape, others as the bytes of their blocks."""
        info = self.tensors[name]
        raw = self._mapped.view(info.begin, info.end)
        return raw.view(RAW[info.dtype]).reshape(info.shape) if info.dtype in RAW else raw

    def _fail(self, what: str) -> FormatError:
        return FormatError(f"{self.path}: {what}")

    def _parse(self, cursor: _Cursor) -> None:
        if bytes(cursor.take(4)) != b"GGUF":
            raise self._fail("not a GGUF file: the magic is missing")
        version = cursor.integer(4)
        if version not in (2, 3):
            raise self._fail(f"GGUF version {version}, expected 2 or 3 (little endian)")
        tensor_count, pair_count = cursor.integer(8), cursor.integer(8)
        self.alignment = ALIGNMENT
        # A count that is too large ends with the bytes: every entry takes some.
        for _ in range(pair_count):
            key = cursor.text("key")
            kind = cursor.integer(4)
            if key == "general.alignment":
                if kind != UINT32:
                    raise self._fail(f"general.alignment: type {kind}, expected uint32")
                self.alignment = cursor.integer(4)
                if self.alignment == 0 or self.alignment & (self.alignment - 1):
                    raise self._fail(f"general.alignment: got {self.alignment}, expected a power of two")
            else:
                cursor.skip_value(kind)
        entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        for _ in range(tensor_count):
            name = cursor.text("tensor name")
            if name in entries:
                raise self._fail(f"tensor {show(name)} appears twice")
            entries[name] = self._entry(name, cursor)
        start = -(-cursor.at // self.alignment) * self.alignment
        self.tensors = {name: self._place(name, start, entry) for name, entry in entries.items()}
        covered = 0
        for info in sorted(self.tensors.values(), key=lambda info: (info.begin, info.end)):
            if info.begin < covered and info.nbytes:
                raise self._fail(f"tensor {show(info.name)}: overlaps another tensor")
            covered = max(covered, info.end)

    def _entry(self, name: str, cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        dimensions = cursor.integer(4)
        if dimensions > MAX_DIMENSIONS:
            raise self._fail(f"tensor {show(name)}: {dimensions} axes, expected at most {MAX_DIMENSIONS}")
        shape = tuple(reversed([cursor.integer(8) for _ in range(dimensions)]))
        number, offset = cursor.integer(4), cursor.integer(8)
        if number not in TYPES:
            raise self._fail(f"tensor {show(name)}: type {number} is unknown")
        dtype, values, size = TYPES[number]
        if is_impossible(shape):
            raise self._fail(f"tensor {show(name)}: shape {list(shape)} is impossible")
        if values > 1 and (not shape or shape[-1] % values):
            raise self._fail(f"tensor {show(name)}: rows of {list(shape)}, but {dtype} holds {values} values a block")
        return dtype, shape, math.prod(shape) // values * size, offset

    def _place(self, name: str, start: int, entry: tuple[str, tuple[int, ...], int, int]) -> TensorInfo:
        dtype, shape, size, offset = entry
        if offset % self.alignment:
            raise self._fail(f"tensor {show(name)}: offset {offset} is no multiple of {self.alignment}")
        begin, held = start + offset, self._mapped.bytes.size
        if begin + size > held:
            raise self._fail(f"tensor {show(name)}: bytes [{begin}, {begin + size}] end outside of the file's {held}")
        return TensorInfo(name, dtype, shape, begin, begin + size)


class _Cursor:
    """Reads forward, never past the end."""

    def __init__(self, data: npt.NDArray[np.uint8], fail: Callable[[str], FormatError]) -> None:
        self.data, self.fail, self.at = data, fail, 0

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        self.skip(size)
        return self.data[self.at - size : self.at]

    def skip(self, size: int) -> None:
        if size > self.data.size - self.at:
            raise self.fail(f"truncated: {size} bytes at {self.at}, but only {self.data.size - self.at} are left")
        self.at += size

    def integer(self, size: int) -> int:
        return int.from_bytes(self.take(size).tobytes(), "little")

    def text(self, what: str) -> str:
        length = self.integer(8)
        if length > MAX_NAME:
            raise self.fail(f"{what} of {length} bytes at {self.at}, expected at most {MAX_NAME}")
        try:
            return self.take(length).tobytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} at {self.at} is no UTF-8: {error}") from error

    def skip_value(self, kind: int, depth: int = 0) -> None:
        if kind in VALUE_BYTES:
            self.skip(VALUE_BYTES[kind])
        elif kind == STRING:
            self.skip(self.integer(8))
        elif kind == ARRAY and depth < MAX_DEPTH:
            inner, count = self.integer(4), self.integer(8)
            if inner in VALUE_BYTES:
                self.skip(count * VALUE_BYTES[inner])
            else:
                for _ in range(count):
                    self.skip_value(inner, depth + 1)
        else:
            raise self.fail(f"value of type {kind} at {self.at} is unknown or nested too deeply")

"""The bytes of a TensorProto, checked against its shape before anything is made of them.

Layout: onnx.proto of IR version 11. raw_data is little-endian; FLOAT4E2M1 packs two elements a byte in flat order, the
first in the low nibble; int32_data holds one 8- or 16-bit pattern (or one such byte) an entry.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from fp4linear.files import FormatError
from fp4linear.files.safetensors_file import show

Bytes = npt.NDArray[np.uint8]

BITS: dict[int, int] = {
    TensorProto.FLOAT4E2M1: 4,
    TensorProto.FLOAT8E4M3FN: 8,
    TensorProto.UINT8: 8,
    TensorProto.FLOAT16: 16,
    TensorProto.BFLOAT16: 16,
    TensorProto.FLOAT: 32,
}
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def type_name(data_type: int) -> str:
    """FLOAT16 and the like; the number where onnx doesn't know it."""
    return TensorProto.DataType.Name(data_type) if data_type in TensorProto.DataType.values() else str(data_type)


def shape(tensor: TensorProto) -> tuple[int, ...]:
    """The shape of a tensor. FormatError for a negative dimension."""
    dims = tuple(tensor.dims)
    if any(dim < 0 for dim in dims):
        raise FormatError(f"{tensor.name!r}: got shape {list(dims)}, expected dimensions >= 0")
    return dims


def expect_type(tensor: TensorProto, what: str, *expected: int) -> None:
    """FormatError where the tensor is of another type."""
    if tensor.data_type not in expected:
        names = " or ".join(type_name(data_type) for data_type in expected)
        raise FormatError(f"{what} {tensor.name!r}: got {type_name(tensor.data_type)}, expected {names}")


def raw_bytes(tensor: TensorProto, folder: Path | None) -> Bytes:
    """The data of a tensor as flat bytes in the layout of raw_data.

    Args:
        tensor: of a type in BITS.
        folder: where external data may lie; None where none is allowed.

    Raises:
        FormatError: a type that isn't known, a size that doesn't fit the shape, external data outside of the folder.
    """
    expect_type(tensor, "tensor", *BITS)
    bits = BITS[tensor.data_type]
    size = -(-math.prod(shape(tensor)) * bits // 8)
    if tensor.HasField("segment"):
        raise FormatError(f"{tensor.name!r}: segmented tensors are not supported")
    if tensor.data_location == TensorProto.EXTERNAL:
        return _external(tensor, size, folder)
    if tensor.HasField("raw_data"):
        data = np.frombuffer(tensor.raw_data, np.uint8)
    elif tensor.data_type == TensorProto.FLOAT:
        data = np.asarray(tensor.float_data, "<f4").view(np.uint8)
    else:
        values = np.asarray(tensor.int32_data, np.int64)
        limit = 1 << max(bits, 8)
        # A negative entry is how some writers spell a byte with its high bit set.
        if values.size and not (-(limit // 2) <= values.min() and values.max() < limit):
            raise FormatError(f"{tensor.name!r}: int32_data holds values that do not fit {max(bits, 8)} bits")
        data = (values & (limit - 1)).astype("<u2" if bits == 16 else np.uint8).view(np.uint8)
    if data.size != size:
        raise FormatError(
            f"{tensor.name!r}: got {data.size} bytes of data, expected {size} for "
            f"{type_name(tensor.data_type)} {list(tensor.dims)}"
        )
    return data


def _external(tensor: TensorProto, size: int, folder: Path | None) -> Bytes:
    # protobuf gives strings that are not UTF-8 as bytes.
    entries = {entry.key: entry.value for entry in tensor.external_data if isinstance(entry.value, str)}
    location = entries.get("location", "")
    where = f"{tensor.name!r}: external data {show(location)}"
    if folder is None:
        raise FormatError(f"{where}: the model was given as an object, so folder= must say where its data lies")
    parts = location.replace("\\", "/").split("/")
    if not location or "\0" in location or ":" in location or parts[0] == "" or ".." in parts:
        raise FormatError(f"{where}: not a path below the model's folder")
    try:
        root = folder.resolve()
        path = (root / location).resolve()
        if not path.is_relative_to(root):
            raise FormatError(f"{where}: leads out of the model's folder")
        if not path.is_file():
            raise FormatError(f"{where}: no such file in {os.fspath(folder)!r}")
    except (OSError, RuntimeError) as error:  # a name that is too long, links in a circle
        raise FormatError(f"{where}: can't be found: {error}") from None
    offset = _number(entries.get("offset", "0"), where, "offset")
    length = _number(entries.get("length", str(size)), where, "length")
    if length != size:
        raise FormatError(
            f"{where}: got length {length}, expected {size} for {type_name(tensor.data_type)} {list(tensor.dims)}"
        )
    with open(path, "rb") as file:
        available = os.fstat(file.fileno()).st_size
        if offset + size > available:
            raise FormatError(f"{where}: got {available} bytes, expected {offset + size} (offset {offset} + {size})")
        file.seek(offset)
        data = np.fromfile(file, np.uint8, size)
    if data.size != size:
        raise FormatError(f"{where}: got {data.size} bytes, expected {size}")
    return data


def _number(text: str, where: str, what: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise FormatError(f"{where}: got {what} {text[:40]!r}, expected a number of bytes")
    return int(text)


def to_float32(tensor: TensorProto, folder: Path | None) -> npt.NDArray[np.float32]:
    """A FLOAT, FLOAT16 or BFLOAT16 tensor as fresh float32 of its shape; exact."""
    expect_type(tensor, "tensor", *FLOATS)
    data = raw_bytes(tensor, folder)
    if tensor.data_type == TensorProto.BFLOAT16:
        values: npt.NDArray[Any] = (data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        values = data.view("<f4" if tensor.data_type == TensorProto.FLOAT else "<f2").astype(np.float32)
    return values.reshape(shape(tensor))


def round_to(values: npt.NDArray[np.float32], data_type: int) -> npt.NDArray[np.float32]:
    """float32 values rounded to FLOAT16 or BFLOAT16 (nearest even) and back; FLOAT leaves them."""
    if data_type == TensorProto.FLOAT:
        return values
    if data_type == TensorProto.FLOAT16:
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    return (bfloat16_bits(values).astype(np.uint32) << np.uint32(16)).view(np.float32)


def bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """float32 rounded to nearest even bfloat16, as bit patterns; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)

"""The dtypes of safetensors, and what NumPy can make of them.

Source of the names: the `Dtype` enumeration of the safetensors format (0.8). NumPy has no FP8, FP4, FP6 or BF16: such
tensors are given as raw unsigned integers of the same width.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip

RAW: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_), "U8": np.dtype("u1"), "I8": np.dtype("i1"),
    "U16": np.dtype("<u2"), "I16": np.dtype("<i2"), "U32": np.dtype("<u4"), "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"), "I64": np.dtype("<i8"),
    "F4": np.dtype("u1"), "F6_E2M3": np.dtype("u1"), "F6_E3M2": np.dtype("u1"),
    "F8_E4M3": np.dtype("u1"), "F8_E5M2": np.dtype("u1"), "F8_E8M0": np.dtype("u1"),
    "F8_E4M3FNUZ": np.dtype("u1"), "F8_E5M2FNUZ": np.dtype("u1"),
    "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "F32": np.dtype("<f4"), "F64": np.dtype("<f8"),
    "C64": np.dtype("<c8"),
}  # fmt: skip

# Names of NumPy and ml_dtypes dtypes, for arrays that don't come from a file.
FROM_NUMPY: dict[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip

FLOATS = frozenset({"F16", "BF16", "F32"})  # what a weight, a bias or a global scale may be stored as


def raw_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the raw view: as stored, but for sub-byte dtypes bytes along the last axis (else flat)."""
    bits = BITS[dtype]
    if bits >= 8:
        return shape
    if bits == 4 and shape and shape[-1] % 2 == 0:
        return (*shape[:-1], shape[-1] // 2)
    return (math.prod(shape) * bits // 8,)


def to_float32(raw: Array, dtype: str) -> npt.NDArray[np.float32]:
    """A float tensor (F16, BF16, F32: all exact) as fresh, contiguous float32."""
    if dtype == "BF16":
        widened: npt.NDArray[np.uint32] = raw.astype(np.uint32) << np.uint32(16)
        return widened.view(np.float32)
    if dtype in FLOATS:
        return np.array(raw, dtype=np.float32, order="C")
    raise ValueError(f"dtype: got {dtype}, expected F16, BF16 or F32")

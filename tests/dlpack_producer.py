"""Hand-made DLPack producers: every field in the test's hands, and the deleter counted.

Structures as the DLPack specification lays them out (https://dmlc.github.io/dlpack/latest/c_api.html).
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
READ_ONLY = 1
TYPE_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
BFLOAT_CODE = 4


class DLDevice(ctypes.Structure):
    _fields_: ClassVar = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class DLDataType(ctypes.Structure):
    _fields_: ClassVar = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class DLTensor(ctypes.Structure):
    _fields_: ClassVar = [
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class DLManagedTensor(ctypes.Structure):
    _fields_: ClassVar = [("dl_tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class DLManagedTensorVersioned(ctypes.Structure):
    _fields_: ClassVar = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", DLTensor),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_api = ctypes.pythonapi
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_New", _api))
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))

_live: dict[int, Exported] = {}  # what a consumer still holds


class Exported:
    """One exported tensor: the memory of its structures, and how often its deleter ran."""

    def __init__(self, versioned: bool) -> None:
        self.deleted = 0
        self.kept: Any = None  # what the tensor points to
        self.managed: Any = DLManagedTensorVersioned() if versioned else DLManagedTensor()
        self.managed.deleter = ctypes.cast(_delete, ctypes.c_void_p).value
        self.address = ctypes.addressof(self.managed)
        _live[self.address] = self

    @property
    def tensor(self) -> DLTensor:
        return self.managed.dl_tensor


@_Deleter
def _delete(address: int) -> None:
    # The structures stay allocated (Exported holds them), so that a second call is counted, not undefined.
    _live[address].deleted += 1


@_Destructor
def _destroy_capsule(capsule: int) -> None:
    """As every producer must: a capsule that nobody consumed frees its tensor."""
    for name in (b"dltensor", b"dltensor_versioned"):
        if _is_valid(capsule, name):
            _delete(_get_pointer(capsule, name))


class Producer:
    """A DLPack producer of `array`'s memory. Any field can be overridden.

    versioned: the capsule's kind, or None for what the consumer asks by max_version. knows_max_version: False for a
    producer from before DLPack 1.0. null_strides: leave strides NULL (C order).
    """

    def __init__(
        self,
        array: NDArray,
        *,
        versioned: bool | None = None,
        knows_max_version: bool = True,
        null_strides: bool = False,
        flags: int = 0,
        byte_offset: int = 0,
        device: tuple[int, int] = (CPU, 0),
        dtype: tuple[int, int, int] | None = None,
        ndim: int | None = None,
        major: int = 1,
    ) -> None:
        self.array = array
        self.versioned = versioned
        self.knows_max_version = knows_max_version
        self.null_strides = null_strides
        self.flags = flags
        self.byte_offset = byte_offset
        self.device = device
        self.dtype = dtype
        self.ndim = ndim
        self.major = major
        self.exports: list[Exported] = []
        self.calls: list[dict[str, Any]] = []

    def capsule(self, versioned: bool) -> Any:
        exported = Exported(versioned)
        self.exports.append(exported)
        tensor, array = exported.tensor, self.array
        ndim = array.ndim if self.ndim is None else self.ndim
        tensor.data = array.__array_interface__["data"][0] - self.byte_offset
        tensor.byte_offset = self.byte_offset
        tensor.device = DLDevice(*self.device)
        tensor.ndim = ndim
        if self.dtype is not None:
            tensor.dtype = DLDataType(*self.dtype)
        elif array.dtype == ml_dtypes.bfloat16:
            tensor.dtype = DLDataType(BFLOAT_CODE, 16, 1)
        else:
            tensor.dtype = DLDataType(TYPE_CODES[array.dtype.kind], 8 * array.dtype.itemsize, 1)
        padded = [1] * max(ndim - array.ndim, 0)
        length = max(ndim, array.ndim)
        shape = (ctypes.c_int64 * length)(*padded, *array.shape)
        strides = (ctypes.c_int64 * length)(*padded, *(s // array.dtype.itemsize for s in array.strides))
        exported.kept = (shape, strides, array)
        tensor.shape = shape
        tensor.strides = None if self.null_strides else strides
        if versioned:
            exported.managed.major, exported.managed.minor = self.major, 0
            exported.managed.flags = self.flags
        return _new(
            exported.address,
            b"dltensor_versioned" if versioned else b"dltensor",
            ctypes.cast(_destroy_capsule, ctypes.c_void_p).value,
        )

    def __dlpack__(self, **arguments: Any) -> Any:
        self.calls.append(arguments)
        if "max_version" in arguments and not self.knows_max_version:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        asked = arguments.get("max_version")
        versioned = self.versioned if self.versioned is not None else asked is not None and asked[0] >= 1
        return self.capsule(versioned)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    @property
    def deletions(self) -> list[int]:
        """How often the deleter of each export ran: all 1 once nobody holds anything."""
        return [exported.deleted for exported in self.exports]


def values_of(result: Any) -> NDArray:
    """What a consumer gets back for a foreign array, as a NumPy array (bf16 as ml_dtypes)."""
    if isinstance(result, np.ndarray):
        return result
    capsule = result.__dlpack__()
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
    try:
        tensor = DLManagedTensor.from_address(pointer(capsule, b"dltensor")).dl_tensor
    except ValueError:
        tensor = DLManagedTensorVersioned.from_address(pointer(capsule, b"dltensor_versioned")).dl_tensor
    kinds = {(2, 16): np.float16, (2, 32): np.float32, (BFLOAT_CODE, 16): ml_dtypes.bfloat16}
    dtype = np.dtype(kinds[tensor.dtype.code, tensor.dtype.bits])
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    if tensor.strides:
        packed = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
        assert [tensor.strides[i] for i in range(tensor.ndim)] == packed or 0 in shape
    size = int(np.prod(shape)) * dtype.itemsize
    data = ctypes.string_at(tensor.data + tensor.byte_offset, size) if size else b""
    return np.frombuffer(data, dtype).reshape(shape).copy()

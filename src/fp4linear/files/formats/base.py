"""What a format is, and what formats share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import FormatError

if TYPE_CHECKING:
    from ..checkpoint import Tensors

BLOCK_SIZE = 16  # of every NVFP4 file format
PACKED = frozenset({"U8", "I8", "F4"})  # dtypes of two codes a byte
SCALES = frozenset({"F8_E4M3", "U8"})  # dtypes of E4M3 bytes


@dataclass(frozen=True)
class Parts:
    """A layer in the canonical form of `Fp4Linear`.

    b: uint8 [N, K/2], low nibble = even k; scales: uint8 [N, ceil(K/16)], E4M3 bytes; scale2: float32, 0-d or [N],
    multiplies; bias: float32 [N] or None. b and scales may be read-only views of the file.
    """

    b: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.uint8]
    scale2: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32] | None


class Format(ABC):
    """One way to store NVFP4 (or what looks like it). Layers are known by a prefix, X, of their tensors' names."""

    name: str
    weight_suffixes: tuple[str, ...]  # X + suffix is the tensor that a layer is found by

    def layer_of(self, tensor: str) -> str | None:
        """X where the tensor's name is X + one of the suffixes."""
        for suffix in self.weight_suffixes:
            if tensor.endswith(suffix) and len(tensor) > len(suffix):
                return tensor[: len(tensor) - len(suffix)]
        return None

    @abstractmethod
    def claims(self, tensors: Tensors, layer: str) -> bool:
        """True where the layer's tensors are of this format, readable or not."""

    @abstractmethod
    def unsupported(self, tensors: Tensors, layer: str, chosen: bool) -> str | None:
        """Why a claimed layer can't be read, or None. chosen: the caller named this format."""

    def read(self, tensors: Tensors, layer: str) -> Parts:
        """The layer, where `unsupported` gave None."""
        raise FormatError(f"{tensors.source}: layer {layer!r}: {self.name} can't be read")


class Refused(Format):
    """A format that is recognised and not supported."""

    reason: str

    def unsupported(self, tensors: Tensors, layer: str, chosen: bool) -> str | None:
        return self.reason


def dtype_of(tensors: Tensors, name: str) -> str | None:
    """The dtype, or None where there is no such tensor."""
    return tensors.info(name).dtype if name in tensors else None


def packed_shape(tensors: Tensors, name: str) -> tuple[int, ...]:
    """The shape of a packed weight in bytes, [N, K/2]; an F4 tensor counts codes instead."""
    info = tensors.info(name)
    if info.dtype == "F4" and info.shape:
        return (*info.shape[:-1], info.shape[-1] // 2)
    return info.shape


def plain_scale_shape(n: int, half_k: int) -> tuple[int, int]:
    return n, -(-2 * half_k // BLOCK_SIZE)


def padded_scale_shape(n: int, half_k: int) -> tuple[int, int]:
    """The shape of scales in the 128x4 swizzle."""
    blocks = plain_scale_shape(n, half_k)[1]
    return -(-n // 128) * 128, -(-blocks // 4) * 4


def check_packed(tensors: Tensors, weight: str, scales: str) -> str | None:
    """Why a packed weight and its row-major scales don't fit each other, or None."""
    info = tensors.info(weight)
    if info.dtype == "F4" and info.shape and info.shape[-1] % 2:
        return f"{weight} is F4 {list(info.shape)}: an odd number of codes a row"
    n, half_k = packed_shape(tensors, weight)
    got, expected = tensors.info(scales).shape, plain_scale_shape(n, half_k)
    if got == expected:
        return None
    if got == padded_scale_shape(n, half_k):
        return f"{scales} is {list(got)}, padded to 128x4: swizzled scales are not supported, expected {list(expected)}"
    return f"{scales} is {list(got)}, expected {list(expected)} for {weight} of {list(info.shape)}"


def read_codes(tensors: Tensors, name: str) -> npt.NDArray[np.uint8]:
    codes: npt.NDArray[np.uint8] = tensors.array(name).view(np.uint8)
    return codes


def read_global(tensors: Tensors, name: str, out_features: int) -> npt.NDArray[np.float32]:
    """A global factor as float32, 0-d or [N]. FormatError for other sizes and values that aren't finite."""
    values = tensors.floats(name)
    if values.size == 1:
        values = values.reshape(())
    elif values.shape != (out_features,):
        raise FormatError(
            f"{tensors.source}: tensor {name!r}: shape {list(values.shape)}, expected one factor or [{out_features}]"
        )
    if not np.isfinite(values).all():
        bad = float(values[~np.isfinite(values)].flat[0]) if values.ndim else float(values)
        raise FormatError(f"{tensors.source}: tensor {name!r}: got {bad}, expected a finite factor")
    return values


def read_bias(tensors: Tensors, layer: str, out_features: int) -> npt.NDArray[np.float32] | None:
    """X.bias as float32, or None where there is none."""
    name = layer + ".bias"
    if name not in tensors:
        return None
    bias = tensors.floats(name)
    if bias.shape != (out_features,):
        raise FormatError(f"{tensors.source}: tensor {name!r}: shape {list(bias.shape)}, expected [{out_features}]")
    return bias

"""What a format is, and what formats share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ..errors import FormatError
from ..safetensors_file import parse_json

if TYPE_CHECKING:
    from ..checkpoint import Tensors

BLOCK_SIZE = 16  # of every NVFP4 file format
MAX_MARK_BYTES = 100_000  # a mark of one layer is a line
PACKED = frozenset({"U8", "I8", "F4"})  # dtypes of two codes a byte
SCALES = frozenset({"F8_E4M3", "U8"})  # dtypes of E4M3 bytes


@dataclass(frozen=True)
class Parts:
    """A layer in the canonical form of `Fp4Linear`.

    b: uint8 [N, K/2], low nibble = even k; scales: uint8 [N, ceil(K/16)], E4M3 bytes; scale2: float32, 0-d or [N],
    multiplies; bias: float32 [N] or None. b and scales may be read-only views of the file. pre_quant_scale: float32 [K]
    that multiplies x before the layer (AWQ), or None.
    """

    b: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.uint8]
    scale2: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32] | None
    pre_quant_scale: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Asked:
    """What a caller said where tensors leave a doubt; None is nothing.

    format: a format's name; swizzled: block scales lie in the 128x4 layout; nibbles: which one holds the even k.
    """

    format: str | None = None
    swizzled: bool | None = None
    nibbles: Literal["low", "high"] | None = None


NOTHING = Asked()


class Format(ABC):
    """One way to store NVFP4 (or what looks like it). Layers are known by a prefix, X, of their tensors' names."""

    name: str
    weight_suffixes: tuple[str, ...]  # X + suffix is the tensor that a layer is found by
    suffixes: tuple[str, ...] = ()  # X + suffix: all other tensors that belong to the layer's weight
    input_scale: tuple[str, bool] | None = None  # suffix of the activations' global scale; whether it divides
    options: tuple[str, ...] = ()  # of swizzled and nibbles, those that mean something here

    def layer_of(self, tensor: str) -> str | None:
        """X where the tensor's name is X + one of the suffixes."""
        for suffix in self.weight_suffixes:
            if tensor.endswith(suffix) and len(tensor) > len(suffix):
                return tensor[: len(tensor) - len(suffix)]
        return None

    def layers_of(self, tensors: Tensors, tensor: str) -> Iterator[str]:
        """The layers that the tensor is the weight of and that this format claims."""
        layer = self.layer_of(tensor)
        if layer is not None and self.claims(tensors, layer):
            yield layer

    def place_of(self, tensors: Tensors, layer: str) -> tuple[str, int | None]:
        """The name that the layer's tensors begin with, and its index where they are a stack of layers."""
        return layer, None

    @abstractmethod
    def claims(self, tensors: Tensors, layer: str) -> bool:
        """True where the layer's tensors are of this format, readable or not."""

    def accepts(self, tensors: Tensors, layer: str) -> bool:
        """True where the tensors may be of this format if the caller says so."""
        return self.claims(tensors, layer)

    @abstractmethod
    def unsupported(self, tensors: Tensors, layer: str, asked: Asked) -> str | None:
        """Why a claimed layer can't be read, or None."""

    @abstractmethod
    def shape(self, tensors: Tensors, layer: str) -> tuple[int, int] | None:
        """(out_features, in_features) of a claimed layer, None where the tensors don't tell."""

    @abstractmethod
    def read(self, tensors: Tensors, layer: str, asked: Asked) -> Parts:
        """The layer, where `unsupported` gave None."""

    def tensors_of(self, tensors: Tensors, layer: str) -> list[str]:
        """The names of the tensors that make up the layer's weight; bias and activation scales are not among them."""
        return [layer + suffix for suffix in (*self.weight_suffixes, *self.suffixes) if layer + suffix in tensors]


class Refused(Format):
    """A format that is recognised and not supported."""

    reason: str

    def unsupported(self, tensors: Tensors, layer: str, asked: Asked) -> str | None:
        return self.reason

    def shape(self, tensors: Tensors, layer: str) -> tuple[int, int] | None:
        return None

    def read(self, tensors: Tensors, layer: str, asked: Asked) -> Parts:
        raise FormatError(f"{tensors.source}: layer {layer!r}: {self.name} can't be read")


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


def swizzled_scale_shape(n: int, half_k: int) -> tuple[int, int]:
    """The shape that torchao gives to the same bytes: tiles of 32 rows by 16 bytes."""
    rows, blocks = padded_scale_shape(n, half_k)
    return rows // 4, blocks * 4


def check_codes(tensors: Tensors, weight: str) -> str | None:
    """Why a packed weight can't be one, or None."""
    info = tensors.info(weight)
    if len(info.shape) != 2:
        return f"{weight} is {list(info.shape)}, expected two axes"
    if info.dtype == "F4" and info.shape[-1] % 2:
        return f"{weight} is F4 {list(info.shape)}: an odd number of codes a row"
    return None


def check_scales(tensors: Tensors, weight: str, scales: str, *expected: tuple[int, int]) -> str | None:
    """Why block scales have none of the shapes expected, or None."""
    got = tensors.info(scales).shape
    if got in expected:
        return None
    shapes = " or ".join(str(list(shape)) for shape in dict.fromkeys(expected))
    return f"{scales} is {list(got)}, expected {shapes} for {weight} of {list(tensors.info(weight).shape)}"


def check_packed(tensors: Tensors, weight: str, scales: str) -> str | None:
    """Why a packed weight and its row-major scales don't fit each other, or None."""
    if problem := check_codes(tensors, weight):
        return problem
    n, half_k = packed_shape(tensors, weight)
    return check_scales(tensors, weight, scales, plain_scale_shape(n, half_k))


def read_scales(tensors: Tensors, name: str, n: int, half_k: int, *, swizzled: bool) -> npt.NDArray[np.uint8]:
    """Block scales [n, ceil(K/16)] from the 128x4 layout, whatever shape its bytes are given, or from rows.

    Rows and blocks beyond n and K, which some formats pad with, are cut off.
    """
    raw = read_codes(tensors, name)
    rows, blocks = plain_scale_shape(n, half_k)
    if not swizzled:
        return raw[:rows, :blocks]
    from fp4linear import _core

    plain: npt.NDArray[np.uint8] = np.asarray(
        _core.unswizzle_scales(np.ascontiguousarray(raw).reshape(-1), rows, blocks)
    )
    return plain


def swap_nibbles(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The other order of nibbles."""
    return (codes << np.uint8(4)) | (codes >> np.uint8(4))


def read_amax(tensors: Tensors, name: str, out_features: int, largest: float = 6.0 * 448.0) -> npt.NDArray[np.float32]:
    """The factor that belongs to a stored amax: amax / largest, rounded once."""
    amax = read_global(tensors, name, out_features)
    return np.asarray((amax.astype(np.float64) / largest).astype(np.float32))


def json_tensor(tensors: Tensors, name: str) -> dict[str, Any]:
    """A tensor of UTF-8 bytes as a JSON object, empty where it isn't one."""
    if name not in tensors or tensors.info(name).dtype not in ("U8", "I8"):
        return {}
    if tensors.info(name).nbytes > MAX_MARK_BYTES:
        return {}
    return json_object(tensors.array(name).tobytes(), tensors.source)


def json_object(text: bytes, source: str) -> dict[str, Any]:
    """A JSON object, empty where the text isn't one: a mark that can't be read tells nothing."""
    try:
        return parse_json(text, source)
    except FormatError:
        return {}


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

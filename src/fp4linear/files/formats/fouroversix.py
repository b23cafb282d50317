"""FourOverSix: X.quantized_weight_values [rows, columns/2], _scale_factors (swizzled), _amax, _metadata (shapes).

The factor is amax over the product of the largest code and the largest scale that the rule for choosing scales allows,
and no tensor names the rule. The block that holds amax shows it: under static rules its scale is 448, the largest of
all, and its largest code 6 or 4; where every block chose between 4 and 6 its scale is 256 or 384, and that of any other
block at most 384.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .base import (
    Asked,
    Format,
    Parts,
    dtype_of,
    plain_scale_shape,
    read_amax,
    read_bias,
    read_codes,
    read_scales,
)

if TYPE_CHECKING:
    from ..checkpoint import Tensors

VALUES, FACTORS = ".quantized_weight_values", ".quantized_weight_scale_factors"
AMAX, METADATA = ".quantized_weight_amax", ".quantized_weight_metadata"
ROWS, COLUMNS = 128, 64  # that shapes are padded to
LOOK_ALIKES = ("if", "nvint", "mx", "nvfp4_bs", "nvfp3", "nvfp6")
E4M3_256, E4M3_384, E4M3_448 = 0x78, 0x7C, 0x7E


class FourOverSix(Format):
    name = "fouroversix"
    weight_suffixes = (VALUES,)
    suffixes = (FACTORS, AMAX, METADATA)

    def claims(self, tensors: Tensors, layer: str) -> bool:
        return dtype_of(tensors, layer + VALUES) == "U8" and dtype_of(tensors, layer + FACTORS) in ("F8_E4M3", "U8")

    def unsupported(self, tensors: Tensors, layer: str, asked: Asked) -> str | None:
        for key in ("weight_dtype", "dtype"):
            # Integer codes in the same bytes show in no tensor.
            kind = tensors.quantization_config().get(key)
            if isinstance(kind, str) and kind.startswith(LOOK_ALIKES):
                return f"config.json says {key} {kind[:20]!r}, which is not NVFP4"
        if layer + AMAX not in tensors:
            return f"there is no {layer}{AMAX}, from which the global factor follows"
        info = tensors.info(layer + VALUES)
        if len(info.shape) != 2:
            return f"{layer}{VALUES} is {list(info.shape)}, expected two axes"
        shapes = shapes_of(tensors, layer)
        if shapes is None:
            return f"{layer}{METADATA} doesn't hold the shapes of {layer}{VALUES}, {list(info.shape)}, and its original"
        rows, half = info.shape
        expected = -(-rows // 128) * 128 * (-(-2 * half // 64) * 4)
        got = tensors.info(layer + FACTORS)
        if got.nbytes != expected or rows % ROWS or 2 * half % COLUMNS:
            return (
                f"{layer}{FACTORS} is {got}, expected {expected} bytes for {list(info.shape)} padded to "
                f"{ROWS} rows and {COLUMNS} columns: another block size, or scales that aren't swizzled"
            )
        if (read_codes(tensors, layer + FACTORS) & 0x80).any():
            return "IF4: signs of its scales choose integer codes for some blocks, which is not NVFP4"
        return (
            None
            if divisor(tensors, layer)
            else (
                "no block holds the largest scale of a known rule (256, 384 or 448), so that the factor that belongs "
                "to its amax is unknown"
            )
        )

    def shape(self, tensors: Tensors, layer: str) -> tuple[int, int] | None:
        return shapes_of(tensors, layer)

    def read(self, tensors: Tensors, layer: str, asked: Asked) -> Parts:
        n, k = shapes_of(tensors, layer) or (0, 0)
        stored = read_codes(tensors, layer + VALUES)
        scales = read_scales(tensors, layer + FACTORS, *stored.shape, swizzled=True)[:n, : -(-k // 16)]
        scale2 = read_amax(tensors, layer + AMAX, n, divisor(tensors, layer) or 1.0)
        return Parts(stored[:n, : k // 2], scales, scale2, read_bias(tensors, layer, n))


def shapes_of(tensors: Tensors, layer: str) -> tuple[int, int] | None:
    """(N, K) before padding by the metadata tensor [N, K, padded N, padded K]; None where it makes no sense."""
    stored = tensors.info(layer + VALUES).shape
    if len(stored) != 2:
        return None
    if layer + METADATA not in tensors:
        return stored[0], 2 * stored[1]
    if tensors.info(layer + METADATA).dtype not in ("I32", "I64"):
        return None
    sizes = [int(size) for size in tensors.array(layer + METADATA).reshape(-1)[:5]]
    if len(sizes) != 4 or tuple(sizes[2:]) != (stored[0], 2 * stored[1]):
        return None
    n, k = sizes[:2]
    inside = sizes[2] - ROWS < n <= sizes[2] and sizes[3] - COLUMNS < k <= sizes[3]
    return (n, k) if inside and n >= 0 and k >= 0 and k % 2 == 0 else None


def divisor(tensors: Tensors, layer: str) -> float | None:
    """What amax is divided by, found from the largest scale; None where no rule fits. 1 for a weight of zeros."""
    factors = read_codes(tensors, layer + FACTORS).reshape(-1)
    largest = int(factors.max(initial=0))
    if E4M3_256 <= largest <= E4M3_384 and ((factors == E4M3_256) | (factors == E4M3_384)).any():
        return 6.0 * 256.0
    if largest == E4M3_448:
        return largest_code(tensors, layer, E4M3_448) * 448.0
    return 1.0 if largest == 0 else None


def largest_code(tensors: Tensors, layer: str, scale: int) -> float:
    """6 or 4: the largest value that blocks of this scale hold."""
    stored = read_codes(tensors, layer + VALUES)
    scales = read_scales(tensors, layer + FACTORS, *stored.shape, swizzled=True)
    rows, blocks = np.nonzero(scales == scale)
    columns = stored.reshape(stored.shape[0], plain_scale_shape(*stored.shape)[1], 8)
    codes: npt.NDArray[np.uint8] = columns[rows, blocks]
    return 6.0 if ((codes & 7) == 7).any() or ((codes >> 4 & 7) == 7).any() else 4.0

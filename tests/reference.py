"""The NVFP4 linear layer in float64, from the format's definition. Shares no code with the package."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


def _small_float(byte: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """Value of a sign / exponent / mantissa byte without special values (OCP MX v1.0 5.3, OFP8 v1.0)."""
    sign = -1.0 if byte >> (exponent_bits + mantissa_bits) else 1.0
    exponent = byte >> mantissa_bits & ((1 << exponent_bits) - 1)
    fraction = (byte & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias)
    return sign * (1.0 + fraction) * 2.0 ** (exponent - bias)


E2M1 = np.array([_small_float(code, 2, 1, 1) for code in range(16)])
E4M3 = np.array([np.nan if byte & 0x7F == 0x7F else _small_float(byte, 4, 3, 7) for byte in range(256)])


class Expected(NamedTuple):
    """What a forward must give: y before its one rounding, and the magnitude that bounds the error of the sums."""

    y: NDArray[np.float64]
    magnitude: NDArray[np.float64]  # sum over k of |x w|, with scale2


def codes(b: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[..., K/2] packed bytes -> [..., K] codes, low nibble first."""
    b = np.asarray(b, np.uint8)
    return np.stack([b & 15, b >> 4], axis=-1).reshape(*b.shape[:-1], 2 * b.shape[-1])


def pack(code: NDArray[np.integer]) -> NDArray[np.uint8]:
    """[..., K] codes -> [..., K/2] packed bytes."""
    code = np.asarray(code, np.uint8)
    return code[..., 0::2] | code[..., 1::2] << 4


def products(
    b: NDArray[np.uint8], scales: NDArray[np.uint8], block_size: int = 16, nan_scales: str = "propagate"
) -> NDArray[np.float64]:
    """[N, K] e2m1 * e4m3, without scale2."""
    elements = E2M1[codes(b)]
    block = np.arange(elements.shape[1]) // block_size
    factors = E4M3[np.asarray(scales).view(np.uint8)][:, block]
    if nan_scales == "zero":
        factors = np.where(np.isnan(factors), 0.0, factors)
    with np.errstate(invalid="ignore"):
        return elements * factors


def dequantize(b: NDArray, scales: NDArray, scale2: object, block_size: int = 16) -> NDArray[np.float64]:
    """[N, K] weight. scale2: one fp32 factor or one a row."""
    factor = np.asarray(np.asarray(scale2, np.float32), np.float64).reshape(-1, 1)
    return products(b, scales, block_size) * factor


def linear(
    x: NDArray,
    b: NDArray,
    scales: NDArray,
    scale2: object,
    bias: NDArray | None = None,
    *,
    block_size: int = 16,
    nan_scales: str = "propagate",
) -> Expected:
    """y = scale2 * sum(x * e2m1 * e4m3) + bias in float64. x: [..., K] of any real type."""
    x64 = np.asarray(x).astype(np.float64)
    w = products(b, scales, block_size, nan_scales)
    factor = np.asarray(np.asarray(scale2, np.float32), np.float64).reshape(-1)
    lead = x64.shape[:-1]
    rows = x64.reshape(int(np.prod(lead)), x64.shape[-1])
    with np.errstate(invalid="ignore", over="ignore"):
        y = (rows @ w.T) * factor
        magnitude = (np.abs(rows) @ np.abs(w).T) * np.abs(factor)
        if bias is not None:
            y = y + np.asarray(bias).astype(np.float64)
    return Expected(y.reshape(*lead, w.shape[0]), magnitude.reshape(*lead, w.shape[0]))


def swizzle_offset(row: int, block: int, blocks: int) -> int:
    """Byte offset in the 128x4 layout, as published for cuBLAS's 1D block scaling."""
    atoms = -(-blocks // 4)
    return ((row // 128) * atoms + block // 4) * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + block % 4


def make(n: int, k: int, seed: int, low: int = 0x20, high: int = 0x58) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The (b, scales) that the published case numbers were computed with: order and types of the draws matter."""
    random = np.random.default_rng(seed)
    b = random.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scales = random.integers(low, high + 1, (n, k // 16), dtype=np.uint8)
    return b, scales


def x_of(m: int, k: int, seed: int) -> NDArray[np.float16]:
    """The activations of the published case numbers."""
    return np.random.default_rng(seed).standard_normal((m, k)).astype(np.float16)

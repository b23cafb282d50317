"""The definition of an NVFP4 linear layer in float64 NumPy: slow, obvious, and what every path is checked against."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float64)


def _e4m3_value(byte: int) -> float:
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 0xF, byte & 0x7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return float(sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = np.array([_e4m3_value(byte) for byte in range(256)], np.float64)


def reference_weight(b: Any, scales: Any, scale2: Any, *, block_size: int = 16) -> npt.NDArray[np.float64]:
    """Weight of an NVFP4 layer in float64.

    Args:
        b: [N, K/2] bytes, two E2M1 codes each, the even k in the low nibble.
        scales: [N, ceil(K/block_size)] E4M3 bytes (uint8 or float8_e4m3fn).
        scale2: global scale, one number or [N]; taken as float32.
        block_size: values of K that share a scale.

    Returns:
        float64 [N, K]. The formats are those of OCP Microscaling Formats v1.0 (E2M1) and OCP 8-bit Floating Point (E4M3).
    """
    codes = np.asarray(b).view(np.uint8)
    scale_bytes = np.asarray(scales).view(np.uint8)
    n, k = codes.shape[0], 2 * codes.shape[1]
    weight = np.empty((n, k), np.float64)
    weight[:, 0::2] = E2M1[codes & 0xF]
    weight[:, 1::2] = E2M1[codes >> 4]
    scale_of_k = E4M3[scale_bytes][:, np.arange(k) // block_size]
    factor = np.asarray(scale2, np.float32).astype(np.float64)
    return weight * scale_of_k * (factor.reshape(-1, 1) if factor.ndim else factor)


def reference(
    x: Any, b: Any, scales: Any, scale2: Any, bias: Any = None, *, block_size: int = 16
) -> npt.NDArray[np.float64]:
    """y = x @ W.T + bias in float64, the answer that every path must round to.

    Args:
        x: [..., K], any NumPy-compatible float array.
        b, scales, scale2, block_size: see reference_weight().
        bias: [N] or None.

    Returns:
        float64 [..., N].
    """
    weight = reference_weight(b, scales, scale2, block_size=block_size)
    y: npt.NDArray[np.float64] = np.asarray(x).astype(np.float64) @ weight.T
    if bias is not None:
        y = y + np.asarray(bias).astype(np.float64)
    return y

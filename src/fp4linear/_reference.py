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
        float64 [N, K], NaN where a scale is. Formats: OCP Microscaling Formats v1.0 (E2M1), OCP 8-bit
        Floating Point (E4M3).

    Raises:
        TypeError, ValueError: as Fp4Linear does, naming the argument.
    """
    codes = _packed_codes(b)
    n, k = codes.shape[0], 2 * codes.shape[1]
    scale_bytes = _scale_bytes(scales, n, k, block_size)
    factor = _global_scale(scale2, n)
    weight = np.empty((n, k), np.float64)
    weight[:, 0::2] = E2M1[codes & 0xF]
    weight[:, 1::2] = E2M1[codes >> 4]
    scale_of_k = E4M3[scale_bytes][:, np.arange(k) // block_size]
    return weight * scale_of_k * (factor.reshape(-1, 1) if factor.ndim else factor)


def _packed_codes(b: Any) -> npt.NDArray[np.uint8]:
    array = np.asarray(b)
    if array.ndim != 2:
        raise ValueError(f"b: expected shape [N, K/2], got {list(array.shape)}")
    if array.dtype.name == "float4_e2m1fn":  # ml_dtypes keeps one code a byte
        if array.shape[1] % 2:
            raise ValueError(f"b: K must be even (two codes a byte), got shape {list(array.shape)}")
        codes: npt.NDArray[np.uint8] = np.ascontiguousarray(array).view(np.uint8)
        return ((codes[:, 0::2] & 0xF) | (codes[:, 1::2] << 4)).astype(np.uint8)
    if array.dtype not in (np.uint8, np.int8):
        raise TypeError(f"b: expected uint8 (two E2M1 codes a byte), int8 or float4_e2m1, got {array.dtype}")
    return array.view(np.uint8)


def _scale_bytes(scales: Any, n: int, k: int, block_size: int) -> npt.NDArray[np.uint8]:
    if block_size < 1:
        raise ValueError(f"block_size: expected a number >= 1, got {block_size}")
    array = np.asarray(scales)
    if array.dtype.name not in ("uint8", "float8_e4m3fn"):
        raise TypeError(f"scales: expected raw E4M3 bytes, uint8 or float8_e4m3fn, got {array.dtype}")
    blocks = -(-k // block_size)
    if array.shape != (n, blocks):
        raise ValueError(f"scales: expected shape [{n}, {blocks}], got {list(array.shape)}")
    return array.view(np.uint8)


def _global_scale(scale2: Any, n: int) -> npt.NDArray[np.float64]:
    factor = np.asarray(scale2)
    if factor.dtype.kind not in "fiuV" or isinstance(scale2, bool):
        raise TypeError(f"scale2: expected a number, or a float array of 1 or N elements, got {factor.dtype}")
    if factor.size == 1 and factor.ndim <= 1:
        factor = factor.reshape(())
    elif factor.shape != (n,):
        raise ValueError(f"scale2: expected 1 element or shape [{n}], got {list(factor.shape)}")
    return factor.astype(np.float32).astype(np.float64)


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

    Example:
        >>> import numpy as np, fp4linear
        >>> b, scales = np.array([[0x42, 0x08]], np.uint8), np.array([[0x40]], np.uint8)  # 1, 2, -0, 0; scale 2
        >>> fp4linear.reference([1.0, 1.0, 1.0, 1.0], b, scales, 0.5)
        array([3.])
    """
    weight = reference_weight(b, scales, scale2, block_size=block_size)
    activations = np.asarray(x)
    if activations.ndim == 0 or activations.shape[-1] != weight.shape[1]:
        raise ValueError(f"x: expected shape [..., {weight.shape[1]}], got {list(activations.shape)}")
    if bias is not None and np.shape(bias) != (weight.shape[0],):
        raise ValueError(f"bias: expected shape [{weight.shape[0]}], got {list(np.shape(bias))}")
    y: npt.NDArray[np.float64] = activations.astype(np.float64) @ weight.T
    if bias is not None:
        y = y + np.asarray(bias).astype(np.float64)
    return y

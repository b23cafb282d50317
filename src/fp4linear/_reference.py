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

    Raises:
        TypeError, ValueError: as Fp4Linear does, naming the argument.

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


def _nearest_even(values: npt.NDArray[np.float64], table: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """Index of the nearest of ascending non-negative numbers, the even index where two are as near; saturates."""
    even_first = np.concatenate([np.arange(0, len(table), 2), np.arange(1, len(table), 2)])
    distance = np.abs(np.minimum(values, table[-1])[..., None] - table[even_first])
    nearest: npt.NDArray[np.uint8] = even_first[distance.argmin(-1)].astype(np.uint8)
    return nearest


def _input_global_scale(x: npt.NDArray[np.float64], input_scale: Any, input_global_scale: Any) -> float:
    if input_scale is not None and input_global_scale is not None:
        raise ValueError("input_scale and input_global_scale: expected at most one of both; each is 1 / the other")
    with np.errstate(over="ignore", divide="ignore"):
        if input_scale is not None:
            g = float(np.float32(1) / np.float32(input_scale))
        elif isinstance(input_global_scale, str) and input_global_scale == "dynamic":
            amax = np.abs(x[np.isfinite(x)]).max(initial=0.0)
            g = float(min(np.float32(2688) / np.float32(amax), np.finfo(np.float32).max)) if amax else 1.0
        else:
            g = 1.0 if input_global_scale is None else float(np.float32(input_global_scale))
    if not (0 < g < np.inf):
        raise ValueError(f"the global scale of x: expected a finite number > 0 in float32, got {g}")
    return g


def reference_activations(
    x: Any, *, input_scale: Any = None, input_global_scale: Any = None
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], float]:
    """What quantize_activations() does, in float64, where x * g is exact and so no rounding comes before the right one.

    Args:
        x: [..., K], float16, bfloat16 or float32 values.
        input_scale, input_global_scale: see Fp4Linear.

    Returns:
        (codes uint8 [..., K], one a byte; scales uint8 [..., ceil(K/16)]; g).
    """
    values = np.asarray(x).astype(np.float64)
    g = _input_global_scale(values, input_scale, input_global_scale)
    k = values.shape[-1]
    blocks = -(-k // 16)
    padded = np.zeros((*values.shape[:-1], 16 * blocks))
    padded[..., :k] = values * g
    scaled = padded.reshape(*values.shape[:-1], blocks, 16)
    finite: npt.NDArray[np.bool_] = np.asarray(np.isfinite(scaled).all(-1))
    scaled = np.where(finite[..., None], scaled, 0.0)
    scales = _nearest_even(np.abs(scaled).max(-1, initial=0.0) / 6, E4M3[:127])
    divisor = np.where(scales == 0, 1.0, E4M3[scales])[..., None]
    codes = _nearest_even(np.abs(scaled) / divisor, E2M1[:8]) | np.where(np.signbit(scaled), 8, 0).astype(np.uint8)
    codes[(scales == 0) | ~finite] = 0
    scales[~finite] = 0x7F
    return codes.reshape(padded.shape)[..., :k], scales, g


def reference_native(
    x: Any,
    b: Any,
    scales: Any,
    scale2: Any,
    bias: Any = None,
    *,
    input_scale: Any = None,
    input_global_scale: Any = None,
) -> npt.NDArray[np.float64]:
    """y of the native paths in float64: x is quantised to NVFP4 (exactly as they do), and nothing else is rounded.

    Args:
        x: [..., K], float16, bfloat16 or float32 values.
        b, scales, scale2: see reference_weight(); block_size is 16.
        bias: [N] or None.
        input_scale: global scale of x that divides it (ModelOpt: amax / 2688).
        input_global_scale: the same as a factor (2688 / amax), or "dynamic": that of this x. By default 1.

    Returns:
        float64 [..., N]: e2m1 * e4m3 of x times the weight, / g, + bias. NaN in rows of x with an infinity or a NaN.

    Raises:
        TypeError, ValueError: as reference() does; ValueError for a global scale of x that is given twice, or is not a
            finite number > 0.

    Example:
        >>> import numpy as np, fp4linear
        >>> b, scales = np.array([[0x22, 0x22]], np.uint8), np.array([[0x38]], np.uint8)  # 1, 1, 1, 1
        >>> x = np.array([6.0, 0.0, 0.0, 2.4], np.float32)  # 2.4 becomes 2
        >>> fp4linear.reference_native(x, b, scales, 1.0)
        array([8.])
    """
    activations = np.asarray(x)
    if activations.ndim == 0:
        raise ValueError("x: expected shape [..., K], got []")
    codes, x_scales, g = reference_activations(x, input_scale=input_scale, input_global_scale=input_global_scale)
    quantised = E2M1[codes] * np.repeat(E4M3[x_scales], 16, axis=-1)[..., : codes.shape[-1]]
    return reference(quantised / g, b, scales, scale2, bias)

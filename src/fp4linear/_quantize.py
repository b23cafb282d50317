"""Float weights to NVFP4 and back."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fp4linear import _core

Method = Literal["max_abs", "four_over_six", "mse"]


class Quantized(NamedTuple):
    """An NVFP4 weight: what `Fp4Linear(*q)` takes."""

    b: npt.NDArray[np.uint8]
    """[N, K/2], two E2M1 codes a byte, the even k in the low nibble."""
    scales: npt.NDArray[np.uint8]
    """[N, ceil(K/16)], E4M3 bytes."""
    scale2: npt.NDArray[np.float32]
    """The global scale, 0-d; multiplies."""


def quantize(w: Any, *, method: Method = "max_abs", scale2: float | None = None) -> Quantized:
    """Quantise a float weight to NVFP4 in blocks of 16 along K.

    The formula of every method is in docs/numerics.md, Quantising.

    Args:
        w: [N, K] float16, bfloat16, float32 or float64 of any array library, finite; K even.
        method: "max_abs" maps a block's greatest magnitude to 6; "four_over_six" to 6 or 4, whichever gives the smaller
            squared error (arXiv 2512.02010); "mse" searches the neighbouring E4M3 scales for the smallest.
        scale2: global scale to use; by default the tensor's greatest magnitude / 2688 (6 * 448), for "four_over_six"
            / 1536 (6 * 256).

    Returns:
        Quantized(b, scales, scale2).

    Raises:
        TypeError: w is not a float array.
        ValueError: w is not 2-D, K is odd, a value is not finite, or scale2 is not a finite number > 0.

    Example:
        >>> import numpy as np, fp4linear
        >>> w = np.array([[0.5, -1.0, 1.5, 2.0, 3.0, -4.0, 6.0, 0.0]], np.float32)
        >>> q = fp4linear.quantize(w, scale2=1.0)
        >>> [f"{byte:02x}" for byte in q.b[0]], f"{q.scales[0, 0]:02x}"
        (['a1', '43', 'e5', '07'], '38')
        >>> bool((fp4linear.dequantize(*q) == w).all())
        True
    """
    return Quantized(*_core.quantize(w, method, scale2))


def dequantize(b: Any, scales: Any, scale2: Any, *, block_size: int = 16) -> npt.NDArray[np.float32]:
    """The float32 weight of canonical NVFP4 arrays: e2m1 * e4m3 * scale2, rounded once; NaN scales give NaN.

    Args:
        b, scales, scale2, block_size: as `Fp4Linear` takes them.

    Returns:
        float32 [N, K], a NumPy array.

    Raises:
        TypeError, ValueError: as `Fp4Linear` does, but for NaN scales.

    Example:
        >>> import numpy as np, fp4linear
        >>> b, scales = np.array([[0x42, 0x98]], np.uint8), np.array([[0x40]], np.uint8)  # 1, 2, -0, -0.5; scale 2
        >>> fp4linear.dequantize(b, scales, 0.5)
        array([[ 1. ,  2. , -0. , -0.5]], dtype=float32)
    """
    return _core.dequantize(b, scales, scale2, block_size)

"""Activations to NVFP4, as the native paths quantise them."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from fp4linear import _core


class QuantizedActivations(NamedTuple):
    """x as NVFP4: e2m1(codes) * e4m3(scales) / global_scale."""

    codes: Any
    """uint8 [..., K/2], two E2M1 codes a byte, the even k in the low nibble."""
    scales: Any
    """uint8 [..., ceil(K/16)], E4M3 bytes; with swizzled=True the 128x4 layout [roundup(M, 128),
    roundup(ceil(K/16), 4)]."""
    global_scale: Any
    """0-d float32; x was multiplied by it."""


def quantize_activations(
    x: Any,
    *,
    global_scale: float | Literal["dynamic"] | None = None,
    input_scale: Any = None,
    swizzled: bool = False,
    stream: Any = None,
) -> QuantizedActivations:
    """Quantise activations to NVFP4 in blocks of 16 along the last axis, with g the global scale.

    The rule is that of docs/numerics.md, What x becomes:

    scale = E4M3(amax / 6 * g), at most 448; code = E2M1(x * g / e4m3(scale)); both to nearest even, as if computed
    without error before. A block whose scale rounds to 0 becomes zeros. A block with an infinity or a NaN gets the NaN
    scale 0x7F and zero codes, so that what is computed from it is NaN.

    Args:
        x: [..., K] float16, bfloat16 or float32 of any array library; K even, the last block may be short.
        global_scale: g itself, which multiplies x (2688 / amax uses the whole range), or "dynamic": 2688 / the
            greatest finite magnitude of this x. At most one of global_scale and input_scale; by default g = 1.
        input_scale: the same as ModelOpt stores it, amax / 2688: g = 1 / input_scale in float32.
        swizzled: scales in the 128x4 layout that block-scaled tensor cores read, padding zeroed; M is the product of
            the leading axes.
        stream: for x on a GPU, the stream to work on, as Fp4Linear.forward() takes it; by default the current one of
            x's library. Nothing waits for the GPU, also not for a dynamic g, so the call can be captured in a graph.

    Returns:
        QuantizedActivations(codes, scales, global_scale): NumPy arrays, and for x on a GPU arrays of x's library there.
        The bits are the same.

    Raises:
        TypeError: x is no array of a listed type, or a scale no number.
        ValueError: K is odd, x is 0-d, both scales are given, or one is not finite and > 0; a stream for x on the CPU.

    Example:
        >>> import numpy as np, fp4linear
        >>> q = fp4linear.quantize_activations(np.array([[6.0, -3.0, 0.2, 0.3]], np.float32))
        >>> [f"{byte:02x}" for byte in q.codes[0]], f"{q.scales[0, 0]:02x}", float(q.global_scale)
        (['d7', '10'], '38', 1.0)
    """
    return QuantizedActivations(*_core.quantize_activations(x, global_scale, input_scale, swizzled, stream))

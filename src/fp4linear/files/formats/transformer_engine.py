"""Transformer Engine's NVFP4 tensors: X.rowwise_data, X.rowwise_scale_inv (padded), X.amax_rowwise.

The names are those of the tensor's attributes, with or without their underscore. The factor is amax / (6 * 448);
where a tensor nvfp4_e4m3_max says so, 256 stands for 448. Scales are in rows unless with_gemm_swizzled_scales or the
caller says otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import (
    PACKED,
    SCALES,
    Asked,
    Format,
    Parts,
    check_codes,
    check_scales,
    dtype_of,
    packed_shape,
    padded_scale_shape,
    plain_scale_shape,
    read_amax,
    read_bias,
    read_codes,
    read_scales,
)

if TYPE_CHECKING:
    from ..checkpoint import Tensors

E4M3_MAXIMA = (448, 256)


class TransformerEngine(Format):
    name = "transformer-engine"
    weight_suffixes = (".rowwise_data", "._rowwise_data")
    options = ("swizzled",)
    suffixes = tuple(
        dot + name
        for dot in (".", "._")
        for name in ("rowwise_scale_inv", "amax_rowwise", "with_gemm_swizzled_scales", "nvfp4_e4m3_max")
    )

    def claims(self, tensors: Tensors, layer: str) -> bool:
        return (
            dtype_of(tensors, attribute(tensors, layer, "rowwise_data")) in PACKED
            and dtype_of(tensors, attribute(tensors, layer, "rowwise_scale_inv")) in SCALES
        )

    def unsupported(self, tensors: Tensors, layer: str, asked: Asked) -> str | None:
        data, scales = attribute(tensors, layer, "rowwise_data"), attribute(tensors, layer, "rowwise_scale_inv")
        amax = attribute(tensors, layer, "amax_rowwise")
        if amax not in tensors:
            return f"there is no {amax}, from which the global factor follows"
        if problem := check_codes(tensors, data):
            return problem
        maximum = number(tensors, layer, "nvfp4_e4m3_max", 448)
        if maximum not in E4M3_MAXIMA:
            return f"its nvfp4_e4m3_max is {maximum}, expected 448 or 256"
        n, half_k = packed_shape(tensors, data)
        padded = padded_scale_shape(n, half_k)
        plain = () if self._swizzled(tensors, layer, asked) else (plain_scale_shape(n, half_k),)
        return check_scales(tensors, data, scales, padded, *plain)

    def shape(self, tensors: Tensors, layer: str) -> tuple[int, int] | None:
        shape = packed_shape(tensors, attribute(tensors, layer, "rowwise_data"))
        return (shape[0], 2 * shape[1]) if len(shape) == 2 else None

    def read(self, tensors: Tensors, layer: str, asked: Asked) -> Parts:
        b = read_codes(tensors, attribute(tensors, layer, "rowwise_data"))
        name = attribute(tensors, layer, "rowwise_scale_inv")
        scales = read_scales(tensors, name, *b.shape, swizzled=self._swizzled(tensors, layer, asked))
        largest = 6.0 * number(tensors, layer, "nvfp4_e4m3_max", 448)
        scale2 = read_amax(tensors, attribute(tensors, layer, "amax_rowwise"), b.shape[0], largest)
        return Parts(b, scales, scale2, read_bias(tensors, layer, b.shape[0]))

    def _swizzled(self, tensors: Tensors, layer: str, asked: Asked) -> bool:
        if asked.swizzled is not None:
            return asked.swizzled
        return bool(number(tensors, layer, "with_gemm_swizzled_scales", 0))


def attribute(tensors: Tensors, layer: str, name: str) -> str:
    """The tensor's name, with the attribute's underscore where the file has kept it."""
    private = f"{layer}._{name}"
    return private if private in tensors else f"{layer}.{name}"


def number(tensors: Tensors, layer: str, name: str, default: int) -> int:
    """A flag or a count that is stored as a one-element tensor."""
    tensor = attribute(tensors, layer, name)
    if tensor not in tensors or tensors.info(tensor).dtype not in ("BOOL", "U8", "I8", "I32", "I64", "F32"):
        return default
    values = tensors.array(tensor).reshape(-1)
    return int(values[0]) if values.size == 1 and abs(values[0]) < 2**31 else default

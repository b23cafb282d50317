"""MLX's nvfp4 mode: X.weight U32 [N, K/8], whose bytes are ModelOpt's, X.scales U8 [N, K/16], optional X.global_scale.

The global is an amax: the factor is amax / 2688. Without one it is 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .base import Asked, Format, Parts, dtype_of, read_amax, read_bias, read_codes

if TYPE_CHECKING:
    from ..checkpoint import Tensors


class MLX(Format):
    name = "mlx"
    weight_suffixes = (".weight",)
    suffixes = (".scales", ".global_scale")

    def claims(self, tensors: Tensors, layer: str) -> bool:
        return (
            dtype_of(tensors, layer + ".weight") == "U32"
            and dtype_of(tensors, layer + ".scales") in ("U8", "F8_E4M3")
            and layer + ".biases" not in tensors  # the affine modes
        )

    def unsupported(self, tensors: Tensors, layer: str, asked: Asked) -> str | None:
        words, scales = tensors.info(layer + ".weight").shape, tensors.info(layer + ".scales").shape
        if len(words) != 2:
            return f"{layer}.weight is {list(words)}, expected two axes: stacked experts of MLX are not supported"
        if scales != (words[0], -(-words[1] // 2)):
            return (
                f"{layer}.scales is {list(scales)}, expected {[words[0], -(-words[1] // 2)]} for words of eight codes "
                f"{list(words)}: it may be another mode of MLX"
            )
        return None

    def shape(self, tensors: Tensors, layer: str) -> tuple[int, int] | None:
        words = tensors.info(layer + ".weight").shape
        return (words[0], 8 * words[1]) if len(words) == 2 else None

    def read(self, tensors: Tensors, layer: str, asked: Asked) -> Parts:
        words = tensors.array(layer + ".weight")
        n = words.shape[0]
        # Little-endian words: the first code is the low nibble of the first byte.
        b = np.ascontiguousarray(words).view(np.uint8).reshape(n, 4 * words.shape[1])
        name = layer + ".global_scale"
        scale2 = read_amax(tensors, name, n) if name in tensors else np.asarray(1.0, np.float32)
        return Parts(b, read_codes(tensors, layer + ".scales"), scale2, read_bias(tensors, layer, n))

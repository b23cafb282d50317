"""A weight's values in plain JAX, for what has to be traced, differentiated or sharded: gradients and dequantize()."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

UNIT_ROWS, UNIT_K, UNIT_BYTES = 16, 64, 576  # of the tiled and the prepacked form (docs/layouts.md)
CODE_BYTES = UNIT_ROWS * UNIT_K // 2  # of a unit; the scales follow


def _products(
    weight: jax.Array, scales: jax.Array | None, n: int, k: int, block_size: int, form: str, dtype: Any
) -> jax.Array:
    """e2m1 * e4m3 [N, K]: exact in every type of x, with at most six significant bits.

    n: the rows that the arrays hold. k: those of the whole layer; a shard along K holds whole units.
    """
    if scales is not None:
        codes = _nibbles(weight).reshape(n, 2 * weight.shape[1])
        blocks = scales.shape[1]
        factors = jnp.repeat(_e4m3(scales), block_size, axis=1, total_repeat_length=blocks * block_size)
        return (_e2m1(codes) * factors[:, : codes.shape[1]]).astype(dtype)
    tiles, units = weight.shape[:2]
    codes_of, factors_of = (_tiled_codes, _tiled_scales) if form == "tiled" else (_packed_codes, _packed_scales)
    codes = codes_of(weight[..., :CODE_BYTES], tiles, units)
    factors = factors_of(weight[..., CODE_BYTES:], tiles, units)
    rows = tiles * UNIT_ROWS
    values = _e2m1(codes).reshape(rows, units * 4, 16) * factors.reshape(rows, units * 4, 1)
    own_k = k if units == -(-k // UNIT_K) else units * UNIT_K
    return values.reshape(rows, units * UNIT_K)[:n, :own_k].astype(dtype)


def _nibbles(packed: jax.Array) -> jax.Array:
    """[...] bytes to [..., 2] codes, the low nibble first."""
    return jnp.stack([packed & 15, packed >> 4], axis=-1)


def _e2m1(code: jax.Array) -> jax.Array:
    """float32 values of codes. Twice that of a magnitude m is m below 2, else (2 + m % 2) * 2^(m // 2) / 2."""
    magnitude = code & 7
    twice = jnp.where(magnitude < 2, magnitude, ((2 + (magnitude & 1)) << (magnitude >> 1)) >> 1)
    value = twice.astype(jnp.float32) * 0.5
    return jnp.where(code & 8, -value, value)


def _e4m3(byte: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(byte, jnp.float8_e4m3fn).astype(jnp.float32)


def _tiled_codes(codes: jax.Array, tiles: int, units: int) -> jax.Array:
    """cpp/cpu/layout.h: byte (vector, row, half, pair) of a unit holds k = 8 vector + 4 pair + half, and that + 2."""
    nibbles = _nibbles(codes.reshape(tiles, units, 8, 16, 2, 2))  # tile, unit, vector, row, half, pair, nibble
    return nibbles.transpose(0, 3, 1, 2, 5, 6, 4).reshape(tiles * UNIT_ROWS, units * UNIT_K)


def _tiled_scales(scales: jax.Array, tiles: int, units: int) -> jax.Array:
    """cpp/cpu/layout.h: byte (half, row, which) of a unit is the scale of block 2 half + which of the row."""
    return _e4m3(scales.reshape(tiles, units, 2, 16, 2).transpose(0, 3, 1, 2, 4)).reshape(tiles * UNIT_ROWS, units * 4)


def _packed_codes(codes: jax.Array, tiles: int, units: int) -> jax.Array:
    """cuda/prepacked.h: word (g, t, slice) holds rows g and g + 8, k = 16 slice + 2 t + (0, 1, 8, 9)."""
    word = jax.lax.bitcast_convert_type(codes.reshape(tiles, units, 8, 4, 4, 4), jnp.uint32)
    signs, shifts = np.array([15, 12, 14, 13], np.uint32), np.array([6, 3, 0, 9], np.uint32)
    half = np.array([0, 16], np.uint32)
    word = word[..., None, None]  # tile, unit, g, t, slice, pair, half
    sign = (word >> (signs[:, None] + half)) & 1
    magnitude = (word >> (shifts[:, None] + half)) & 7
    code = (sign << 3 | magnitude).astype(jnp.uint8).reshape(tiles, units, 8, 4, 4, 2, 2, 2)
    # tile, unit, g, t, slice, k + 8, row + 8, half -> tile, row + 8, g, unit, slice, k + 8, t, half
    return code.transpose(0, 6, 2, 1, 4, 5, 3, 7).reshape(tiles * UNIT_ROWS, units * UNIT_K)


def _packed_scales(scales: jax.Array, tiles: int, units: int) -> jax.Array:
    """cuda/prepacked.h: byte (g, slice, h) is the scale of row g + 8 h; its sign is in the codes already."""
    magnitude = _e4m3(scales.reshape(tiles, units, 8, 4, 2) & 0x7F)
    return magnitude.transpose(0, 4, 2, 1, 3).reshape(tiles * UNIT_ROWS, units * 4)


# Compiled, so that it fuses where the caller does not compile. (No decorator: without JAX's types it would take the
# function's own.)
products: Any = jax.jit(_products, static_argnames=("n", "k", "block_size", "form", "dtype"))

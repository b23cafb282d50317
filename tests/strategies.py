"""Every Hypothesis strategy of the tests. Shapes, layouts and kinds of values are drawn; the bulk of an array comes
from a drawn seed, so that an example stays small to shrink and quick to build.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.reference import Expected, linear

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
NAN_BYTES = (0x7F, 0xFF)
FINITE_BYTES = np.array([byte for byte in range(256) if byte not in NAN_BYTES], np.uint8)

seeds = st.integers(0, 2**32 - 1)
dtype_names = st.sampled_from(sorted(DTYPES))
block_sizes = st.one_of(st.just(16), st.sampled_from([1, 2, 3, 5, 8, 31, 32, 33, 48, 64]), st.integers(1, 64))
out_features = st.one_of(
    st.integers(0, 9), st.sampled_from([15, 16, 17, 31, 32, 33, 48, 63, 65, 130]), st.integers(0, 80)
)
# Even, and as often beside a multiple of 16, 32, 64 and 128 as on it.
in_features = st.one_of(
    st.sampled_from([0, 2, 4, 14, 16, 18, 30, 32, 34, 48, 62, 64, 66, 96, 126, 128, 130, 256, 258, 320]),
    st.integers(0, 150).map(lambda half: 2 * half),
)
row_counts = st.one_of(st.integers(0, 9), st.sampled_from([15, 16, 17, 31, 33, 64, 65]), st.integers(0, 40))


@dataclass(frozen=True)
class LayerCase:
    """The arguments of a layer. b: uint8 [N, K/2]; scales: uint8 [N, ceil(K / block_size)]."""

    b: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    scale2: Any = 1.0
    bias: NDArray | None = None
    block_size: int = 16

    @property
    def out_features(self) -> int:
        return self.b.shape[0]

    @property
    def in_features(self) -> int:
        return 2 * self.b.shape[1]

    def expected(self, x: NDArray, nan_scales: str = "propagate") -> Expected:
        return linear(x, self.b, self.scales, self.scale2, self.bias, block_size=self.block_size, nan_scales=nan_scales)

    def __repr__(self) -> str:
        bias = None if self.bias is None else self.bias.dtype.name
        return (
            f"LayerCase(N={self.out_features}, K={self.in_features}, block_size={self.block_size}, "
            f"scale2={self.scale2!r}, bias={bias})"
        )


@dataclass(frozen=True)
class XCase:
    """An activation array as a caller may hold it: any layout, same values as np.array(x)."""

    x: NDArray
    layout: str
    values: str

    def __repr__(self) -> str:
        return f"XCase({self.x.dtype} {self.x.shape}, strides {self.x.strides}, {self.layout}, {self.values})"


def scale_bytes(draw: st.DrawFn, shape: tuple[int, int], random: np.random.Generator) -> NDArray[np.uint8]:
    """Finite E4M3 bytes: everyday ones, all 254 of them, or one value throughout."""
    kind = draw(st.sampled_from(["everyday", "all", "all", "one", "subnormal"]))
    if kind == "everyday":
        return random.integers(0x20, 0x59, shape, dtype=np.uint8)
    if kind == "all":
        return random.choice(FINITE_BYTES, shape)
    if kind == "subnormal":
        return random.choice(np.array([0x00, 0x01, 0x07, 0x08, 0x80, 0x81, 0x87], np.uint8), shape)
    return np.full(shape, draw(st.sampled_from(FINITE_BYTES.tolist())), np.uint8)


def scale2_values(draw: st.DrawFn, n: int, random: np.random.Generator) -> Any:
    """One finite fp32 factor or one a row: everyday, negative, zero, tiny, huge."""
    one = st.one_of(
        st.sampled_from([1.0, 0.5, -1.0, 0.0, -0.0, 2.0**-6, 2.7901787e-4, 1.0 / 3.0, 2.0**-40, 2.0**20, 1e-30, 1e30]),
        st.floats(-10, 10, width=32),
        st.floats(allow_nan=False, allow_infinity=False, width=32),
    )
    kind = draw(st.sampled_from(["one", "one", "row", "row_all"]))
    if kind == "one":
        return float(draw(one))
    if kind == "row":
        return random.standard_normal(n).astype(np.float32)
    exponents = random.integers(-60, 40, n).astype(np.float64)
    return (random.choice([-1.0, 0.0, 1.0, 1.5], n) * 2.0**exponents).astype(np.float32)


@st.composite
def layers(
    draw: st.DrawFn,
    n: st.SearchStrategy[int] = out_features,
    k: st.SearchStrategy[int] = in_features,
    block_sizes: st.SearchStrategy[int] = block_sizes,
) -> LayerCase:
    """Layers with finite weights."""
    rows, columns, block_size = draw(n), draw(k), draw(block_sizes)
    random = np.random.default_rng(draw(seeds))
    b = random.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
    if draw(st.integers(0, 9)) == 0:
        b[:] = draw(st.integers(0, 255))
    scales = scale_bytes(draw, (rows, -(-columns // block_size)), random)
    scale2 = scale2_values(draw, rows, random)
    bias = None
    if draw(st.booleans()):
        spread = draw(st.sampled_from([1.0, 100.0, 2.0**-20]))
        bias = (spread * random.standard_normal(rows)).astype(DTYPES[draw(dtype_names)])
    return LayerCase(b, scales, scale2, bias, block_size)


@st.composite
def layers_with_nan_scales(draw: st.DrawFn) -> LayerCase:
    """Layers of which some scale bytes (at least one) are NaN."""
    case = draw(layers(n=st.integers(1, 40), k=st.integers(1, 100).map(lambda half: 2 * half)))
    scales = case.scales.copy()
    flat = scales.reshape(-1)
    for at in draw(st.lists(st.integers(0, flat.size - 1), min_size=1, max_size=5)):
        flat[at] = draw(st.sampled_from(NAN_BYTES))
    return replace(case, scales=scales)


def x_values(random: np.random.Generator, kind: str, shape: tuple[int, ...], dtype: np.dtype) -> NDArray:
    normal = random.standard_normal(shape)
    if kind == "wide":
        normal *= 2.0 ** random.integers(-14, 11, shape)
    elif kind == "sparse":
        normal *= random.random(shape) < 0.1
    elif kind == "integers":
        normal = random.integers(-9, 10, shape).astype(np.float64)
    elif kind == "tiny":  # subnormal fp16; small for the others
        normal *= 2.0**-16
    elif kind == "zeros":
        normal *= 0.0  # both signs
    elif kind == "large":
        normal = np.clip(normal * 2.0**13, -65504, 65504)
    return normal.astype(dtype)


VALUE_KINDS = ["normal", "normal", "wide", "sparse", "integers", "tiny", "zeros", "large"]
LAYOUTS = [
    "contiguous", "contiguous", "padded rows", "every second column", "transposed", "reversed rows",
    "reversed columns", "one row expanded", "one column expanded", "offset", "odd address", "every third row",
]  # fmt: skip


def laid_out(values: NDArray, layout: str, offset: int = 1) -> NDArray:
    """[M, K] values held in memory as the layout says. Gaps hold NaN, so that reading them shows."""
    m, k = values.shape
    nan = np.array(np.nan).astype(values.dtype)
    if layout == "contiguous":
        return values
    if layout == "padded rows":
        held = np.full((m, k + offset + 2), nan)
        view = held[:, offset : offset + k]
    elif layout == "every second column":
        held = np.full((m, 2 * k), nan)
        view = held[:, ::2]
    elif layout == "every third row":
        held = np.full((3 * m, k), nan)
        view = held[::3]
    elif layout == "transposed":
        view = np.empty((k, m), values.dtype).T
    elif layout == "reversed rows":
        view = np.empty((m, k), values.dtype)[::-1]
    elif layout == "reversed columns":
        view = np.empty((m, k), values.dtype)[:, ::-1]
    elif layout == "one row expanded":
        return np.lib.stride_tricks.as_strided(values, (m, k), (0, values.strides[1])) if m else values
    elif layout == "one column expanded":
        return np.lib.stride_tricks.as_strided(values, (m, k), (values.strides[0], 0)) if k else values
    elif layout == "offset":
        view = np.full(m * k + offset, nan)[offset:].reshape(m, k)
    elif layout == "odd address":
        size = values.dtype.itemsize
        view = np.zeros(m * k * size + 8, np.uint8)[1 : 1 + m * k * size].view(values.dtype).reshape(m, k)
    else:
        raise ValueError(layout)
    view[...] = values
    return view


@st.composite
def activations(
    draw: st.DrawFn, k: int, dtype: st.SearchStrategy[str] = dtype_names, m: st.SearchStrategy[int] = row_counts
) -> XCase:
    """x [M, K], [K] or with more leading axes, in every layout that NumPy can express."""
    rows = draw(m)
    kind, layout = draw(st.sampled_from(VALUE_KINDS)), draw(st.sampled_from(LAYOUTS))
    random = np.random.default_rng(draw(seeds))
    x = laid_out(x_values(random, kind, (rows, k), DTYPES[draw(dtype)]), layout, draw(st.integers(1, 9)))
    shape = draw(st.sampled_from(["2-D", "2-D", "2-D", "1-D", "3-D", "4-D"]))
    if shape == "1-D" and rows:
        x = x[rows - 1]
    elif shape == "3-D":
        x = x[None] if draw(st.booleans()) else x[:, None]
    elif shape == "4-D" and rows % 2 == 0 and layout != "odd address":
        # Splitting an axis never needs a copy, whatever the strides.
        x = x.reshape(2, rows // 2, 1, k) if rows and k else np.zeros((2, rows // 2, 1, k), x.dtype)
    return XCase(x, layout, kind)

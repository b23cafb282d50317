"""What the GPU tests share: arrays to the device and back, and the GPU paths with the shapes that each takes."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray

import fp4linear
from tests import reference
from tests.strategies import LayerCase, block_sizes

torch = pytest.importorskip("torch")

DEVICE = "cuda"
SPIN = 100_000_000  # clock cycles of torch.cuda._sleep: about 50 ms
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TORCH_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
each_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


def to_device(values: NDArray, device: str | None = None) -> Any:
    """A NumPy array (bf16 as ml_dtypes) as a contiguous torch tensor on the device."""
    array = np.array(values, order="C")
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).to(device or DEVICE).view(torch.bfloat16)
    return torch.from_numpy(array).to(device or DEVICE)


def to_host(tensor: Any) -> NDArray:
    """A torch tensor as a NumPy array of its own memory, bf16 as ml_dtypes."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).cpu().numpy().view(BFLOAT16).copy()
    return tensor.cpu().numpy().copy()


def poisoned(shape: tuple[int, ...], dtype: Any) -> Any:
    """A tensor of NaN: what a kernel forgets to write shows."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def make_layer(case: LayerCase, path: str = "auto", **options: Any) -> fp4linear.Fp4Linear:
    """The layer of a case, on the device."""
    return fp4linear.Fp4Linear(
        case.b, case.scales, case.scale2, case.bias, block_size=case.block_size, device=DEVICE, path=path, **options
    )


def assert_ran(layer: fp4linear.Fp4Linear, path: str) -> None:
    """The calling thread's last forward of the layer took the path."""
    assert layer.last_path == path


def forward(layer: fp4linear.Fp4Linear, x: Any, path: str) -> NDArray:
    """y of a forward that took the path, on the host. A second call, into poisoned memory, gives the same bits."""
    y = layer.forward(x)
    assert_ran(layer, path)
    assert type(y) is torch.Tensor and y.dtype == x.dtype and y.device == x.device and y.is_contiguous()
    assert tuple(y.shape) == (*x.shape[:-1], layer.out_features)
    out = poisoned(tuple(y.shape), y.dtype)
    assert layer.forward(x, out=out) is out
    assert_ran(layer, path)
    first, second = to_host(y), to_host(out)
    assert (first.view(np.uint16) == second.view(np.uint16)).all(), "two equal calls differ"
    return first


class GpuPath(NamedTuple):
    """What a path takes."""

    name: str
    in_features: st.SearchStrategy[int]
    block_sizes: st.SearchStrategy[int]
    row_counts: st.SearchStrategy[int]
    most_rows: int = 1 << 40


# N and K on both sides of a tile, a warp's range of K and a block's.
TENSOR_CORE = GpuPath(
    "gemv_tensor_core",
    st.one_of(st.integers(1, 18).map(lambda unit: 64 * unit), st.sampled_from([2048, 2176, 4096, 8192, 8256])),
    st.just(16),
    st.integers(1, 8),
    8,
)
SCALAR = GpuPath(
    "gemv_scalar",
    st.one_of(st.integers(1, 20).map(lambda share: 32 * share), st.sampled_from([992, 1024, 1056, 2080, 4096])),
    st.just(16),
    st.integers(1, 8),
    8,
)
# Rows on both sides of a tile of tokens.
FUSED = GpuPath(
    "gemm_fused",
    st.one_of(st.integers(1, 18).map(lambda unit: 64 * unit), st.sampled_from([2048, 2176, 4096, 8256])),
    st.just(16),
    st.one_of(
        st.integers(1, 50),
        st.sampled_from([1, 7, 9, 15, 17, 31, 33, 47, 48, 49, 63, 64, 65, 96, 127, 128, 129, 257, 300]),
    ),
)
CUBLAS = GpuPath(
    "dequant_cublas",
    st.one_of(
        st.sampled_from([2, 4, 14, 16, 30, 32, 34, 48, 64, 126, 128, 130, 256, 320, 2736, 4096]),
        st.integers(1, 150).map(lambda half: 2 * half),
    ),
    block_sizes,
    st.one_of(st.integers(1, 17), st.sampled_from([31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257, 300])),
)
PATHS = {path.name: path for path in (TENSOR_CORE, SCALAR, FUSED, CUBLAS)}
PREPACKED = (TENSOR_CORE.name, FUSED.name)  # they read the form of the weight that holds no NaN scales
each_path = pytest.mark.parametrize("path", list(PATHS))

out_features = st.one_of(
    st.integers(1, 9), st.sampled_from([15, 16, 17, 31, 32, 33, 63, 65, 130, 257, 1057]), st.integers(1, 80)
)

LAYOUTS = [
    "contiguous", "contiguous", "padded rows", "aligned rows", "every second column", "every third row", "transposed",
    "one row expanded", "one column expanded", "offset",
]  # fmt: skip


def laid_out(values: NDArray, layout: str, offset: int = 1) -> Any:
    """[M, K] values on the device, held as the layout says. Gaps hold NaN, so that reading them shows."""
    x = to_device(values)
    m, k = values.shape
    if layout == "contiguous":
        return x
    if layout == "one row expanded":
        return x[:1].expand(m, k)
    if layout == "one column expanded":
        return x[:, :1].expand(m, k)
    if layout == "padded rows":
        view = poisoned((m, k + offset + 2), x.dtype)[:, offset : offset + k]
    elif layout == "aligned rows":  # rows 16 bytes apart or a multiple of it: read in place
        view = poisoned((m, (k + 71) // 8 * 8), x.dtype)[:, :k]
    elif layout == "every second column":
        view = poisoned((m, 2 * k), x.dtype)[:, ::2]
    elif layout == "every third row":
        view = poisoned((3 * m, k), x.dtype)[::3]
    elif layout == "transposed":
        view = poisoned((k, m), x.dtype).t()
    elif layout == "offset":
        view = poisoned((m * k + offset,), x.dtype)[offset:].view(m, k)
    else:
        raise ValueError(layout)
    view.copy_(x)
    return view


def expected_on_device(case: LayerCase, x: Any) -> reference.Expected:
    """case.expected() with the device's fp64 arithmetic, for large weights. One factor, no bias."""
    e2m1, e4m3 = (torch.from_numpy(table).to(DEVICE) for table in (reference.E2M1, reference.E4M3))
    b, scales = to_device(case.b).int(), to_device(case.scales).int()
    elements = e2m1[torch.stack([b & 15, b >> 4], dim=-1).flatten(1)]
    w = elements * e4m3[scales].repeat_interleave(case.block_size, dim=1)[:, : elements.shape[1]] * float(case.scale2)
    rows = x.double()
    return reference.Expected(to_host(rows @ w.t()), to_host(rows.abs() @ w.abs().t()))

"""The gradient with respect to x: grad @ W, with W dequantised a slab of rows at a time and sums in float32."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import fp4linear
from fp4linear import Fp4Linear

from ._layers import Holder

SLAB = 1 << 22  # weights dequantised at once: 16 MiB of float32, enough rows for an efficient matmul
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Canonical(NamedTuple):
    """The canonical bytes on a GPU, which the prepacked layer can give only by way of the host."""

    b: Tensor
    scales: Tensor
    scale2: Tensor
    pairs: Tensor  # [256, 2]: the two elements of each byte
    block_size: int


def gradient_of_x(holder: Holder, grad: Tensor, in_features: int) -> Tensor:
    """grad [..., N] -> [..., K], of grad's type, rounded once."""
    if holder.layer is None:
        raise RuntimeError("the layer has no weight")
    rows = grad.reshape(math.prod(grad.shape[:-1]), grad.shape[-1])
    if rows.numel() == 0 or in_features == 0:
        return grad.new_zeros((*grad.shape[:-1], in_features))
    total = torch.zeros((rows.shape[0], in_features), dtype=torch.float32, device=grad.device)
    if grad.is_cuda:
        if holder.gradient is None:
            holder.gradient = _kept_on(holder.layer, grad.device)
        total = _sum_on_gpu(rows, total, holder.gradient)
    else:
        _sum_on_host(rows, total, holder.layer)
    return total.to(grad.dtype).reshape(*grad.shape[:-1], in_features)


def _host_parts(layer: Fp4Linear) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    _, (_, b, scales, scale2, _, keywords), *_ = layer.__reduce__()
    if keywords["nan_scales"] == "zero":
        scales = np.where((scales & 0x7F) == 0x7F, 0, scales).astype(np.uint8)
    return b, scales, scale2, keywords["block_size"]


def _sum_on_host(rows: Tensor, total: Tensor, layer: Fp4Linear) -> None:
    b, scales, scale2, block_size = _host_parts(layer)
    rows32 = rows.float()
    step = max(1, SLAB // total.shape[1])
    for first in range(0, len(b), step):
        slab = slice(first, first + step)
        factor = scale2 if scale2.ndim == 0 else scale2[slab]
        w = fp4linear.dequantize(b[slab], scales[slab], factor, block_size=block_size)
        total.addmm_(rows32[:, slab], torch.from_numpy(w))


def _kept_on(layer: Fp4Linear, device: torch.device) -> Canonical:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the first gradient of a layer brings its canonical weight to the GPU, which a CUDA graph can't capture: "
            "run one backward pass before"
        )
    # The thread that warms a graph up allocates from the graph's pool, where nothing may stay. Another one does not.
    with ThreadPoolExecutor(1) as other:
        return other.submit(_canonical_on, layer, device).result()


def _canonical_on(layer: Fp4Linear, device: torch.device) -> Canonical:
    b, scales, scale2, block_size = _host_parts(layer)
    low_first = [[_E2M1[byte & 15], _E2M1[byte >> 4]] for byte in range(256)]
    return Canonical(
        torch.from_numpy(b).to(device),
        torch.from_numpy(scales).view(torch.float8_e4m3fn).to(device),
        torch.from_numpy(scale2).to(device),
        torch.tensor(low_first, device=device),
        block_size,
    )


def _sum_on_gpu(rows: Tensor, total: Tensor, weight: Canonical) -> Tensor:
    if not torch.cuda.is_current_stream_capturing():
        for tensor in (weight.b, weight.scales, weight.scale2, weight.pairs):
            tensor.record_stream(torch.cuda.current_stream(rows.device))  # allocated by another thread, on another one
    pairs = weight.pairs.to(rows.dtype)
    k = total.shape[1]
    step = max(1, SLAB // k)
    for first in range(0, len(weight.b), step):
        slab = slice(first, first + step)
        factors = weight.scales[slab].to(rows.dtype).unsqueeze(-1).expand(-1, -1, weight.block_size).flatten(1)[:, :k]
        # e2m1 * e4m3 is exact in float16 and bfloat16, so tensor cores lose nothing; scale2 would not be.
        w = pairs[weight.b[slab].int()].flatten(1) * factors
        if weight.scale2.ndim == 0:
            total += torch.mm(rows[:, slab], w, out_dtype=torch.float32)
        else:
            total.addmm_(rows[:, slab].float(), w.float() * weight.scale2[slab, None])
    return total * weight.scale2 if weight.scale2.ndim == 0 else total

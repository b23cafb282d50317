"""The gradient with respect to x: grad @ W, with W dequantised a slab of rows at a time and sums in float32."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

import fp4linear
from fp4linear import Fp4Linear
from fp4linear._core import dequantize_rows

from ._layers import Holder

SLAB = 1 << 22  # weights dequantised at once: 16 MiB of float32, enough rows for an efficient matmul


def gradient_of_x(holder: Holder, grad: Tensor, in_features: int) -> Tensor:
    """grad [..., N] -> [..., K], of grad's type, rounded once."""
    if holder.layer is None:
        raise RuntimeError("the layer has no weight")
    rows = grad.reshape(math.prod(grad.shape[:-1]), grad.shape[-1])
    if rows.numel() == 0 or in_features == 0:
        return grad.new_zeros((*grad.shape[:-1], in_features))
    total = torch.zeros((rows.shape[0], in_features), dtype=torch.float32, device=grad.device)
    if grad.is_cuda:
        _sum_on_gpu(rows, total, holder.layer)
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


def _sum_on_gpu(rows: Tensor, total: Tensor, layer: Fp4Linear) -> None:
    n, k = layer.out_features, layer.in_features
    dtype = rows.dtype if rows.dtype != torch.float32 else torch.bfloat16
    scale2 = layer.scale2
    step = min(n, max(1, SLAB // k))
    # What the layer holds without scale2 is exact in 16 bits, so tensor cores lose nothing; with it, it would not be.
    weight = torch.empty((step, k), dtype=dtype, device=rows.device)
    factors = torch.empty(step, dtype=torch.float32, device=rows.device) if scale2.ndim else None
    for first in range(0, n, step):
        count = min(step, n - first)
        w, f = weight[:count], None if factors is None else factors[:count]
        dequantize_rows(layer, first, w, f)
        slab = rows[:, first : first + count]
        if f is not None:
            total.addmm_(slab.float(), w.float() * f[:, None])
        elif slab.dtype == torch.float32:
            total.addmm_(slab, w.float())
        else:
            total += torch.mm(slab, w, out_dtype=torch.float32)
    if factors is None:
        total *= float(scale2)

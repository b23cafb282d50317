"""The contract on results, computed in float64 where the result is: a GPU checks every output feature in no time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from .accuracy import (
    FP16_LEAST_NORMAL,
    FP16_SUBNORMAL_ERROR,
    SAMPLED_TOKENS,
    SUM_ERROR,
    UNIT_ROUNDOFF,
    Accuracy,
    spread,
)

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CHUNK_WEIGHTS = 1 << 25  # decoded at a time: 256 MB of float64


class Check:
    """What y must be at up to 16 rows of x and all output features."""

    def __init__(self, torch: Any, b: Any, scales: Any, scale2: float, x: Any, dtype: str) -> None:
        """b: uint8 [N, K/2], scales: uint8 [N, ceil(K/16)], x: [M, K], tensors of one device; dtype: of y, by name."""
        self._torch = torch
        n, k = b.shape[0], x.shape[1]
        self.tokens = torch.tensor(spread(x.shape[0], SAMPLED_TOKENS), device=x.device)
        chosen = x[self.tokens].double()
        self.ref = torch.empty(len(chosen), n, dtype=torch.float64, device=x.device)
        self._allowed = torch.empty_like(self.ref)
        step = max(CHUNK_WEIGHTS // k, 1)
        for begin in range(0, n, step):
            rows = slice(begin, begin + step)
            weight = decode(torch, b[rows], scales[rows], k) * scale2
            self.ref[:, rows] = chosen @ weight.t()
            self._allowed[:, rows] = SUM_ERROR * (chosen.abs() @ weight.abs().t())
        self._allowed += UNIT_ROUNDOFF[dtype] * self.ref.abs()
        if dtype == "float16":
            self._allowed += torch.where(self.ref.abs() < FP16_LEAST_NORMAL, FP16_SUBNORMAL_ERROR, 0.0)

    def compare(self, results: Iterable[tuple[Any, int]]) -> Accuracy:
        """The worst of several y [M, N], each with the number of rows by which its weight is rotated (torch.roll by
        minus so many).
        """
        torch = self._torch
        found = []
        for y, rows in results:
            ref, allowed = self.ref.roll(-rows, 1), self._allowed.roll(-rows, 1)
            error = (y[self.tokens].double() - ref).abs()
            used = torch.where(error == 0, 0.0, error / allowed)
            found.append(torch.stack([used.amax(), error.amax(), error.norm()]))
        worst = torch.stack(found).amax(0).tolist()  # NaN stays
        used_, max_abs, norm = (math.inf if math.isnan(value) else value for value in worst)
        scale = float(self.ref.norm())
        return Accuracy(used_, max_abs, norm / scale if scale else 0.0)


def decode(torch: Any, b: Any, scales: Any, k: int) -> Any:
    """float64 [N, K] without the global scale."""
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64, device=b.device)
    codes = torch.stack([b & 15, b >> 4], -1).reshape(b.shape[0], k)
    factors = scales.view(torch.float8_e4m3fn).float().double()
    return values[codes.int()] * factors.repeat_interleave(16, 1)[:, :k]

"""Cross-checks with comfy-kitchen's eager NVFP4 layout: high nibble first, rows padded to 16, swizzled scales."""

from __future__ import annotations

import numpy as np
import pytest

import fp4linear
from fp4linear import Fp4Linear, _core
from tests.interop import assert_same_quantisation, nibbles_swapped, required, weights

torch = required("torch")
eager = required("comfy_kitchen.backends.eager.quantization")


def quantised(w: np.ndarray, scale2: float, *, hi_first: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """(b as stored, scales [roundup(N, 128), roundup(K/16, 4)] as stored)."""
    qdata, scales = eager.quantize_nvfp4(torch.from_numpy(w), torch.tensor(scale2), pad_16x=True, hi_first=hi_first)
    return qdata.numpy(), scales.view(torch.uint8).numpy()


@pytest.mark.parametrize("hi_first", [True, False])
@pytest.mark.parametrize(("n", "k", "ties"), [(128, 64, False), (100, 48, True), (260, 144, False), (1, 16, True)])
def test_layout_and_quantiser(hi_first: bool, n: int, k: int, ties: bool) -> None:
    w = weights(n, k, n, ties=ties)
    q = fp4linear.quantize(w)
    b, stored = quantised(w, float(q.scale2), hi_first=hi_first)
    rows = -(-n // 16) * 16
    assert b.shape == (rows, k // 2)
    assert stored.shape == (-(-n // 128) * 128, -(-k // 64) * 4)
    scales = _core.unswizzle_scales(stored, n, k // 16)
    assert np.array_equal(_core.swizzle_scales(scales), stored)
    assert not (b[n:] & 0x77).any()  # padding: zeros of either sign
    b = nibbles_swapped(b) if hi_first else b
    assert_same_quantisation(w, float(q.scale2), (q.b, q.scales), (b[:n], scales))


@pytest.mark.parametrize("hi_first", [True, False])
def test_dequantising(hi_first: bool) -> None:
    b, stored = quantised(weights(48, 96, 7), 2.0**-9, hi_first=hi_first)
    theirs = eager.dequantize_nvfp4(
        torch.from_numpy(b),
        torch.tensor(2.0**-9),
        torch.from_numpy(stored).view(torch.float8_e4m3fn),
        torch.float32,
        hi_first=hi_first,
    )
    canonical = nibbles_swapped(b) if hi_first else b
    ours = Fp4Linear(canonical, _core.unswizzle_scales(stored, 48, 6), 2.0**-9).dequantize()
    assert np.array_equal(theirs.numpy(), ours)

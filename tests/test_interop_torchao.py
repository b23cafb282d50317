"""Cross-checks with torchao's NVFP4Tensor: quantiser, plain and swizzled scales, dequantising."""

from __future__ import annotations

import numpy as np
import pytest

import fp4linear
from fp4linear import Fp4Linear, _core
from tests.interop import assert_same_quantisation, required, weights

torch = required("torch")
nvfp4 = required("torchao.prototype.mx_formats.nvfp4_tensor")


def quantised(w: np.ndarray, scale2: float, swizzled: bool) -> object:
    return nvfp4.NVFP4Tensor.to_nvfp4(
        torch.from_numpy(w), per_tensor_scale=torch.tensor(scale2), is_swizzled_scales=swizzled
    )


def test_global_scale() -> None:
    w = weights(16, 64, 1)
    theirs = nvfp4.per_tensor_amax_to_scale(torch.from_numpy(w).abs().max())
    assert fp4linear.quantize(w).scale2 == theirs.numpy()


@pytest.mark.parametrize("ties", [False, True])
def test_quantiser(ties: bool) -> None:
    w = weights(64, 256, 2, ties=ties)
    q = fp4linear.quantize(w)
    # torchao keeps block scales at or above 2^-6; these weights have none below.
    assert q.scales.min() >= 0x08
    theirs = quantised(w, float(q.scale2), swizzled=False)
    scales = theirs.scale.view(torch.uint8).numpy()
    assert_same_quantisation(w, float(q.scale2), (q.b, q.scales), (theirs.qdata.numpy(), scales))


@pytest.mark.parametrize(("n", "k"), [(128, 64), (100, 48), (300, 144), (1, 16)])
def test_swizzled_scales(n: int, k: int) -> None:
    w = weights(n, k, 3)
    plain, swizzled = (quantised(w, 2.0**-9, layout) for layout in (False, True))
    scales = plain.scale.view(torch.uint8).numpy()
    stored = swizzled.scale.view(torch.uint8).numpy()
    assert stored.shape == (-(-n // 128) * 32, -(-k // 64) * 16)
    assert np.array_equal(_core.swizzle_scales(scales).reshape(stored.shape), stored)
    padded = stored.reshape(-(-n // 128) * 128, -(-k // 64) * 4)
    assert np.array_equal(_core.unswizzle_scales(padded, n, k // 16), scales)
    assert np.array_equal(plain.qdata.numpy(), swizzled.qdata.numpy())


@pytest.mark.parametrize("swizzled", [False, True])
def test_dequantising(swizzled: bool) -> None:
    # With a power of two as the global scale its float32 products are exact.
    theirs = quantised(weights(48, 96, 4), 2.0**-9, swizzled)
    scales = theirs.scale.view(torch.uint8).numpy()
    if swizzled:
        scales = _core.unswizzle_scales(scales.reshape(128, 8), 48, 6)
    ours = Fp4Linear(theirs.qdata.numpy(), scales, 2.0**-9).dequantize()
    assert np.array_equal(theirs.dequantize(torch.float32).numpy(), ours)

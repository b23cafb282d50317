"""Cross-check with gguf's NVFP4 blocks: 64 values in 36 bytes."""

from __future__ import annotations

import numpy as np
import pytest

from fp4linear import Fp4Linear
from tests.interop import gguf_blocks, required

gguf = required("gguf")
if not hasattr(gguf.GGMLQuantizationType, "NVFP4"):
    pytest.skip("this gguf has no NVFP4 (0.19 has)", allow_module_level=True)


@pytest.mark.parametrize("seed", range(3))
def test_dequantising(seed: int) -> None:
    random = np.random.default_rng(seed)
    b = random.integers(0, 256, (64, 64), dtype=np.uint8)
    # Its scales are unsigned, and 0x7F reads as 0. Every byte once a column.
    scales = np.stack([random.permutation(128).astype(np.uint8)[:64] for _ in range(8)], axis=1)
    scales[0] = 0x7F
    theirs = gguf.quants.dequantize(gguf_blocks(b, scales), gguf.GGMLQuantizationType.NVFP4)
    ours = Fp4Linear(b, scales, 1.0, nan_scales="zero").dequantize()
    assert theirs.shape == ours.shape == (64, 128)
    assert np.array_equal(theirs, ours)  # but for the sign of zero, which its integer table has not

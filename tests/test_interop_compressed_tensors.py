"""Cross-checks with compressed-tensors: its packing, its quantiser and its NVFP4 compressor."""

from __future__ import annotations

import numpy as np
import pytest

import fp4linear
from tests import reference
from tests.interop import assert_same_quantisation, required, weights

torch = required("torch")
helpers = required("compressed_tensors.compressors.nvfp4.helpers")
quantization = required("compressed_tensors.quantization")
NVFP4PackedCompressor = required("compressed_tensors.compressors.nvfp4").NVFP4PackedCompressor


def scheme() -> object:
    args = quantization.QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        symmetric=True,
        scale_dtype=torch.float8_e4m3fn,
    )
    return quantization.QuantizationScheme(targets=["Linear"], weights=args)


def test_packing() -> None:
    b, _ = reference.make(8, 64, 1)
    values = reference.E2M1[reference.codes(b)]
    packed = helpers.pack_fp4_to_uint8(torch.from_numpy(values).to(torch.bfloat16))
    assert np.array_equal(packed.numpy(), b)
    back = helpers.unpack_fp4_from_uint8(torch.from_numpy(b), 8, 64, dtype=torch.float32).numpy()
    ours = fp4linear.dequantize(b, np.full((8, 4), 0x38, np.uint8), 1.0)
    assert np.array_equal(back, ours)
    assert np.array_equal(np.signbit(back), np.signbit(ours))


def compressed(w: np.ndarray, global_scale: torch.Tensor) -> dict[str, torch.Tensor]:
    blocks = torch.from_numpy(w).reshape(w.shape[0], -1, 16)
    scale, _ = quantization.utils.calculate_qparams(
        blocks.amin(-1), blocks.amax(-1), scheme().weights, global_scale=global_scale
    )
    state = {
        "weight": torch.from_numpy(w),
        "weight_scale": scale.to(torch.float32),
        "weight_global_scale": global_scale,
    }
    return NVFP4PackedCompressor.compress(state, scheme())


def arrays(state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """As fp4linear.load takes them, under a layer named p."""
    return {
        f"p.{name}": (tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor).numpy()
        for name, tensor in state.items()
        if name in ("weight_packed", "weight_scale", "weight_global_scale")
    }


@pytest.mark.parametrize("ties", [False, True])
def test_quantiser_and_loader(ties: bool) -> None:
    w = weights(64, 256, 2, ties=ties)
    least, greatest = torch.from_numpy(w).min().reshape(1), torch.from_numpy(w).max().reshape(1)
    state = compressed(w, quantization.utils.generate_gparam(least, greatest))
    layer = fp4linear.load(arrays(state), "p")
    b, scales, scale2 = layer.canonical()
    assert np.array_equal(b, state["weight_packed"].numpy())
    assert np.array_equal(scales, state["weight_scale"].view(torch.uint8).numpy())
    np.testing.assert_allclose(scale2, fp4linear.quantize(w).scale2, rtol=2.0**-22)
    ours = fp4linear.quantize(w, scale2=float(scale2))
    assert_same_quantisation(w, float(scale2), (ours.b, ours.scales), (b, scales))


def test_decompressing() -> None:
    # Its bfloat16 arithmetic is exact where the global scale is a power of two.
    state = compressed(weights(32, 128, 3), torch.tensor([1024.0]))
    theirs = NVFP4PackedCompressor.decompress(state, scheme())["weight"].to(torch.float32).numpy()
    assert np.array_equal(fp4linear.load(arrays(state), "p").dequantize(), theirs)

"""What the cross-checks with other libraries share."""

from __future__ import annotations

import importlib
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

from tests import reference

E2M1_MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
FLOAT32_NOISE = 2.0**-20  # several float32 roundings, relative


def required(name: str) -> ModuleType:
    """The module, or a skip of the whole file that says why. A package may be there and not fit the installed torch."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        pytest.skip(f"{name} can't be imported: {error}", allow_module_level=True)


def nibbles_swapped(b: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return b << np.uint8(4) | b >> np.uint8(4)


def gguf_blocks(b: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """GGUF type 40 [N, K/64 * 36]: 4 scale bytes, then 32 code bytes; of 16 values the low nibbles are 0-7."""
    n, blocks = scales.shape
    codes = reference.codes(b).reshape(n, blocks // 4, 4, 2, 8)
    data = (codes[..., 0, :] | codes[..., 1, :] << 4).reshape(n, blocks // 4, 32)
    return np.concatenate([scales.reshape(n, blocks // 4, 4), data], axis=-1).reshape(n, -1)


def assert_same_quantisation(
    w: NDArray[np.float32], scale2: float, ours: tuple[NDArray, NDArray], theirs: tuple[NDArray, NDArray]
) -> None:
    """Codes and scale bytes agree, but where float32 arithmetic can't tell which neighbour is the nearer one.

    Args:
        w: [N, K], K a multiple of 16; ours, theirs: (b [N, K/2], scales [N, K/16]).
    """
    blocks = w.astype(np.float64).reshape(w.shape[0], -1, 16)
    wanted = np.abs(blocks).max(-1) / (6 * scale2)
    mine, other = (reference.E4M3[scales] for scales in (ours[1], theirs[1]))
    differs = mine != other
    undecided = np.abs(wanted - (mine + other) / 2) <= FLOAT32_NOISE * wanted
    assert not (differs & ~undecided).any(), f"scales differ at {np.argwhere(differs & ~undecided)[:3].tolist()}"

    quotients = np.abs(blocks / (mine * scale2)[..., None])
    distance = np.abs(quotients[..., None] - E2M1_MIDPOINTS).min(-1)
    same_scale = ~differs[..., None]
    unequal = (reference.codes(ours[0]) != reference.codes(theirs[0])).reshape(blocks.shape) & same_scale
    wrong = unequal & (distance > FLOAT32_NOISE * quotients)
    assert not wrong.any(), f"codes differ at {np.argwhere(wrong)[:3].tolist()}"
    assert differs.mean() < 0.01
    assert unequal.mean() < 0.01


def weights(n: int, k: int, seed: int, *, ties: bool = False) -> NDArray[np.float32]:
    """Normal weights whose blocks differ in size by up to 2^8; with ties, multiples of 1/8 of a common step."""
    random = np.random.default_rng(seed)
    w = random.standard_normal((n, k)).astype(np.float32)
    w *= np.exp2(random.integers(-7, 2, (n, k // 16))).astype(np.float32).repeat(16, axis=1)
    return np.round(w * 64) / np.float32(64) + np.float32(2.0**-7) if ties else w

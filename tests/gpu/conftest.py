"""Settings of the frameworks that have to be there before their first use of the GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import numpy as np
import pytest

import fp4linear

# JAX takes three quarters of the GPU's memory at its first use otherwise, and the tests share it with torch and CuPy.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@pytest.fixture(autouse=True)
def _no_capture_left_open() -> Iterator[None]:
    """A capture that failed can stay open in torch, and then every test behind it fails for no fault of its own."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        pytest.exit("the test before has left torch's stream in a capture", returncode=1)


@pytest.fixture(autouse=True)
def _first_gpu_is_current() -> None:
    """Whatever the test before did; JAX makes the last GPU current as it starts."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.set_device(0)


@pytest.fixture(scope="session")
def tensor_core_kernels() -> bool:
    """A build for an architecture before SM80 has no kernels for tensor cores, on newer GPUs too."""
    if not fp4linear._core.cuda_info()["devices"]:
        return True
    layer = fp4linear.Fp4Linear(np.zeros((16, 64), np.uint8), np.zeros((16, 8), np.uint8), 1.0, device="cuda")
    return "no kernel" not in layer.plan(1).reasons.get("gemv_tensor_core", "")


@pytest.fixture(autouse=True)
def _path_in_this_build(request: pytest.FixtureRequest, tensor_core_kernels: bool) -> None:
    path = getattr(getattr(request.node, "callspec", None), "params", {}).get("path")
    if path in ("gemv_tensor_core", "gemm_fused") and not tensor_core_kernels:
        pytest.skip(f"this build has no kernel of {path} for this GPU")

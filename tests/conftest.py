"""Marks, Hypothesis profiles, and the skips that name their reason."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from fp4linear import _core
from tests.backends import ISAS

# Each example builds and runs a layer; the clock is no verdict on a shared machine.
_common: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=60, **_common)
settings.register_profile("ci", max_examples=100, derandomize=True, print_blob=True, **_common)
settings.register_profile("thorough", max_examples=2000, **_common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))

MARKS = {
    "gpu": "needs an NVIDIA GPU that this build has kernels for",
    "torch": "needs PyTorch (a CPU build will do)",
    "jax": "needs JAX (a CPU build will do)",
    "slow": "takes seconds: thousands of calls",
}


def pytest_configure(config: pytest.Config) -> None:
    for mark, meaning in MARKS.items():
        config.addinivalue_line("markers", f"{mark}: {meaning}")


def _missing_gpu() -> str:
    info = _core.cuda_info()
    if info["devices"]:
        return ""
    return f"no GPU: {info['reason']}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing: dict[str, str] = {
        "gpu": _missing_gpu(),
        "torch": "" if importlib.util.find_spec("torch") else "PyTorch is not installed",
        "jax": "" if importlib.util.find_spec("jax") else "JAX is not installed",
    }
    for item in items:
        for mark, reason in missing.items():
            if reason and item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    """Each instruction set that runs here."""
    return request.param

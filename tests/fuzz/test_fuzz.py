"""The fuzz targets, bounded: random inputs by a fixed seed, and the inputs that once failed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

INPUTS = 300  # a target; `make fuzz` runs them by the hour
FOUND = sorted((Path(__file__).parent / "found").glob("*/*"))


@pytest.mark.parametrize("name", list(TARGETS))
def test_random_inputs(name: str) -> None:
    generator = random.Random(2026)
    for length in range(INPUTS):
        data = generator.randbytes(4 * length)
        try:
            TARGETS[name](data)
        except BaseException as error:
            raise AssertionError(f"{name}: input {data.hex()}") from error


@pytest.mark.parametrize("path", FOUND, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_inputs_that_failed(path: Path) -> None:
    if path.parent.name not in TARGETS:
        pytest.skip("onnx is not installed")
    TARGETS[path.parent.name](path.read_bytes())


def test_the_oracle_sees_what_it_is_for() -> None:
    """A loader that reshapes before it checks, one that believes a size, one that hangs."""
    import numpy as np

    from tests.fuzz import oracle

    with pytest.raises(AssertionError, match="not a documented error"), oracle.refusals("file"):
        np.zeros(3).reshape(2, 2)
    with pytest.raises(MemoryError), oracle.bounds():
        np.zeros(1 << 33, np.uint8)
    with pytest.raises(TimeoutError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "SECONDS", 1)
        with oracle.bounds():
            while True:
                pass

"""The numbered cases that run on every backend, on the GPU: the same tests, with the layer on the device.

They speak NumPy; GpuLayer takes their arrays to the device and back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from _pytest.mark import ParameterSet
from numpy.typing import NDArray

import fp4linear
from tests.cases import test_cases_a, test_cases_b, test_cases_c, test_cases_d, test_cases_e
from tests.gpu import device
from tests.gpu.device import to_device, to_host, torch

pytestmark = pytest.mark.gpu

MODULES = (test_cases_a, test_cases_b, test_cases_c, test_cases_d, test_cases_e)
NOT_HERE = {
    "test_E1_float32_gives_float32": "a GPU takes 16-bit x",
}


class GpuLayer:
    """A layer on the device that takes and gives NumPy arrays."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def forward(self, x: NDArray, *, out: NDArray | None = None) -> NDArray:
        assert isinstance(x, np.ndarray)
        if out is None:
            return to_host(self.layer.forward(to_device(x)))
        held = to_device(out)
        self.layer.forward(to_device(x), out=held)
        out[...] = to_host(held)
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


class GpuBackend:
    """Stands in for tests.backends.Backend."""

    path = "auto"
    isa = None

    def layer(self, *arguments: Any, **options: Any) -> GpuLayer:
        return GpuLayer(fp4linear.Fp4Linear(*arguments, device=device.DEVICE, **options))


def axes_of(test: Any) -> list[tuple[list[str], list[tuple[Any, ...]]]]:
    """(names, values of them) of each parametrisation of a test."""
    axes = []
    for mark in getattr(test, "pytestmark", []):
        if mark.name != "parametrize":
            continue
        names, choices = mark.args[:2]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        values = [choice.values if isinstance(choice, ParameterSet) else choice for choice in choices]
        if len(names) == 1:
            values = [
                value if isinstance(choice, ParameterSet) else (value,)
                for value, choice in zip(values, choices, strict=True)
            ]
        axes.append((names, [tuple(value) for value in values]))
    return axes


def runs() -> Iterator[Any]:
    for module in MODULES:
        for name, test in vars(module).items():
            if not name.startswith("test_") or name in NOT_HERE:
                continue
            axes = axes_of(test)
            if not any("backend" in names for names, _ in axes):
                continue
            axes = [(names, values) for names, values in axes if "backend" not in names]
            for choice in itertools.product(*(values for _, values in axes)):
                arguments = {
                    key: value
                    for (names, _), values in zip(axes, choice, strict=True)
                    for key, value in zip(names, values, strict=True)
                }
                if arguments.get("dtype") != "float32":
                    yield name, test, arguments


RUNS: dict[str, list[tuple[Any, dict[str, Any]]]] = {}
for _name, _test, _arguments in runs():
    RUNS.setdefault(_name.removeprefix("test_"), []).append((_test, _arguments))


@pytest.mark.parametrize("name", list(RUNS))
def test_case(name: str) -> None:
    failures = []
    for test, arguments in RUNS[name]:
        try:
            test(backend=GpuBackend(), **arguments)
        except Exception as error:
            failures.append((arguments, error))
    torch.cuda.synchronize()
    if failures:
        arguments, error = failures[0]
        count = f"{len(failures)} of {len(RUNS[name])} runs failed"
        raise AssertionError(f"{count}, the first with {arguments}: {error}") from error
    assert RUNS[name]

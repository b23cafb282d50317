"""What runs here: instruction sets and paths of the host, as parameters of the tests."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

import fp4linear
from fp4linear import _core

ISAS: list[str] = [isa["name"] for isa in _core.isas() if isa["runs_here"]]
ALL_ISAS: list[str] = [isa["name"] for isa in _core.isas()]
CPU_PATHS = ["cpu_gemv", "cpu_gemm"]


class Backend(NamedTuple):
    """One way to run a layer on the host. isa None: the library's own choice."""

    path: str = "auto"
    isa: str | None = None

    def layer(self, *arguments: Any, **options: Any) -> fp4linear.Fp4Linear:
        return fp4linear.Fp4Linear(*arguments, path=self.path, isa=self.isa, **options)

    def __str__(self) -> str:
        return f"{self.path}-{self.isa or 'best'}"


BACKENDS = [Backend("auto"), *(Backend(path, isa) for isa in ISAS for path in CPU_PATHS)]
each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=str)


def check_that_it_ran(layer: fp4linear.Fp4Linear, backend: Backend) -> None:
    """The forced path and instruction set are the ones that the calling thread's last forward really used."""
    if backend.path != "auto":
        assert layer.last_path == backend.path
    if backend.isa is not None:
        assert layer.isa == backend.isa
        assert _core.last_isa() == backend.isa

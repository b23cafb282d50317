"""`fp4linear selftest`: its checks pass where the arithmetic is right, and find it where it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fp4linear
from fp4linear import _core, _selftest
from fp4linear.cli import app
from fp4linear.cli.selftest import CANNOT_RUN, FAILED

PATH = "native_emulated"


@pytest.fixture
def _few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_selftest, "SHAPES", ((9, 32, 32), (129, 160, 96)))
    monkeypatch.setattr(_selftest, "REPEATS", 2)


def failures() -> set[str]:
    return {result.name.removeprefix("bfloat16 ") for result in _selftest.checks("cpu", PATH) if not result.passed}


@pytest.mark.usefixtures("_few_shapes")
def test_all_pass_with_the_emulated_path(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ["selftest", "--native", "--emulate", "--device", "cpu", "--json", str(report)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    held = json.loads(report.read_text())
    names = [check["name"] for check in held["checks"]]
    assert len(names) == len(set(names)) == 2 * (2 + 9) + 1 and all(check["passed"] for check in held["checks"])
    assert held["path"] == PATH and held["fp4linear"] == fp4linear.__version__
    assert all(value > 0 for value in held["milliseconds"].values()) and held["milliseconds"]


def swapped_nibbles(b: Any, scales: Any, scale2: Any, bias: Any) -> tuple[Any, ...]:
    return (b >> 4) | (b << 4), scales, scale2, bias


def one_scale_moved(b: Any, scales: Any, scale2: Any, bias: Any) -> tuple[Any, ...]:
    return b, np.concatenate([scales[-1:], scales[:-1]]), scale2, bias


def two_rows_exchanged(b: Any, scales: Any, scale2: Any, bias: Any) -> tuple[Any, ...]:
    order = np.arange(len(b))
    order[[0, -1]] = order[[-1, 0]]
    return b[order], scales, scale2, bias


def no_bias(b: Any, scales: Any, scale2: Any, bias: Any) -> tuple[Any, ...]:
    return b, scales, scale2, None


def one_factor(b: Any, scales: Any, scale2: Any, bias: Any) -> tuple[Any, ...]:
    return b, scales, np.mean(scale2), bias


@pytest.mark.usefixtures("_few_shapes")
@pytest.mark.parametrize(("fault", "found"), [
    (swapped_nibbles, "every position of x and of the weight"),
    (one_scale_moved, "every scale byte of the weight"),
    (two_rows_exchanged, "every position of x and of the weight"),
    (no_bias, "bias and a factor a row"),
    (one_factor, "bias and a factor a row"),
])  # fmt: skip
def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch, fault: Any, found: str) -> None:
    def wrong(b: Any, scales: Any, scale2: Any, bias: Any = None, **options: Any) -> Any:
        return right(*fault(b, scales, scale2, bias), **options)

    right = fp4linear.Fp4Linear
    monkeypatch.setattr(fp4linear, "Fp4Linear", wrong)
    assert found in failures()


@pytest.mark.usefixtures("_few_shapes")
def test_scales_of_x_that_are_mixed_up_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """x whose blocks are exchanged: every value is still there, with the scale of another block."""

    def exchanged(backend: Any, path: str, layer: Any, x: Any) -> Any:
        return forward(backend, path, layer, np.ascontiguousarray(np.roll(x, 16, axis=-1)))

    forward = _selftest._forward
    monkeypatch.setattr(_selftest, "_forward", exchanged)
    assert "scales of x" in failures()


def test_where_the_path_can_not_run() -> None:
    if _core.cuda_info()["devices"] and _selftest.unavailable("cuda", "native_nvfp4") is None:
        pytest.skip("this GPU has the path")
    result = CliRunner().invoke(app, ["selftest", "--native"])
    assert result.exit_code == CANNOT_RUN != FAILED
    assert "native_nvfp4 can't run on cuda: " in result.output
    assert "the weight is on the CPU" in str(_selftest.unavailable("cpu", "native_nvfp4"))
    with pytest.raises(ValueError, match="--native"):
        CliRunner().invoke(app, ["selftest"], catch_exceptions=False)


def test_native_is_an_argument_of_a_layer() -> None:
    b, scales = np.zeros((32, 16), np.uint8), np.zeros((32, 2), np.uint8)
    for native in (None, False, True):
        layer = fp4linear.Fp4Linear(b, scales, 1.0, device="cpu", native=native)
        assert layer.plan(64).path == "cpu_gemm"  # it is for GPUs
        keywords = layer.__reduce__()[1][5]
        assert keywords["native"] is bool(native) or native is None
    with pytest.raises(TypeError):
        fp4linear.Fp4Linear(b, scales, 1.0, native="yes")  # type: ignore[arg-type]


def test_what_the_build_has_for_native_nvfp4() -> None:
    found = _core.native_kernels(90, 64, 64, 16)
    assert found["built"] is False and found["reason"]
    with pytest.raises(ValueError, match=">= 1"):
        _core.native_kernels(120, 0, 64, 16)

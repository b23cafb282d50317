"""Each FP4LINEAR_* switch: its default, its effect, its strict parsing."""

from __future__ import annotations

import numpy as np
import pytest

import fp4linear
from fp4linear import _core
from tests import reference
from tests.backends import ISAS
from tests.child import run_child

SWITCHES = {
    "FP4LINEAR_NATIVE_NVFP4": "bool",
    "FP4LINEAR_GEMV_TENSOR_CORE": "bool",
    "FP4LINEAR_GEMV_ROW_TILING": "bool",
    "FP4LINEAR_LOG": "bool",
    "FP4LINEAR_GEMV_MAX_M": "integer",
    "FP4LINEAR_NUM_THREADS": "integer",
    "FP4LINEAR_CPU_ISA": "name",
    "FP4LINEAR_PATH": "name",
}
X = np.ones((3, 32), np.float16)


@pytest.fixture(autouse=True)
def no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SWITCHES:
        monkeypatch.delenv(name, raising=False)


def layer(**options: object) -> fp4linear.Fp4Linear:
    return fp4linear.Fp4Linear(*reference.make(8, 32, 1), 1.0, **options)  # type: ignore[arg-type]


def in_force() -> dict[str, str]:
    return {switch["name"]: switch["value"] for switch in _core.environment()}


def test_every_switch_is_in_the_table() -> None:
    table = _core.environment()
    assert {switch["name"] for switch in table} == set(SWITCHES)
    assert all(switch["takes"] and switch["meaning"] for switch in table)


def test_defaults() -> None:
    values = in_force()
    assert values["FP4LINEAR_NATIVE_NVFP4"] == "0"
    assert values["FP4LINEAR_GEMV_TENSOR_CORE"] == "1"
    assert values["FP4LINEAR_GEMV_ROW_TILING"] == "1"
    assert values["FP4LINEAR_LOG"] == "0"
    assert values["FP4LINEAR_PATH"] == "auto"


@pytest.mark.parametrize("name", [name for name, kind in SWITCHES.items() if kind == "bool"])
@pytest.mark.parametrize(("text", "value"), [("0", "0"), ("1", "1"), ("true", "1"), ("false", "0")])
def test_booleans(monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: str) -> None:
    monkeypatch.setenv(name, text)
    assert in_force()[name] == value
    layer().forward(X)


BAD = {
    "bool": ["", "2", "yes", "no", "on", "True", "FALSE", " 1", "1 ", "01", "t"],
    "integer": ["", "-1", "1.5", "four", "1x", " 2", "+3", "0x10", "99999999999999999999"],
    "name": ["nothing", "CPU_GEMV", " portable"],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, kind in SWITCHES.items() for text in BAD[kind]])
def test_anything_else_is_an_error_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    working = layer()
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=name) as refused:
        layer().forward(X)
    assert repr(text)[1:-1] in str(refused.value)
    monkeypatch.delenv(name)
    assert working.forward(X).shape == layer().forward(X).shape == (3, 8)


def test_no_threads_is_not_a_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP4LINEAR_NUM_THREADS", "0")
    with pytest.raises(ValueError, match="FP4LINEAR_NUM_THREADS"):
        layer()


@pytest.mark.parametrize("path", ["cpu_gemv", "cpu_gemm"])
def test_path(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv("FP4LINEAR_PATH", path)
    forced = layer()
    for m in (1, 100):
        forced.forward(np.ones((m, 32), np.float16))
        assert forced.last_path == path
    other = layer(path="cpu_gemm" if path == "cpu_gemv" else "cpu_gemv")  # an argument wins
    other.forward(X)
    assert other.last_path != path


def test_a_gpu_path_from_the_environment_is_an_error_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP4LINEAR_PATH", "gemv_scalar")
    with pytest.raises(ValueError, match="gemv_scalar"):
        layer().forward(X)


def test_isa(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    monkeypatch.setenv("FP4LINEAR_CPU_ISA", isa)
    forced = layer()
    assert forced.isa == isa
    forced.forward(X)
    assert _core.last_isa() == isa
    assert layer(isa=ISAS[-1]).isa == ISAS[-1]  # an argument wins


def test_gemv_max_m(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP4LINEAR_GEMV_MAX_M", "3")
    limited = layer()
    assert [limited.plan(m).path for m in (3, 4)] == ["cpu_gemv", "cpu_gemm"]
    monkeypatch.setenv("FP4LINEAR_GEMV_MAX_M", "0")
    assert layer().plan(1).path == "cpu_gemm"


def test_log_prints_the_plan_of_a_call() -> None:
    code = """
        import numpy as np, fp4linear
        from tests import reference
        layer = fp4linear.Fp4Linear(*reference.make(8, 32, 1), 1.0)
        layer.forward(np.ones((3, 32), np.float16))
    """
    assert run_child(code).stderr == ""
    assert run_child(code, FP4LINEAR_LOG="0").stderr == ""
    logged = run_child(code, FP4LINEAR_LOG="1").stderr
    for part in ("fp4linear", "M = 3", "N = 8", "K = 32", "float16", "cpu_gemv"):
        assert part in logged


def test_a_malformed_switch_does_not_break_the_import() -> None:
    code = """
        import fp4linear
        from fp4linear import _core
        from tests import reference
        for call in (_core.environment, lambda: fp4linear.Fp4Linear(*reference.make(8, 32, 1), 1.0)):
            try: call()
            except ValueError as error: print(error)
    """
    lines = run_child(code, FP4LINEAR_LOG="loud").stdout.splitlines()
    assert len(lines) == 2
    assert all("FP4LINEAR_LOG" in line and "loud" in line for line in lines)

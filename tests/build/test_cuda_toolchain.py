"""The rule that decides whether a build has CUDA, for which devices and with which compiler."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "build_backend" / "cuda_toolchain.py"
pytestmark = pytest.mark.skipif(not SOURCE.exists(), reason="needs the source tree")


@pytest.fixture(scope="module")
def toolchain() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cuda_toolchain", SOURCE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def make_nvcc(folder: Path, release: str) -> Path:
    folder.mkdir(parents=True)
    path = folder / "nvcc"
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'\n")
    path.chmod(0o755)
    return path


def no_gpu() -> list[str]:
    return []


def never_asked() -> list[str]:
    raise AssertionError("the machine was searched for GPUs, and the switches had decided")


def test_auto_without_gpu_builds_for_the_cpu_and_says_why(toolchain):
    decision = toolchain.decide("auto", (), no_gpu)
    assert not decision.build
    assert "no GPU" in decision.reason
    assert "FP4LINEAR_CUDA_ARCHITECTURES" in decision.reason


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [("7.5", "75-real"), ("8.9", "89-real"), ("9.0", "90a-real"), ("10.3", "103a-real"), ("12.0", "120a-real")],
)
@pytest.mark.parametrize("mode", ["auto", "on"])
def test_a_gpu_is_built_for(toolchain, mode, capability, architecture):
    decision = toolchain.decide(mode, (), lambda: [capability, capability])
    assert decision.build
    assert decision.architectures == (architecture,)
    assert capability in decision.reason


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_named_architectures_win(toolchain, mode):
    decision = toolchain.decide(mode, ("90a",), never_asked)
    assert decision.build
    assert decision.required
    assert decision.architectures == ("90a",)


def test_off_wins_over_everything(toolchain):
    assert not toolchain.decide("off", ("90a",), never_asked).build


def test_on_without_gpu_builds_every_architecture_and_ptx(toolchain):
    decision = toolchain.decide("on", (), no_gpu)
    assert decision.build
    assert decision.required
    real = [name for name in decision.architectures if name.endswith("-real")]
    assert [name.removesuffix("-real") for name in real] == ["75", "80", "86", "89", "90a", "100a", "120a"]
    assert any(name.endswith("-virtual") for name in decision.architectures)


@pytest.mark.parametrize("text", ["ON", "1", "true", "", "cuda", " on"])
def test_mode_is_strict(toolchain, text):
    with pytest.raises(ValueError, match=r"FP4LINEAR_CUDA: got .*expected one of auto, on, off"):
        toolchain.parse_mode(text)


@pytest.mark.parametrize("text", ["sm_90", "90b", "9", "native", "80;hopper", "90a-fake"])
def test_architectures_are_strict(toolchain, text):
    with pytest.raises(ValueError, match="FP4LINEAR_CUDA_ARCHITECTURES: got"):
        toolchain.parse_architectures(text)


def test_architectures_separators(toolchain):
    assert toolchain.parse_architectures("80; 90a,120a-real 100f") == ("80", "90a", "120a-real", "100f")
    assert toolchain.parse_architectures("") == ()
    assert toolchain.parse_architectures("all") == toolchain.ALL_ARCHITECTURES


def test_system_nvcc_prefers_the_environment_and_passes_over_an_old_one(toolchain, tmp_path):
    old = make_nvcc(tmp_path / "old" / "bin", "12.4")
    new = make_nvcc(tmp_path / "new" / "bin", "12.8")
    other = make_nvcc(tmp_path / "other" / "bin", "13.1")
    environment = {"CUDACXX": str(old), "CUDA_HOME": str(tmp_path / "new"), "PATH": str(other.parent)}
    nvcc, passed_over = toolchain.system_nvcc(environment)
    assert nvcc.path == new
    assert nvcc.version == (12, 8)
    assert nvcc.wheel_root is None
    assert passed_over == [f"{old} is 12.4, older than 12.8"]


def test_nvcc_comes_from_pypi_only_where_cuda_is_wanted_and_missing(toolchain, monkeypatch):
    monkeypatch.setattr(toolchain, "find_gpus", no_gpu)
    monkeypatch.setattr(toolchain, "system_nvcc", lambda: (None, []))
    assert toolchain.compiler_requirements("auto", "") == []
    assert toolchain.compiler_requirements("off", "90a") == []
    assert toolchain.compiler_requirements("on", "") == [toolchain.NVCC_REQUIREMENT, toolchain.CUTLASS_REQUIREMENT]
    assert toolchain.compiler_requirements("auto", "90a") == [toolchain.NVCC_REQUIREMENT]
    monkeypatch.setattr(toolchain, "system_nvcc", lambda: (toolchain.Nvcc(Path("/cuda/bin/nvcc"), (13, 0)), []))
    assert toolchain.compiler_requirements("on", "") == [toolchain.CUTLASS_REQUIREMENT]
    assert toolchain.compiler_requirements("on", "90a") == []


def test_cutlass_comes_for_the_targets_of_blackwell_alone(toolchain, monkeypatch):
    monkeypatch.setattr(toolchain, "system_nvcc", lambda: (toolchain.Nvcc(Path("/cuda/bin/nvcc"), (13, 0)), []))
    for targets in ("120a", "120a-real", "121f", "75;100a", "103a-real", "all"):
        assert toolchain.compiler_requirements("on", targets) == [toolchain.CUTLASS_REQUIREMENT], targets
    # A plain target has no block-scaled product, a virtual one no machine code.
    for targets in ("75;80;90a", "120", "120-real", "100-virtual", "110a", "120a-virtual"):
        assert toolchain.compiler_requirements("on", targets) == [], targets


def test_wheel_layout_is_recognised_wherever_nvcc_was_found(toolchain, tmp_path):
    path = make_nvcc(tmp_path / "cu13" / "bin", "13.0")
    (tmp_path / "cu13" / "lib").mkdir()
    (tmp_path / "cu13" / "lib" / "libcudart_static.a").touch()
    assert toolchain.Nvcc(path, (13, 0)).wheel_root == tmp_path / "cu13"
    (tmp_path / "cu13" / "lib64").mkdir()
    assert toolchain.Nvcc(path, (13, 0)).wheel_root is None


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SOURCE), *arguments], capture_output=True, text=True, check=False)


def test_cmake_reads_the_decision():
    answer = run("--mode=off")
    assert answer.returncode == 0
    assert answer.stdout.splitlines() == ["build=0", "reason=FP4LINEAR_CUDA=off"]


def test_cmake_gets_a_message_for_a_bad_switch():
    answer = run("--mode=maybe")
    assert answer.returncode == 1
    assert answer.stdout == ""
    assert "FP4LINEAR_CUDA: got 'maybe', expected one of auto, on, off" in answer.stderr

"""The suite that compute-sanitizer runs on a GPU names every kernel there is; what runs needs no GPU to be checked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.gpu.kernels import KERNELS, Kernel, Machine, missing

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("prepare", "gemv_tensor_core", "gemv_scalar", "gemm_fused", "dequant_cublas", "native_emulated")
H200 = Machine(clusters=True, wgmma=True)
A100 = Machine(clusters=False, wgmma=False)


def sources() -> set[tuple[str, str]]:
    """(file, name) of every __global__ function."""
    found = set()
    for path in sorted((ROOT / "cuda").rglob("*.cu*")):
        for match in re.finditer(
            r"__global__\s[^({]*?(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?(\w+)\(", path.read_text()
        ):
            found.add((path.relative_to(ROOT / "cuda").as_posix(), match.group(1)))
    return found


def test_every_kernel_has_a_part_or_a_reason() -> None:
    named = {(kernel.source, kernel.name) for kernel in KERNELS}
    assert sources() == named
    for kernel in KERNELS:
        assert set(kernel.parts) <= set(PARTS) and bool(kernel.parts) != bool(kernel.why), kernel


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
def test_the_script_runs_every_part(tool: str) -> None:
    script = (ROOT / "tools/gpu_check.sh").read_text().replace("\\\n", " ")
    (line,) = re.findall(rf"(?:run_tool|with_wheel \S+) {tool} ([a-z_ ]+) -- +--tool {tool}", script)
    # cuBLAS's kernels have races and uninitialised reads of their own.
    assert line.split() == [part for part in PARTS if tool == "memcheck" or part != "dequant_cublas"]


@pytest.mark.parametrize("machine", [H200, A100], ids=["wgmma", "mma"])
@pytest.mark.parametrize("part", PARTS)
def test_a_kernel_that_did_not_run_is_named(part: str, machine: Machine) -> None:
    wanted = [k for k in KERNELS if part in k.parts and k.seen and machine.runs(k)]
    names = {k: example(k) for k in wanted}
    assert missing(part, set(names.values()), machine) == []
    for left_out in wanted:
        rest = {name for kernel, name in names.items() if kernel != left_out}
        assert missing(part, rest, machine) == [f"{left_out.source}: {left_out.pattern}"]


def example(kernel: Kernel) -> str:
    """A name that the pattern matches."""
    first = re.sub(r"\(\?:(\w+)[^)]*\)", r"\1", kernel.pattern)
    return "_ZN9fp4linear4cuda" + first.replace(r"\w+", "NS0_6device7Float16")


def test_what_a_machine_runs() -> None:
    def machine(sm: int, architectures: str) -> Machine:
        return Machine.of({"devices": [{"sm": sm}], "architectures": architectures})

    assert machine(90, "75;80;90a;120a") == H200
    assert machine(90, "80-virtual") == A100
    assert machine(90, "90") == Machine(clusters=True, wgmma=False)
    assert machine(120, "75;80;90a;120a") == Machine(clusters=True, wgmma=False)
    assert machine(89, "75;80;90a;120a") == A100

"""Decides whether this build has CUDA, for which architectures and with which nvcc.

One implementation for the two that must agree: the build backend, which asks pip for a compiler where none is
installed, and CMake, which runs this file and reads ``KEY=VALUE`` lines. Standard library only.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

# One release of all five: nvidia-cuda-nvcc alone resolves to a newer nvvm, which it cannot run.
NVCC_REQUIREMENT = "cuda-toolkit[nvcc,nvvm,crt,cudart,cccl]==13.0.2"
# Headers of the native NVFP4 kernels, which only these targets have.
CUTLASS_REQUIREMENT = "nvidia-cutlass==4.2.0.0"
_NATIVE_TARGET = re.compile(r"1[02][0-9][af](-real)?")
# The first release that knows sm_100a, sm_120a and the FP4 types.
MINIMUM_NVCC = (12, 8)
# Everything from Turing on. 100-virtual is the PTX that later devices compile: an "a" target runs on exactly its own
# architecture, so PTX of 100 is what reaches 10.3, 11.0, 12.1 and later.
ALL_ARCHITECTURES = (
    "75-real",
    "80-real",
    "86-real",
    "89-real",
    "90a-real",
    "100a-real",
    "120a-real",
    "100-virtual",
)
# From 9.0 on, wgmma, tcgen05 and block-scaled mma exist in the architecture-specific target only.
FIRST_SPECIFIC_SM = 90

MODES = ("auto", "on", "off")
_ARCHITECTURE = re.compile(r"[1-9][0-9]{1,2}[af]?(-real|-virtual)?")


@dataclass(frozen=True)
class Nvcc:
    """A usable CUDA compiler."""

    path: Path
    version: tuple[int, int]

    @property
    def wheel_root(self) -> Path | None:
        """The cu13 folder of the PyPI wheels, which keep their libraries in lib; None for a toolkit, with its lib64."""
        root = self.path.parent.parent
        return root if (root / "lib" / "libcudart_static.a").exists() and not (root / "lib64").exists() else None

    def __str__(self) -> str:
        origin = "from PyPI" if self.wheel_root else "of the system"
        return f"nvcc {self.version[0]}.{self.version[1]} {origin} ({self.path})"


@dataclass(frozen=True)
class Decision:
    """What the switches and the machine ask for, before a compiler is looked for."""

    build: bool
    architectures: tuple[str, ...]
    reason: str
    # False where only a GPU on this machine asks for CUDA: then a missing compiler is no error.
    required: bool = False


def parse_mode(text: str) -> str:
    """FP4LINEAR_CUDA: exactly auto, on or off."""
    if text not in MODES:
        raise ValueError(f"FP4LINEAR_CUDA: got {text!r}, expected one of auto, on, off")
    return text


def parse_architectures(text: str) -> tuple[str, ...]:
    """FP4LINEAR_CUDA_ARCHITECTURES: CMake architectures ("80;90a;120a"; commas and spaces too), or "all"."""
    if text.strip() == "all":
        return ALL_ARCHITECTURES
    names = tuple(name for name in re.split(r"[;,\s]+", text) if name)
    for name in names:
        if not _ARCHITECTURE.fullmatch(name):
            raise ValueError(
                f"FP4LINEAR_CUDA_ARCHITECTURES: got {name!r} in {text!r}, expected names such as 80, 90a or 120a-real"
            )
    return names


def architecture_of(compute_capability: str) -> str:
    """The target that uses all of a device: "8.6" -> "86-real", "9.0" -> "90a-real"."""
    major, minor = compute_capability.strip().split(".")
    sm = int(major) * 10 + int(minor)
    return f"{sm}{'a' if sm >= FIRST_SPECIFIC_SM else ''}-real"


def decide(mode: str, architectures: tuple[str, ...], find_gpus: Callable[[], list[str]]) -> Decision:
    """The rule. ``find_gpus`` returns compute capabilities ("9.0") and is called only where they matter."""
    if mode == "off":
        return Decision(False, (), "FP4LINEAR_CUDA=off")
    if architectures:
        return Decision(True, architectures, "FP4LINEAR_CUDA_ARCHITECTURES is set", required=True)
    gpus = find_gpus()
    if gpus:
        found = tuple(dict.fromkeys(architecture_of(gpu) for gpu in gpus))
        where = "this machine has a GPU of compute capability " + ", ".join(dict.fromkeys(gpus))
        return Decision(True, found, where, required=mode == "on")
    if mode == "on":
        return Decision(True, ALL_ARCHITECTURES, "FP4LINEAR_CUDA=on, and no GPU here to build for", required=True)
    return Decision(False, (), "FP4LINEAR_CUDA=auto, no GPU here and FP4LINEAR_CUDA_ARCHITECTURES is not set")


def compiler_requirements(mode: str, architectures: str) -> list[str]:
    """What pip has to install before a build with these switches: nvcc, where CUDA is wanted and no nvcc is here, and
    CUTLASS's headers, where a target is a Blackwell GPU's own.
    """
    decision = decide(parse_mode(mode), parse_architectures(architectures), find_gpus)
    if not decision.build:
        return []
    native = any(_NATIVE_TARGET.fullmatch(name) for name in decision.architectures)
    return ([NVCC_REQUIREMENT] if system_nvcc()[0] is None else []) + ([CUTLASS_REQUIREMENT] if native else [])


def find_gpus() -> list[str]:
    """Compute capabilities of the devices here: nvidia-smi's answer, else the driver's. No context is made."""
    smi = shutil.which("nvidia-smi")
    if smi:
        command = [smi, "--query-gpu=compute_cap", "--format=csv,noheader"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired):
            pass
        else:
            capabilities = [line.strip() for line in answer.stdout.splitlines()]
            if answer.returncode == 0 and capabilities and all(re.fullmatch(r"\d+\.\d", c) for c in capabilities):
                return capabilities
    return _gpus_of_driver()


def _gpus_of_driver() -> list[str]:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count, value = ctypes.c_int(), ctypes.c_int()
        if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
            return []
        capabilities = []
        for ordinal in range(count.value):
            numbers = []
            for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
                if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, ordinal) != 0:
                    return []
                numbers.append(value.value)
            capabilities.append(f"{numbers[0]}.{numbers[1]}")
        return capabilities
    except (OSError, AttributeError):
        return []


def system_nvcc(environment: Mapping[str, str] = os.environ) -> tuple[Nvcc | None, list[str]]:
    """The first new enough nvcc of CUDACXX, CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda, and what it passed over."""
    candidates = [environment.get("CUDACXX", "")]
    candidates += [f"{environment[name]}/bin/nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if environment.get(name)]
    candidates += ["nvcc", "/usr/local/cuda/bin/nvcc"]
    passed_over: list[str] = []
    for candidate in dict.fromkeys(filter(None, candidates)):
        path = shutil.which(candidate, path=environment.get("PATH", os.defpath))
        if path is None:
            continue
        version = nvcc_version(Path(path))
        if version is None:
            passed_over.append(f"{path} does not run")
        elif version < MINIMUM_NVCC:
            passed_over.append(f"{path} is {version[0]}.{version[1]}, older than {MINIMUM_NVCC[0]}.{MINIMUM_NVCC[1]}")
        else:
            return Nvcc(Path(path), version), passed_over
    return None, passed_over


def wheel_nvcc() -> Nvcc | None:
    """The nvcc that PyPI's wheels put into the ``nvidia`` namespace; torch fills cu13 too, but without a compiler."""
    spec = importlib.util.find_spec("nvidia")
    for entry in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(entry) / "cu13" / "bin" / "nvcc"
        version = nvcc_version(path)
        if version is not None and version >= MINIMUM_NVCC:
            return Nvcc(path, version)
    return None


def nvcc_version(path: Path) -> tuple[int, int] | None:
    """(13, 0), or None where the file is missing or does not run."""
    try:
        answer = subprocess.run([str(path), "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"release (\d+)\.(\d+)", answer.stdout)
    return (int(match[1]), int(match[2])) if match else None


def main(arguments: list[str]) -> int:
    """What CMake reads: KEY=VALUE lines on standard output, or a message on standard error and status 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", required=True)
    parser.add_argument("--architectures", default="")
    options = parser.parse_args(arguments)
    try:
        decision = decide(parse_mode(options.mode), parse_architectures(options.architectures), find_gpus)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1

    reason, nvcc = decision.reason, None
    if decision.build:
        nvcc, passed_over = system_nvcc()
        nvcc = nvcc or wheel_nvcc()
        if nvcc is None:
            minimum = f"{MINIMUM_NVCC[0]}.{MINIMUM_NVCC[1]}"
            missing = "; ".join([f"no nvcc >= {minimum} found", *passed_over])
            if decision.required:
                print(f'{missing}. Install one with: pip install "{NVCC_REQUIREMENT}"', file=sys.stderr)
                return 1
            reason = f"{decision.reason}, but {missing}"

    print(f"build={int(nvcc is not None)}")
    print(f"reason={reason}")
    if nvcc is not None:
        print(f"architectures={';'.join(decision.architectures)}")
        print(f"nvcc={nvcc.path}")
        print(f"wheel_root={nvcc.wheel_root or ''}")
        print(f"compiler={nvcc}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

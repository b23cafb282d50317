"""What a shared library needs and offers, as binutils and CUDA's tools read it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# glibc, the loader and the two run-time libraries of GCC: what every Linux with the compiler's C++ library has.
SYSTEM_LIBRARIES = {
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "librt.so.1",
    "libpthread.so.0",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
    "libgcc_s.so.1",
    "libstdc++.so.6",
}


def tool(name: str) -> str:
    """The path of a tool on PATH, beside this Python or in its nvidia wheels; skips the test where it is missing."""
    candidates = [shutil.which(name), shutil.which(name, path=str(Path(sys.executable).parent))]
    candidates += [str(path) for folder in sys.path for path in Path(folder).glob(f"nvidia/*/bin/{name}")]
    found = next(filter(None, candidates), None)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def needed_libraries(library: Path) -> set[str]:
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", _run(tool("readelf"), "-dW", str(library))))


def search_path(library: Path) -> list[str]:
    """RPATH and RUNPATH."""
    return re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.+)\]", _run(tool("readelf"), "-dW", str(library)))


def exported_symbols(library: Path) -> set[str]:
    lines = _run(tool("readelf"), "--dyn-syms", "-W", str(library)).splitlines()
    rows = [line.split() for line in lines]
    return {row[7] for row in rows if len(row) > 7 and row[4] in ("GLOBAL", "WEAK") and row[6] != "UND"}


def sass_architectures(library: Path) -> set[str]:
    """{"sm_90a"}: the architectures that the module holds machine code for."""
    return set(re.findall(r"\.(sm_\w+)\.cubin", _run(tool("cuobjdump"), "--list-elf", str(library))))


def ptx_architectures(library: Path) -> set[str]:
    return set(re.findall(r"\.(sm_\w+)\.ptx", _run(tool("cuobjdump"), "--list-ptx", str(library))))


def kernels(library: Path, architecture: str) -> set[str]:
    """Mangled names of the kernels in the machine code for an architecture."""
    listing = _run(tool("cuobjdump"), "--dump-resource-usage", "--gpu-architecture", architecture, str(library))
    return set(re.findall(r"^ Function (\S+):$", listing, re.MULTILINE))


def stack_bytes(library: Path, architecture: str) -> dict[str, int]:
    """Kernels, and the bytes of local memory of a thread on its stack: where registers are spilled to."""
    listing = _run(tool("cuobjdump"), "--dump-resource-usage", "--gpu-architecture", architecture, str(library))
    return {name: int(stack) for name, stack in re.findall(r"^ Function (\S+):\n.*?STACK:(\d+)", listing, re.MULTILINE)}


def sass(library: Path, architecture: str, kernel: str) -> str:
    """The machine code of a kernel, by its mangled name."""
    return _run(
        tool("cuobjdump"), "--dump-sass", "--gpu-architecture", architecture, "--function", kernel, str(library)
    )

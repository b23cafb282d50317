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


def _usage(library: Path) -> list[tuple[str, str]]:
    """Architecture and resource usage of each unit of machine code. The names are exact: lists of ELF files and filters
    by architecture do not tell sm_120f from sm_120.
    """
    listing = _run(tool("cuobjdump"), "--dump-resource-usage", str(library))
    parts = re.split(r"^Fatbin (elf|ptx) code:$", listing, flags=re.MULTILINE)
    units = [part for kind, part in zip(parts[1::2], parts[2::2], strict=True) if kind == "elf"]
    return [(re.findall(r"^arch = (\S+)$", unit, re.MULTILINE)[0], unit) for unit in units]


def sass_architectures(library: Path) -> set[str]:
    """{"sm_90a", "sm_120f"}: the architectures that the module holds machine code for."""
    return {name for name, _ in _usage(library)}


def ptx_architectures(library: Path) -> set[str]:
    return set(re.findall(r"\.(sm_\w+)\.ptx", _run(tool("cuobjdump"), "--list-ptx", str(library))))


def kernels(library: Path, architecture: str) -> set[str]:
    """Mangled names of the kernels in the machine code for an architecture."""
    return set(stack_bytes(library, architecture))


def stack_bytes(library: Path, architecture: str) -> dict[str, int]:
    """Kernels, and the bytes of local memory of a thread on its stack: where registers are spilled to."""
    pattern = re.compile(r"^ Function (\S+):\n.*?STACK:(\d+)", re.MULTILINE)
    units = [unit for name, unit in _usage(library) if name == architecture]
    return {name: int(stack) for unit in units for name, stack in pattern.findall(unit)}


def all_sass(library: Path, architecture: str) -> dict[str, str]:
    """The machine code of every kernel, by its mangled name."""
    dump = _run(tool("cuobjdump"), "--dump-sass", "--gpu-architecture", architecture, str(library))
    parts = re.split(r"^\s*Function : (\S+)\n", dump, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def sass(library: Path, architecture: str, kernel: str) -> str:
    """The machine code of a kernel, by its mangled name."""
    return _run(
        tool("cuobjdump"), "--dump-sass", "--gpu-architecture", architecture, "--function", kernel, str(library)
    )

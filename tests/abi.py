"""Compares a foreign C ABI that this project declares itself with the published header."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest


def header_of(package: str, path: str) -> Path:
    """A header that an installed package may ship."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / path


def compile_check(folder: Path, check: str, theirs: Path, ours: Path, broken: str) -> subprocess.CompletedProcess[str]:
    """Compiles `check` with THEIRS, OURS and BROKEN replaced. Skips the test where there is no compiler."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = folder / "check.cc"
    source.write_text(check.replace("THEIRS", f'"{theirs}"').replace("OURS", f'"{ours}"').replace("BROKEN", broken))
    return subprocess.run(
        [compiler, "-std=c++20", "-fsyntax-only", "-Wno-invalid-offsetof", source], capture_output=True, text=True
    )

"""Finds headers that PyPI packages carry, for CMake: prints KEY=PATH lines, nothing for what is not installed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path


def package_folders(name: str) -> Iterator[Path]:
    """Where a package lies, without importing it. A namespace package has several folders."""
    spec = importlib.util.find_spec(name)
    for entry in (spec.submodule_search_locations or ()) if spec else ():
        yield Path(entry)


def cutlass() -> Iterator[Path]:
    for folder in package_folders("cutlass_library"):
        yield folder / "source" / "include"


def cuda_headers() -> Iterator[Path]:
    for folder in package_folders("nvidia"):
        yield folder / "cu13" / "include"
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if root:
            yield Path(root) / "include"


def dlpack() -> Iterator[Path]:
    for package, inside in (("tvm_ffi", "include"), ("torch", "include/ATen")):
        for folder in package_folders(package):
            yield folder / inside


# A key, its candidates, and the files that all must lie in the right one.
WANTED = (
    ("cutlass", cutlass, ("cutlass/version.h", "cutlass/detail/sm100_blockscaled_layout.hpp")),
    ("cuda_headers", cuda_headers, ("cuda_runtime.h", "crt/host_defines.h", "cccl/cuda/std/utility")),
    ("dlpack", dlpack, ("dlpack.h",)),
)

if __name__ == "__main__":
    for key, candidates, files in WANTED:
        for candidate in candidates():
            folder = candidate / "dlpack" if (candidate / "dlpack" / "dlpack.h").exists() else candidate
            if all((folder / file).exists() for file in files):
                print(f"{key}={folder}")
                break

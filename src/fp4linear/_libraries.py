"""Shared libraries that lie in wheels, where the system's loader does not look."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path


def load_cublaslt() -> str | None:
    """Load cuBLASLt from a wheel into this process.

    Returns:
        What was loaded, or None where no wheel holds the library. The C++ side then finds it by its soname.
    """
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return str(load_nvidia_dynamic_lib("cublasLt").abs_path)
    except Exception:  # not installed, or it found nothing: both mean that a wheel may still lie in site-packages
        pass
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec is not None else []:
        for library in sorted(Path(root).glob("*/lib/libcublasLt.so.1[23]"), reverse=True):
            try:
                ctypes.CDLL(str(library))
            except OSError:
                continue
            return str(library)
    return None

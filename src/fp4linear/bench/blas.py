"""Threads of the BLAS inside NumPy, so that a dense matmul gets as many as the layer beside it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

# OpenBLAS under the names of NumPy's wheels, of 64-bit-integer builds and of plain ones.
PREFIXES = ("scipy_openblas", "openblas")
SUFFIXES = ("64_", "")


def openblas() -> tuple[ctypes.CDLL, str, str] | None:
    """The loaded OpenBLAS and the prefix and suffix of its symbols; None where NumPy has another BLAS."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(None, 5)[5].strip() for line in maps if "openblas" in line}
    except OSError:
        return None
    for path in sorted(paths):
        library = ctypes.CDLL(path)
        for prefix in PREFIXES:
            for suffix in SUFFIXES:
                if hasattr(library, f"{prefix}_set_num_threads{suffix}"):
                    return library, prefix, suffix
    return None


@contextmanager
def blas_threads(threads: int) -> Iterator[bool]:
    """Limits NumPy's OpenBLAS inside of the block. Gives False, and changes nothing, where it isn't OpenBLAS."""
    import numpy as np

    np.dot(np.ones((2, 2)), np.ones((2, 2)))  # loads the library
    found = openblas()
    if found is None:
        yield False
        return
    library, prefix, suffix = found
    setter = getattr(library, f"{prefix}_set_num_threads{suffix}")
    before = getattr(library, f"{prefix}_get_num_threads{suffix}")()
    setter(threads)
    try:
        yield True
    finally:
        setter(before)

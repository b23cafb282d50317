"""A regular file as a read-only memory map that knows when the file has been cut since."""

from __future__ import annotations

import mmap
import os
import stat
from typing import IO

import numpy as np
import numpy.typing as npt

from .errors import FormatError


def size_of(file: IO[bytes], path: os.PathLike[str]) -> int:
    """The size of an open file. FormatError where it is no regular file, whose size says nothing."""
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise FormatError(f"{path}: not a regular file")
    return status.st_size


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """An existing file to read. Opening a pipe does not wait for a writer; `size_of` then refuses it."""
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


class MappedFile:
    """The first `size` bytes of an open file."""

    def __init__(self, file: IO[bytes], size: int, path: os.PathLike[str]) -> None:
        self._path = path
        try:
            self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        except ValueError as error:  # it was cut between fstat and here
            raise FormatError(f"{path}: can't be mapped: {error}") from None
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def view(self, begin: int, end: int) -> npt.NDArray[np.uint8]:
        """Bytes [begin, end). FormatError where the file no longer has them: reading them would end the process."""
        if begin < end and self._map.size() < end:
            raise FormatError(
                f"{self._path}: truncated since it was opened: bytes [{begin}, {end}] of {self._map.size()}"
            )
        return self.bytes[begin:end]

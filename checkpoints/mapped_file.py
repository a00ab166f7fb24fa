"""A file in the address space of this process, whose pages leave its memory when they have been read."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


class HeldFile:
    """The bytes of a file that was read.

    data  [bytes] uint8
    """

    def __init__(self, content: memoryview) -> None:
        self.memory: memoryview | mmap.mmap = content
        self.data: NDArray[np.uint8] = np.frombuffer(content, np.uint8)

    def release(self, part: NDArray[np.generic]) -> None:
        """Do nothing: all of it stays in memory."""


class MappedFile(HeldFile):
    """The bytes of a file that is not empty. Raises OSError or ValueError if it cannot be mapped.

    data  [bytes] uint8. It can be written to, which changes neither the file nor what others see, because torch warns
          about memory that cannot.
    """

    def __init__(self, path: Path) -> None:
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        with path.open("rb") as file:
            self._mapping = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self.memory = self._mapping
        self.data: NDArray[np.uint8] = np.frombuffer(self.memory, np.uint8)
        self._address = self.data.ctypes.data

    def release(self, part: NDArray[np.generic]) -> None:
        """Take the pages of a part of `data` out of memory; the system's cache keeps them, and neighbours theirs."""
        start = part.ctypes.data - self._address
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (start + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._mapping.madvise(mmap.MADV_DONTNEED, first, last - first)

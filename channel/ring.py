"""Rings of bytes in shared memory, each with one writer and one reader in different processes.

The memory holds only data. Positions travel through two eventfds: kernel counters that add up what is written to them
and hand the sum, once, to a reader. `filled` counts the bytes put in, `freed` those taken out. An eventfd also wakes a
process that waits for it, like any descriptor.

On memory order: Python has no fences, and on ARM another core may see two stores in either order. But the kernel takes
a lock for every access to an eventfd, so whatever one side did to the memory before it added to a counter has happened
before the other side reads that sum. A side touches only bytes that it learned of this way; it needs no other ordering.

Anonymous memory (memfd_create) and eventfds live as long as a process holds them. However either side ends, the kernel
frees them, and nothing stays in /dev/shm or in any folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import stat
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass

RING_BYTES = 256 << 10  # of each ring: room for hundreds of steps. A larger message goes through in pieces.

_SIZE = 2 * RING_BYTES
_SEALS = 0  # systems without seals have no memfd either
if sys.platform == "linux":
    # Without seals, one side could shrink the memory and so kill the other with SIGBUS.
    _SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_OFFER = struct.Struct("<8sI")
_MAGIC = b"pagoda\0\1"  # the last byte is the version of this layout
_NUM_DESCRIPTORS = 5  # the memory; filled and freed of the submission ring; the same of the completion ring


@dataclass(frozen=True, slots=True)
class Ring:
    memory: memoryview
    filled: int  # eventfds, non-blocking
    freed: int

    def take(self, counter: int) -> int:
        """Return what was added to a counter since the last call."""
        with contextlib.suppress(BlockingIOError):  # the counter is zero
            return os.eventfd_read(counter)
        return 0

    def add(self, counter: int, count: int) -> None:
        """Raise ConnectionError if the other side has driven the counter to its limit."""
        try:
            os.eventfd_write(counter, count)
        except BlockingIOError:
            raise ConnectionError("the other side has counted too far") from None

    def check(self, count: int) -> None:
        """Raise ConnectionError if the other side has counted more bytes than the ring has."""
        if count > len(self.memory):
            raise ConnectionError(f"the other side counts {count} bytes in a ring of {len(self.memory)}")


class RingWriter:
    """The writing side. Its methods raise ConnectionError if the reader claims to have freed more than the ring has."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._at = 0
        self._room = len(ring.memory)

    def has_room_for(self, count: int) -> bool:
        if self._room < count:
            self._room += self._ring.take(self._ring.freed)
            self._ring.check(self._room)
        return self._room >= count

    def write(self, data: memoryview) -> int:
        """Put in as much of `data` as there is room for, without waiting, and return how many bytes that was."""
        memory = self._ring.memory
        count = len(data) if self.has_room_for(len(data)) else self._room
        if count:
            before_end = min(count, len(memory) - self._at)
            memory[self._at : self._at + before_end] = data[:before_end]
            memory[: count - before_end] = data[before_end:count]
            self._at = (self._at + count) % len(memory)
            self._room -= count
            self._ring.add(self._ring.filled, count)
        return count


class RingReader:
    """The reading side. `available` bytes, of which notice() has learned, can be read."""

    def __init__(self, ring: Ring) -> None:
        self.available = 0
        self._ring = ring
        self._at = 0
        self._read = 0  # bytes not yet given back to the writer

    def notice(self) -> None:
        """Learn of new bytes. Raises ConnectionError if the writer claims more than the ring has."""
        self.available += self._ring.take(self._ring.filled)
        self._ring.check(self.available + self._read)

    def read(self, count: int) -> bytes:
        """Copy the next `count` bytes, at most `available`. They occupy the ring until release()."""
        memory = self._ring.memory
        end = self._at + count
        data = bytes(memory[self._at : end])
        if end > len(memory):
            data += memory[: end - len(memory)]
        self._at = end % len(memory)
        self.available -= count
        self._read += count
        return data

    def release(self) -> None:
        """Give the room of everything that was read back to the writer."""
        if self._read:
            self._ring.add(self._ring.freed, self._read)
            self._read = 0


class RingPair:
    """The two rings of a connection, which the engine makes and hands to the router over a Unix socket.

    `submission` carries messages from router to engine, `completion` from engine to router.
    """

    def __init__(self, descriptors: Sequence[int]) -> None:
        """Take ownership of the descriptors. Raises OSError if they cannot be mapped."""
        self._descriptors = list(descriptors)
        self._memory = mmap.mmap(descriptors[0], _SIZE)
        self._view = memoryview(self._memory)
        self.submission = Ring(self._view[:RING_BYTES], descriptors[1], descriptors[2])
        self.completion = Ring(self._view[RING_BYTES:], descriptors[3], descriptors[4])

    @classmethod
    def create(cls) -> RingPair:
        """Allocate a pair. Raises OSError when memory or descriptors have run out."""
        descriptors: list[int] = []
        try:
            descriptors.append(os.memfd_create("pagoda-channel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.fchmod(descriptors[0], 0o600)
            os.posix_fallocate(descriptors[0], 0, _SIZE)  # lack of memory is an error here, not SIGBUS at a later write
            fcntl.fcntl(descriptors[0], fcntl.F_ADD_SEALS, _SEALS)
            descriptors.extend(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(_NUM_DESCRIPTORS - 1))
            return cls(descriptors)
        except BaseException:
            _close(descriptors)
            raise

    def offer(self, connection: socket.socket) -> None:
        """Send the pair to the other side. Raises OSError if that has gone."""
        socket.send_fds(connection, [_OFFER.pack(_MAGIC, RING_BYTES)], self._descriptors)

    @classmethod
    def accept(cls, connection: socket.socket) -> RingPair:
        """Take an offer that has arrived. Raises ConnectionError for anything else, OSError if it cannot be mapped."""
        message, descriptors, flags, _ = socket.recv_fds(
            connection, _OFFER.size, _NUM_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        try:
            if not message:
                raise ConnectionError("the engine closed the connection before it offered its rings")
            if message != _OFFER.pack(_MAGIC, RING_BYTES):
                raise ConnectionError("the process that listens there is not an engine of this version")
            if flags & socket.MSG_CTRUNC or len(descriptors) != _NUM_DESCRIPTORS:
                raise ConnectionError("the engine's descriptors did not arrive: this process may have too many open")
            memory = os.fstat(descriptors[0])
            is_sealed = (
                stat.S_ISREG(memory.st_mode) and fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS) & _SEALS == _SEALS
            )
            if memory.st_size != _SIZE or not is_sealed:
                raise ConnectionError("the engine offered memory of the wrong size, or memory that can shrink")
            return cls(descriptors)
        except BaseException:
            _close(descriptors)
            raise

    def close(self) -> None:
        self.submission.memory.release()
        self.completion.memory.release()
        self._view.release()
        self._memory.close()
        _close(self._descriptors)
        self._descriptors.clear()


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)

"""The two rings of a connection: made by the engine, handed to the router over a Unix socket.

Memory without a name (memfd_create) and eventfds live as long as a process holds them: however either side ends, the
kernel takes them back, and nothing is left in /dev/shm or in any folder.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import stat
import struct
import sys
from collections.abc import Sequence

from pagoda_server.channel.ring import Ring

RING_BYTES = 256 << 10  # of each ring: hundreds of steps. A larger message goes through in pieces.

_SIZE = 2 * RING_BYTES
_SEALS = 0  # where there are none, there is no memfd either
if sys.platform == "linux":
    _SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL  # to shrink it kills the other by SIGBUS
_OFFER = struct.Struct("<8sI")
_MAGIC = b"pagoda\0\1"  # the last byte is the version of this layout
_NUM_DESCRIPTORS = 5  # the memory; filled and freed of the submission ring; the same of the completion ring


class RingPair:
    """submission carries router → engine, completion engine → router."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        """Takes the descriptors over. Raises OSError if they cannot be mapped."""
        self._descriptors = list(descriptors)
        self._memory = mmap.mmap(descriptors[0], _SIZE)
        self._view = memoryview(self._memory)
        self.submission = Ring(self._view[:RING_BYTES], descriptors[1], descriptors[2])
        self.completion = Ring(self._view[RING_BYTES:], descriptors[3], descriptors[4])

    @classmethod
    def create(cls) -> RingPair:
        """Raises OSError where memory or descriptors have run out."""
        descriptors: list[int] = []
        try:
            descriptors.append(os.memfd_create("pagoda-channel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.fchmod(descriptors[0], 0o600)
            os.posix_fallocate(descriptors[0], 0, _SIZE)  # no memory is an error here, not SIGBUS at the first write
            fcntl.fcntl(descriptors[0], fcntl.F_ADD_SEALS, _SEALS)
            descriptors.extend(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(_NUM_DESCRIPTORS - 1))
            return cls(descriptors)
        except BaseException:
            _close(descriptors)
            raise

    def offer(self, connection: socket.socket) -> None:
        """Raises OSError if the other side has gone."""
        socket.send_fds(connection, [_OFFER.pack(_MAGIC, RING_BYTES)], self._descriptors)

    @classmethod
    def accept(cls, connection: socket.socket) -> RingPair:
        """Takes an offer that has arrived. Raises ConnectionError for anything else, OSError if it cannot be mapped."""
        message, descriptors, flags, _ = socket.recv_fds(
            connection, _OFFER.size, _NUM_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        try:
            if not message:
                raise ConnectionError("the engine went away before it offered its rings")
            if message != _OFFER.pack(_MAGIC, RING_BYTES):
                raise ConnectionError("what listens there is no engine of this version with a shared-memory channel")
            if flags & socket.MSG_CTRUNC or len(descriptors) != _NUM_DESCRIPTORS:
                raise ConnectionError("the engine's descriptors did not arrive: this process may have too many open")
            memory = os.fstat(descriptors[0])
            is_sealed = (
                stat.S_ISREG(memory.st_mode) and fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS) & _SEALS == _SEALS
            )
            if memory.st_size != _SIZE or not is_sealed:
                raise ConnectionError("the engine offered memory of another size, or that can shrink")
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

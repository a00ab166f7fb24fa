"""The file of a listening Unix socket: whose it is, and whether anybody answers there."""

from __future__ import annotations

import contextlib
import os
import socket
import stat


class SocketFile:
    """One that this process has just bound."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._identity = _identity(path)

    def remove(self) -> None:
        """Unless another server has put its own in its place. To be called while the socket is open."""
        with contextlib.suppress(FileNotFoundError):
            if _identity(self._path) == self._identity:
                os.unlink(self._path)


def remove_stale(path: str) -> None:
    """A socket's file outlives a killed owner. It is one if nobody answers there. Any other file stays."""
    if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
            except BlockingIOError:  # it answers later: more connect there than it has taken
                pass


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino

"""The address that a gRPC server listens at.

Of itself gRPC takes over a Unix socket that another server listens at, deletes whatever has its name when it stops, and
does not tell why it cannot bind.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
from collections.abc import Callable

from pagoda_server.channel.address import UNIX_PREFIX, host_of, is_unix
from pagoda_server.channel.socket_file import SocketFile, remove_stale

# A host that has vanished does not even close its connections: what it asked for would go on until a write to it
# stalls, or for ever where there is nothing to write.
KEEPALIVE_OPTIONS = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # by default a minute, which is what counts for the answer to a ping
    ("grpc.http2.max_pings_without_data", 0),  # by default two, and a stream may be quiet for longer
]

_LONGEST_PATH = 107  # in Linux' struct sockaddr_un, before the final zero


class GrpcPort:
    """
    address   unix:PATH or HOST:PORT
    add_port  the server's method, which binds an address and returns the port that was taken

    Raises OSError if the address cannot be bound.
    """

    def __init__(self, address: str, add_port: Callable[[str], int]) -> None:
        self.address = address  # with the port that was taken
        self._file: SocketFile | None = None
        if is_unix(address):
            self._file = _bind_socket(address.removeprefix(UNIX_PREFIX), add_port)
        else:
            self.address = f"{address.rpartition(':')[0]}:{_bind(address, add_port)}"

    def close(self) -> None:
        """To be called before the server stops. No connection comes by a Unix socket's path from now on."""
        if self._file:
            self._file.remove()


def _bind_socket(path: str, add_port: Callable[[str], int]) -> SocketFile:
    """Under a name of its own at first: that is the one that gRPC will delete, and where nobody else listens."""
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise OSError(errno.ENAMETOOLONG, f"the path of a socket has at most {_LONGEST_PATH} bytes")
    remove_stale(path)
    if os.path.exists(path):
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    own = os.path.join(os.path.dirname(path), f".{secrets.token_hex(4)}")
    _bind(UNIX_PREFIX + own, add_port)
    os.rename(own, path)
    return SocketFile(path)


def _bind(address: str, add_port: Callable[[str], int]) -> int:
    try:
        return add_port(address)
    except RuntimeError as error:
        _bind_alone(address)
        raise OSError(errno.EADDRNOTAVAIL, "gRPC cannot bind it") from error


def _bind_alone(address: str) -> None:
    """For the reason why gRPC could not do it. Raises OSError."""
    if is_unix(address):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as plain:
            plain.bind(address.removeprefix(UNIX_PREFIX))
            os.unlink(address.removeprefix(UNIX_PREFIX))
        return
    port = int(address.rpartition(":")[2])
    found = socket.getaddrinfo(host_of(address), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, protocol, _, at in found:
        with socket.socket(family, kind, protocol) as plain:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            plain.bind(at)

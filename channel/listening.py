"""Listening on an address without disturbing other servers: the files of Unix sockets, and gRPC's ports."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Callable

from .address import UNIX_PREFIX, host_of, is_unix


def keepalive_options(every_s: float, timeout_s: float) -> list[tuple[str, int]]:
    """Options by which gRPC closes the connections of a host that has vanished, which does not close them itself.

    Without them its requests would go on until a write stalls, or for ever if there is nothing to write.
    """
    timeout_ms = round(1000 * timeout_s)
    return [
        ("grpc.keepalive_time_ms", round(1000 * every_s)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),  # limits the wait for the answer to a ping; the default is a minute
        ("grpc.http2.max_pings_without_data", 0),  # unlimited: a stream may be quiet for longer than two pings
    ]


def channel_keepalive(address: str) -> list[tuple[str, int]]:
    """Options for both ends of the channel between a router and an engine: the other host is missed after 7 s at most.

    An engine also accepts as many pings from a router that sends nothing else. On one host the kernel closes the
    connections of a process that ends, and one that hangs has until the hang timeout.
    """
    if is_unix(address):
        return []
    return [*keepalive_options(2, 5), ("grpc.http2.min_ping_interval_without_data_ms", 1000)]


CLIENTS_KEEPALIVE = keepalive_options(30, 10)

ACCEPT_S = 1.0  # in which gRPC accepts the connections that have been made
_LONGEST_PATH = 107  # in Linux's struct sockaddr_un, before the final zero


class SocketFile:
    """The file of a Unix socket that this process has just bound."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._identity = _identity(path)

    def remove(self) -> None:
        """Remove the file unless another server has replaced it. Call this while the socket is open."""
        with contextlib.suppress(FileNotFoundError):
            if _identity(self._path) == self._identity:
                os.unlink(self._path)


def remove_stale(path: str) -> None:
    """Remove a socket's file if its owner was killed: nothing accepts connections there. Keep any other file."""
    if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
            except BlockingIOError:  # a live server whose backlog is full
                pass


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


class GrpcPort:
    """An address that a gRPC server is bound to.

    address     unix:PATH or HOST:PORT
    add_port    the server's method that binds an address and returns the port it took
    takes_over  whether a server that listens at this Unix socket shall get no more connections

    Raises OSError with the reason if the address cannot be bound.

    gRPC itself takes over a Unix socket at which another server listens, deletes any file of that name when it stops,
    and does not say why it cannot bind.
    """

    def __init__(self, address: str, add_port: Callable[[str], int], takes_over: bool = False) -> None:
        self.address = address  # with the actual port
        self._file: SocketFile | None = None
        if is_unix(address):
            self._file = _bind_socket(address.removeprefix(UNIX_PREFIX), add_port, takes_over)
        else:
            self.address = f"{address.rpartition(':')[0]}:{_bind(address, add_port)}"

    def leave(self) -> None:
        """Accept no more connections, because others listen here too. The server goes on with those it has.

        This waits a second at most until gRPC has accepted those that have been made: the kernel resets the others.
        gRPC itself offers this only by stopping the server, which cancels the calls that arrive in that moment.
        """
        if self._file is None:  # a Unix socket is the other server's already
            _stop_listening(int(self.address.rpartition(":")[2]))

    def close(self) -> None:
        """Stop new connections by a Unix socket's path. Call this before the server stops."""
        if self._file:
            self._file.remove()


def _bind_socket(path: str, add_port: Callable[[str], int], takes_over: bool) -> SocketFile:
    """Bind under a temporary name, then rename: gRPC deletes that name, and no other server listens there."""
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise OSError(errno.ENAMETOOLONG, f"the path of a socket has at most {_LONGEST_PATH} bytes")
    if not takes_over:
        remove_stale(path)
    if os.path.exists(path) and not takes_over:
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
        raise OSError(errno.EADDRNOTAVAIL, "gRPC cannot bind this address") from error


def _stop_listening(port: int) -> None:
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
            is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
            if is_tcp and found.getsockname()[1] == port and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                deadline = time.monotonic() + ACCEPT_S
                while _num_unaccepted(found) and time.monotonic() < deadline:
                    time.sleep(0.001)
                found.shutdown(socket.SHUT_RD)


def _num_unaccepted(listening: socket.socket) -> int:
    """How many connections wait to be accepted, where the system says so."""
    if not hasattr(socket, "TCP_INFO"):
        return 0
    # struct tcp_info, whose tcpi_unacked is the length of that queue for a listening socket.
    found: int = struct.unpack_from("I", listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 28), 24)[0]
    return found


def _bind_alone(address: str) -> None:
    """Bind a plain socket, whose OSError gives the reason that gRPC does not."""
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

"""How `pagoda upgrade` asks a running server to replace its routers and its engine, and learns whether it has.

A server listens on an abstract Unix socket that bears its pid; only its own user and root are answered. A request is
one line, ALL or ROUTERS. The answer is one line, empty or the reason why nothing was replaced.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import struct
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

log = logging.getLogger("pagoda.router")

ALL, ROUTERS = "all", "routers"
IS_SUPPORTED = hasattr(socket, "SO_PEERCRED")  # on Linux

_NAME = "pagoda-serve-"
_MOST_BYTES = 4096  # of a line
_REQUEST_S = 5.0  # in which a request has to be there
_CREDENTIALS = struct.Struct("3i")  # pid, user and group

Upgrade = Callable[[bool], Awaitable[str]]


class NoAnswerError(Exception):
    """No server of this user answers."""


class UpgradePort:
    """Where `ask` reaches this process.

    inherited  descriptor of the socket that has listened there before; None: there is none
    """

    def __init__(self, inherited: int | None = None) -> None:
        self.num_open = 0  # requests
        self._listening = self._bound() if inherited is None else socket.socket(fileno=inherited)

    @property
    def descriptor(self) -> int | None:
        """The descriptor of the socket on which requests arrive; None if this process does not listen."""
        return self._listening.fileno() if self._listening else None

    def _bound(self) -> socket.socket | None:
        if not IS_SUPPORTED:
            return None
        listening = _unix_socket()
        try:
            listening.bind(_address(os.getpid()))
            listening.listen()
        except OSError as error:
            listening.close()
            log.warning("pagoda upgrade cannot reach this server: %s", error.strerror)
            return None
        return listening

    async def answer(self, upgrade: Upgrade) -> None:
        """Answer requests of `ask` until cancelled.

        upgrade  replaces the routers and, if its argument is true, the engine. It returns why it has not; "": it has
        """
        if self._listening is None:
            return
        answer = partial(self._answer, upgrade)
        server = await asyncio.start_unix_server(answer, sock=self._listening, limit=_MOST_BYTES)
        async with server:
            await server.serve_forever()

    async def _answer(self, upgrade: Upgrade, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        try:
            with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as connection:
                _, user = _peer(connection)
            if user not in (0, os.geteuid()):
                return
            async with asyncio.timeout(_REQUEST_S):
                wanted = (await reader.readline()).decode().strip()
            known = wanted in (ALL, ROUTERS)
            why = await upgrade(wanted == ALL) if known else f"this server does not know how to replace {wanted[:40]!r}"
            writer.write(f"{' '.join(why.split())}\n".encode())
            await writer.drain()
        except (OSError, ValueError, TimeoutError) as error:
            log.debug("a request to upgrade has broken: %s", error)  # the upgrade itself has not
        finally:
            self.num_open -= 1
            writer.close()


def ask(pid: int, wanted: str) -> str:
    """Ask a server, and wait for its answer: why it has replaced nothing; "": it has. Raises NoAnswerError."""
    with _unix_socket() as connection:
        try:
            connection.connect(_address(pid))
        except OSError:
            raise NoAnswerError(f"process {pid} is no `pagoda serve` here that knows upgrades") from None
        found, user = _peer(connection)
        if found != pid or os.geteuid() not in (0, user):
            raise NoAnswerError(f"process {pid} belongs to another user, who alone can upgrade it")
        connection.sendall(f"{wanted}\n".encode())
        with connection.makefile("rb") as answers:
            answer = answers.readline(_MOST_BYTES)
    if not answer.endswith(b"\n"):
        raise NoAnswerError(f"process {pid} has ended before it answered")
    return answer.decode().strip()


def servers() -> list[int]:
    """The pids of the servers that run here and know upgrades."""
    listed = Path("/proc/net/unix").read_text() if IS_SUPPORTED else ""
    return sorted({int(pid) for pid in re.findall(rf"@{_NAME}(\d+)$", listed, re.MULTILINE)})


def _address(pid: int) -> str:
    return f"\0{_NAME}{pid}"


def _unix_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Pid and user of the process at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(raw)
    return pid, user

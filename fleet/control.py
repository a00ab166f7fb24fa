"""How the commands of a fleet reach its driver: a Unix socket in the fleet's folder, one JSON object each way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 20
REQUEST_S = 5.0  # in which a request has to be there

Answer = Callable[[str, str], Awaitable[dict[str, Any]]]


class NoDriverError(Exception):
    """No driver answers in a folder."""


@contextlib.asynccontextmanager
async def answering(path: Path, answer: Answer) -> Any:
    """Answer requests while the block runs.

    answer  is given a command and its argument. It returns what goes back; a ValueError goes back as {"error": …}

    Raises OSError if the socket cannot be bound, also because another driver listens there.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_S):
                asked = json.loads(await reader.readline())
            try:
                found = await answer(str(asked["command"]), str(asked.get("argument", "")))
            except ValueError as error:
                found = {"error": str(error)}
            writer.write(json.dumps(found).encode() + b"\n")
            await writer.drain()
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # it has gone, or is no command of ours
        finally:
            writer.close()

    with _bound(path) as listening:
        async with await asyncio.start_unix_server(serve, sock=listening, limit=4096):
            yield


@contextlib.contextmanager
def _bound(path: Path) -> Any:
    """A socket that only this user can open. One that no driver listens at any more is replaced."""
    with contextlib.suppress(ConnectionRefusedError, FileNotFoundError), _unix_socket() as probe:
        probe.connect(str(path))
        raise FileExistsError(f"another driver runs with {path.parent}")
    path.unlink(missing_ok=True)
    with _unix_socket() as listening:
        previous = os.umask(0o177)
        try:
            listening.bind(str(path))
        finally:
            os.umask(previous)
        try:
            yield listening
        finally:
            path.unlink(missing_ok=True)


def _unix_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def ask(path: Path, command: str, argument: str = "") -> dict[str, Any]:
    """Send a command to the driver, and wait for its answer. Raises NoDriverError, and ValueError with its error."""
    try:
        with _unix_socket() as connection:
            connection.connect(str(path))
            connection.sendall(json.dumps({"command": command, "argument": argument}).encode() + b"\n")
            with connection.makefile("rb") as answers:
                line = answers.readline(MOST_BYTES)
    except OSError as error:
        raise NoDriverError(f"no `pagoda fleet` runs with {path.parent}: {error.strerror or error}") from None
    if not line.endswith(b"\n"):
        raise NoDriverError("the driver has ended before it answered")
    found: dict[str, Any] = json.loads(line)
    if "error" in found:
        raise ValueError(found["error"])
    return found

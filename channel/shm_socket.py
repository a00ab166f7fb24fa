"""Where engines with a shared-memory channel listen, and how routers reach them.

Both ends check that the other process belongs to their own user: an abstract name has no permissions of its own, and
whoever is first can take it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable

from pagoda_server.channel.address import socket_file, socket_name
from pagoda_server.channel.ring_pair import RingPair
from pagoda_server.channel.shm_link import Incoming, Outgoing, ShmLink
from pagoda_server.channel.socket_file import remove_stale

_OFFER_TIMEOUT_S = 5.0
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


def bind(address: str) -> socket.socket:
    """A listening socket. A file that a killed engine has left is replaced. Raises OSError."""
    listener = _unix_socket()
    try:
        if file := socket_file(address):
            remove_stale(file)
        previous = os.umask(0o177)
        try:
            listener.bind(socket_name(address))
        finally:
            os.umask(previous)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


async def connect(address: str, parse: Callable[[bytes], Incoming]) -> ShmLink[Incoming, Outgoing]:
    """The router's end of a new connection. Raises OSError if nobody listens there, or no engine of the same user."""
    events = asyncio.get_running_loop()
    connection = _unix_socket()
    try:
        try:
            async with asyncio.timeout(_OFFER_TIMEOUT_S):
                await events.sock_connect(connection, socket_name(address))
                check_peer(connection)
                await _readable(connection)
        except TimeoutError:
            raise ConnectionError(f"what listens there has offered nothing for {_OFFER_TIMEOUT_S:.0f} s") from None
        rings = RingPair.accept(connection)
        return ShmLink(connection, rings, incoming=rings.completion, outgoing=rings.submission, parse=parse)
    except BaseException:
        connection.close()
        raise


def offer(connection: socket.socket, parse: Callable[[bytes], Incoming]) -> ShmLink[Incoming, Outgoing]:
    """The engine's end of a connection that it has accepted. Raises OSError."""
    check_peer(connection)
    rings = RingPair.create()
    try:
        rings.offer(connection)
        return ShmLink(connection, rings, incoming=rings.submission, outgoing=rings.completion, parse=parse)
    except BaseException:
        rings.close()
        raise


def check_peer(connection: socket.socket) -> None:
    """Raises ConnectionError unless the other end's process belongs to this one's user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.geteuid():
        raise ConnectionError(f"the other end belongs to user {uid}, this one to user {os.geteuid()}")


def _unix_socket() -> socket.socket:
    new = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    new.setblocking(False)
    return new


async def _readable(connection: socket.socket) -> None:
    events = asyncio.get_running_loop()
    ready = asyncio.Event()
    events.add_reader(connection, ready.set)
    try:
        await ready.wait()
    finally:
        events.remove_reader(connection)

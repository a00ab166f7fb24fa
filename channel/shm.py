"""The transport over shared memory: where engines listen, how routers connect, and the link between them.

Messages travel through a pair of rings (ring.py): four bytes of length, then the message in protobuf's encoding. The
Unix socket that brought the rings stays open and silent, so that its closing shows that the other process is gone.

Both ends check that the other process belongs to their own user: an abstract name has no permissions, and the first
process to ask for it gets it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from .address import socket_file, socket_name
from .link import MAX_MESSAGE_BYTES
from .listening import SocketFile, remove_stale
from .ring import Ring, RingPair, RingReader, RingWriter

log = logging.getLogger("pagoda.channel")

Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing", bound=Message)

_LENGTH = struct.Struct("<I")
_OFFER_TIMEOUT_S = 5.0
_RETRY_S = 1.0  # without descriptors: sessions that end may give some back
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


class ShmLink(Generic[Incoming, Outgoing]):
    """One end of a connection over shared memory; implements Link. Owns the socket and the rings."""

    def __init__(
        self,
        connection: socket.socket,
        rings: RingPair,
        *,
        incoming: Ring,
        outgoing: Ring,
        parse: Callable[[bytes], Incoming],
    ) -> None:
        self._events = asyncio.get_running_loop()
        self._connection = connection
        self._rings = rings
        self._reader = RingReader(incoming)
        self._writer = RingWriter(outgoing)
        self._parse = parse
        self._partial: bytearray | None = None  # the message being read, once its length is known
        self._missing = 0  # bytes of it that have not arrived
        self._filled, self._freed = incoming.filled, outgoing.freed
        self._is_gone = False  # the other end has closed its socket
        self._is_closed = False
        self._is_writing = False
        self._error: ConnectionError | None = None
        self._has_news = asyncio.Event()  # wakes the reading task
        self._has_room = asyncio.Event()  # wakes the writing task
        self._events.add_reader(self._filled, self._notice)
        self._events.add_reader(connection.fileno(), self._lose)

    async def read(self) -> Incoming | None:
        while True:
            if self._error:
                raise self._error
            if (message := self._next()) is not None:
                break
            if self._is_gone or self._is_closed:
                return None
            self._has_news.clear()
            await self._has_news.wait()
        try:
            return self._parse(message)
        except DecodeError as error:
            raise ConnectionError("the other end sent an invalid message") from error

    async def write(self, message: Outgoing) -> None:
        payload = message.SerializeToString()
        if len(payload) > MAX_MESSAGE_BYTES:
            raise ConnectionError(f"a message of {len(payload)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
        rest = memoryview(_LENGTH.pack(len(payload)) + payload)
        self._is_writing = True
        try:
            while True:
                if self._is_gone or self._is_closed:
                    raise ConnectionError("the connection is closed")
                rest = rest[self._writer.write(rest) :]
                if not rest:
                    return
                await self._wait_for_room()
        finally:
            self._is_writing = False

    @property
    def is_free(self) -> bool:
        return not (self._is_writing or self._is_gone or self._is_closed)

    def try_write(self, message: Outgoing) -> bool:
        assert self.is_free
        payload = message.SerializeToString()
        try:
            if not self._writer.has_room_for(_LENGTH.size + len(payload)):
                return False
            self._writer.write(memoryview(_LENGTH.pack(len(payload)) + payload))
        except ConnectionError:
            self._lose()
            return False
        return True

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._stop_watching()
        self._connection.close()
        self._rings.close()
        self._has_news.set()
        self._has_room.set()

    def _next(self) -> bytes | None:
        """Return the next message, or None until all of it has arrived.

        Pieces give their room back to the writer at once, so that a message may be larger than the ring.
        """
        reader = self._reader
        if self._is_closed:
            return None
        if self._partial is None:
            if reader.available < _LENGTH.size:
                return None
            (self._missing,) = _LENGTH.unpack(reader.read(_LENGTH.size))
            if self._missing > MAX_MESSAGE_BYTES:
                raise ConnectionError(f"a message of {self._missing} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
            self._partial = bytearray()
        piece = reader.read(min(self._missing, reader.available))
        reader.release()
        self._partial += piece
        self._missing -= len(piece)
        if self._missing:
            return None
        message, self._partial = bytes(self._partial), None
        return message

    def _notice(self) -> None:
        try:
            self._reader.notice()
        except ConnectionError:
            self._lose()
        self._has_news.set()

    def _lose(self) -> None:
        """Handle the end of the other process, which closed its socket (or wrote to it). The ring is still read."""
        try:
            self._reader.notice()
        except ConnectionError as error:
            self._error = error
        self._is_gone = True
        self._stop_watching()
        self._has_news.set()
        self._has_room.set()

    def _stop_watching(self) -> None:
        for descriptor in (self._connection.fileno(), self._filled, self._freed):
            self._events.remove_reader(descriptor)

    async def _wait_for_room(self) -> None:
        self._has_room.clear()
        self._events.add_reader(self._freed, self._has_room.set)
        try:
            await self._has_room.wait()
        finally:
            if not self._is_closed:  # after close(), another file may have this number
                self._events.remove_reader(self._freed)


async def connect(address: str, parse: Callable[[bytes], Incoming]) -> ShmLink[Incoming, Outgoing]:
    """Open the router's end of a new connection.

    Raises OSError if nothing listens there, or if the process that does is not an engine of the same user.
    """
    events = asyncio.get_running_loop()
    connection = _unix_socket()
    try:
        try:
            async with asyncio.timeout(_OFFER_TIMEOUT_S):
                await events.sock_connect(connection, socket_name(address))
                check_peer(connection)
                await _readable(connection)
        except TimeoutError:
            reason = f"the process that listens there has offered nothing for {_OFFER_TIMEOUT_S:.0f} s"
            raise ConnectionError(reason) from None
        rings = RingPair.accept(connection)
        return ShmLink(connection, rings, incoming=rings.completion, outgoing=rings.submission, parse=parse)
    except BaseException:
        connection.close()
        raise


def offer(connection: socket.socket, parse: Callable[[bytes], Incoming]) -> ShmLink[Incoming, Outgoing]:
    """Open the engine's end of a connection that it has accepted. Raises OSError."""
    check_peer(connection)
    rings = RingPair.create()
    try:
        rings.offer(connection)
        return ShmLink(connection, rings, incoming=rings.submission, outgoing=rings.completion, parse=parse)
    except BaseException:
        rings.close()
        raise


def check_peer(connection: socket.socket) -> None:
    """Raise ConnectionError unless the other end's process belongs to this one's user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.geteuid():
        raise ConnectionError(f"the other end belongs to user {uid}, this one to user {os.geteuid()}")


async def _readable(connection: socket.socket) -> None:
    events = asyncio.get_running_loop()
    ready = asyncio.Event()
    events.add_reader(connection, ready.set)
    try:
        await ready.wait()
    finally:
        events.remove_reader(connection)


class ShmServer(Generic[Incoming, Outgoing]):
    """The listening side: runs a session for every router that connects.

    address  shm:PATH or shm:@NAME
    parse    bytes to a router's message; raises protobuf's DecodeError
    serve    runs a session; when it returns the link is closed, and its errors end no other session
    """

    def __init__(
        self,
        address: str,
        parse: Callable[[bytes], Incoming],
        serve: Callable[[ShmLink[Incoming, Outgoing]], Awaitable[object]],
    ) -> None:
        self.address = address
        self._parse = parse
        self._serve = serve
        self._sessions: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Bind the address and accept routers from now on. Raises OSError if the address cannot be bound."""
        self._listener = bind(self.address)
        path = socket_file(self.address)
        self._file = SocketFile(path) if path else None
        self._accepting = asyncio.create_task(self._accept())

    async def stop(self) -> None:
        tasks = {self._accepting, *self._sessions}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._file:
            self._file.remove()
        self._listener.close()

    async def _accept(self) -> None:
        events = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await events.sock_accept(self._listener)
            except OSError as error:
                log.error("cannot accept a router: %s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            session = asyncio.create_task(self._run(connection))
            self._sessions.add(session)
            session.add_done_callback(self._sessions.discard)

    async def _run(self, connection: socket.socket) -> None:
        with connection:
            try:
                link: ShmLink[Incoming, Outgoing] = offer(connection, self._parse)
            except OSError as error:
                log.error("refused a router: %s", error)
                return
            try:
                await self._serve(link)
            except Exception:
                log.exception("a session failed")
            finally:
                link.close()


def bind(address: str) -> socket.socket:
    """Return a listening socket. The file of a killed engine is replaced. Raises OSError."""
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


def _unix_socket() -> socket.socket:
    new = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    new.setblocking(False)
    return new

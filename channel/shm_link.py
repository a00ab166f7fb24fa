"""Messages over a pair of rings: four bytes of length, then the message in protobuf's encoding.

The socket that brought the rings stays open and silent: its end tells that the other process is gone.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from pagoda_server.channel.link import MAX_MESSAGE_BYTES
from pagoda_server.channel.ring import Ring, RingReader, RingWriter
from pagoda_server.channel.ring_pair import RingPair

Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing", bound=Message)

_LENGTH = struct.Struct("<I")


class ShmLink(Generic[Incoming, Outgoing]):
    """One end of a shared-memory connection; a Link. Owns the socket and the rings from here on."""

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
        self._partial: bytearray | None = None  # of a message whose length is known
        self._missing = 0
        self._filled, self._freed = incoming.filled, outgoing.freed
        self._is_gone = False  # the other end
        self._is_closed = False
        self._is_writing = False
        self._error: ConnectionError | None = None
        self._has_news = asyncio.Event()  # for the reading task
        self._has_room = asyncio.Event()  # for the writing task
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
            raise ConnectionError("the other end sent what is no message") from error

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
        except ConnectionError:
            self._lose()
            return False
        self._writer.write(memoryview(_LENGTH.pack(len(payload)) + payload))
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
        """The next message once all of it is there. Room goes back to the writer before that, so that any size fits."""
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
        """The other process has closed its socket (or talks on it, which none does). What it wrote is still read."""
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
            if not self._is_closed:  # then the number may be another's by now
                self._events.remove_reader(self._freed)

"""The other end of a ring, byte by byte: each byte of the data chooses what it does, with the bytes that follow."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from google.protobuf.message import DecodeError

from pagoda.engine.v1.engine_pb2 import Ended
from pagoda_server.channel.link import MAX_MESSAGE_BYTES
from pagoda_server.channel.ring import Ring
from pagoda_server.channel.shm import ShmLink

RING_BYTES = 48  # so that messages wrap around, and are larger than the ring
MINE = Ended(detail="xyz")


def check(data: bytes) -> bool:
    return _loop().run_until_complete(_check(data))


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


async def _check(data: bytes) -> bool:
    ours, theirs = socket.socketpair()
    counters = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(4)]
    incoming = Ring(memoryview(bytearray(RING_BYTES)), counters[0], counters[1])
    outgoing = Ring(memoryview(bytearray(RING_BYTES)), counters[2], counters[3])
    rings: Any = SimpleNamespace(close=lambda: None)
    link = ShmLink[Ended, Ended](ours, rings, incoming=incoming, outgoing=outgoing, parse=Ended.FromString)
    other = _OtherEnd(incoming, outgoing)
    received: list[Ended] = []
    try:
        steps = iter(data)
        for action in steps:
            other.act(action, steps)
            if action & 8 and link.is_free:
                link.try_write(MINE)
            if not await _read(link, received):
                break
        if other.miscounts:
            return False
        sent, is_broken = other.sent()
        assert received == sent, "a message was changed or lost on the way"
        return not is_broken
    finally:
        link.close()
        theirs.close()
        for counter in counters:
            os.close(counter)


async def _read(link: ShmLink[Ended, Ended], received: list[Ended]) -> bool:
    """Read what has arrived. False if the link has broken."""
    link._notice()  # as the event loop calls it
    reading = asyncio.create_task(link.read())
    while True:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if not reading.done():
            reading.cancel()
            return True
        try:
            message = reading.result()
        except ConnectionError:
            return False
        if message is None:
            return False
        received.append(message)
        reading = asyncio.create_task(link.read())


class _OtherEnd:
    """Writes to a ring, rightly or not, and remembers the bytes as long as it has counted rightly."""

    def __init__(self, incoming: Ring, outgoing: Ring) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self._at = 0
        self._written = bytearray()
        self.miscounts = False  # of what it has written

    def act(self, action: int, rest: Iterator[int]) -> None:
        count = next(rest, 0)
        match action & 7:
            case 0 | 1 | 2 | 3:
                # At most half of the ring: the link reads after each action, and leaves the start of a length.
                self._write(bytes(byte for _, byte in zip(range(count % (RING_BYTES // 2)), rest, strict=False)))
            case 4:
                self._write(struct.pack("<I", count << (action >> 3) & 0xFFFFFFFF))
            case 5:
                _add(self._outgoing.freed, count << (action >> 2))
            case 6:
                _add(self._incoming.filled, count << (action >> 2))
                self.miscounts |= count > 0
            case 7:
                _add(self._incoming.filled, (1 << 64) - 2 - count)
                self.miscounts = True

    def _write(self, content: bytes) -> None:
        for byte in content:
            self._incoming.memory[self._at] = byte
            self._at = (self._at + 1) % RING_BYTES
        _add(self._incoming.filled, len(content))
        self._written += content

    def sent(self) -> tuple[list[Ended], bool]:
        """The messages in what was written, up to the first that is broken, and whether one is."""
        messages, at = [], 0
        while at + 4 <= len(self._written):
            (length,) = struct.unpack_from("<I", self._written, at)
            if length > MAX_MESSAGE_BYTES:
                return messages, True
            if at + 4 + length > len(self._written):
                break
            try:
                messages.append(Ended.FromString(bytes(self._written[at + 4 : at + 4 + length])))
            except DecodeError:
                return messages, True
            at += 4 + length
        return messages, False


def _add(counter: int, count: int) -> None:
    with contextlib.suppress(BlockingIOError):  # it cannot count any further
        os.eventfd_write(counter, min(count, (1 << 64) - 2))

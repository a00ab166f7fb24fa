"""A ring of bytes in shared memory, with one writer and one reader, each in a process of its own.

The memory holds data and nothing else. The positions travel through two eventfds, counters in the kernel that add up
what is written to them and give the sum, once, to whoever reads: `filled` counts the bytes put in, `freed` those taken
out. That makes them doorbells as well: a side that sleeps waits for its counter like for any descriptor.

On memory order: Python has no fences, and on ARM another core may see two stores in either order. The kernel takes a
lock for every access to an eventfd, so all that one side did to the memory before it added to a counter has happened
before the other side got that sum. A side touches only bytes that it was given this way, so nothing else is relied on.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ring:
    memory: memoryview
    filled: int  # eventfds, non-blocking
    freed: int

    def take(self, counter: int) -> int:
        """What was added to a counter since the last time."""
        with contextlib.suppress(BlockingIOError):  # nothing was
            return os.eventfd_read(counter)
        return 0

    def check(self, count: int) -> None:
        """Raises ConnectionError if the other side has counted more bytes than the ring has."""
        if count > len(self.memory):
            raise ConnectionError(f"the other side counts {count} bytes in a ring of {len(self.memory)}")


class RingWriter:
    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._at = 0
        self._room = len(ring.memory)

    def has_room_for(self, count: int) -> bool:
        """Raises ConnectionError if the reader claims to have freed more than the ring has."""
        if self._room < count:
            self._room += self._ring.take(self._ring.freed)
            self._ring.check(self._room)
        return self._room >= count

    def write(self, data: memoryview) -> int:
        """Puts in as much of `data` as there is room for. Returns how many bytes that were; never waits.

        Raises ConnectionError if the reader claims to have freed more than the ring has.
        """
        memory = self._ring.memory
        count = len(data) if self.has_room_for(len(data)) else self._room
        if count:
            before_end = min(count, len(memory) - self._at)
            memory[self._at : self._at + before_end] = data[:before_end]
            memory[: count - before_end] = data[before_end:count]
            self._at = (self._at + count) % len(memory)
            self._room -= count
            os.eventfd_write(self._ring.filled, count)
        return count


class RingReader:
    """`available` bytes can be read: those that notice() has learned of."""

    def __init__(self, ring: Ring) -> None:
        self.available = 0
        self._ring = ring
        self._at = 0
        self._read = 0  # bytes that the writer has not been given back

    def notice(self) -> None:
        """Learns of what was written since. Raises ConnectionError if the writer claims more than the ring has."""
        self.available += self._ring.take(self._ring.filled)
        self._ring.check(self.available + self._read)

    def read(self, count: int) -> bytes:
        """A copy of the next `count` bytes, at most `available`. They stay in the ring until release()."""
        memory = self._ring.memory
        end = self._at + count
        data = bytes(memory[self._at : end])
        if end > len(memory):
            data += memory[: end - len(memory)]
        self._at = end % len(memory)
        self.available -= count
        self._read += count
        return data

    def release(self) -> None:
        """Gives the room of all that was read back to the writer."""
        if self._read:
            os.eventfd_write(self._ring.freed, self._read)
            self._read = 0

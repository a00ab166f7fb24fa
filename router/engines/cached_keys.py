"""What the prefix caches of engines hold, as they report it, and what they will hold once they have computed more."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import control_pb2

from ...channel.strides import STRIDE
from .refusals import InvalidMessage

MOST_KEYS = 1 << 20  # of one engine, whatever size it says its cache has: 64 million tokens
EXPECTED_S = 10.0  # a prompt that was sent counts as cached for so long; then the engine has reported it, or never will
MOST_EXPECTED = 1 << 16  # keys


class CachedBits:
    """The engines that have each key cached: one bit an engine, so that one look-up finds all of them."""

    def __init__(self) -> None:
        self._bits: dict[int, int] = {}  # key → its engines
        self._taken = 0

    def __len__(self) -> int:
        return len(self._bits)

    def take_place(self) -> int:
        """Return the number of the lowest bit that no engine has."""
        place = (~self._taken & (self._taken + 1)).bit_length() - 1
        self._taken |= 1 << place
        return place

    def give_back(self, place: int) -> None:
        """Let another engine have the bit. No key may have it any more."""
        self._taken ^= 1 << place

    def set(self, keys: Iterable[int], bit: int) -> None:
        bits = self._bits
        for key in keys:
            bits[key] = bits.get(key, 0) | bit

    def clear(self, keys: Iterable[int], bit: int) -> None:
        bits = self._bits
        for key in keys:
            if rest := bits.get(key, 0) & ~bit:
                bits[key] = rest
            else:
                bits.pop(key, None)

    def num_cached(self, keys: Sequence[int]) -> list[int]:
        """Count the leading keys that each engine has, by its place. No count: no engine has any."""
        bits = self._bits
        left = bits.get(keys[0], 0) if keys else 0
        if not left:
            return []
        found = [0] * self._taken.bit_length()
        for count, key in enumerate(keys):
            now = left & bits.get(key, 0)
            while left != now:  # the engines that end here
                place = (left ^ now).bit_length() - 1
                found[place] = count
                left ^= 1 << place
            if not left:
                return found
        while left:
            place = left.bit_length() - 1
            found[place] = len(keys)
            left ^= 1 << place
        return found


class CachedKeys:
    """The stride keys of an engine's prefix cache (channel/strides.py).

    One costs about 240 bytes, and 90 an engine if many engines have it.

    most   keys that the cache can hold
    place  that of the engine in `all_bits`, until `close`
    """

    def __init__(
        self, info: control_pb2.EngineInfo, all_bits: CachedBits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        cache = info.kv_cache
        self.most = min(cache.num_blocks * max(1, -(-cache.block_size // STRIDE)), MOST_KEYS)
        self.place = all_bits.take_place()
        self._bit = 1 << self.place
        self._all_bits = all_bits
        self._clock = clock
        self._held: set[int] = set()
        self._number: int | None = None  # of the last delta; None: a snapshot is not complete
        self._expected: set[int] = set()
        self._expiring: deque[tuple[float, Sequence[int]]] = deque()

    def __len__(self) -> int:
        return len(self._held)

    def take_snapshot(self, part: engine_pb2.CacheSnapshot) -> None:
        """Raises InvalidMessage."""
        if part.is_first:
            before, self._held = self._held, set()
            self._all_bits.clear(before - self._expected, self._bit)
        self._add(part.keys)
        self._number = part.number if part.is_last else None

    def take_delta(self, delta: engine_pb2.CacheDelta) -> bool:
        """Return False if some were missed, so that another snapshot is needed. Raises InvalidMessage."""
        if self._number is None:
            return True  # the snapshot that was asked for has what it says
        if delta.number != self._number + 1:
            self._number = None
            return False
        self._number = delta.number
        removed = set(delta.removed)
        self._held -= removed
        self._all_bits.clear(removed - self._expected, self._bit)
        self._add(delta.stored)
        return True

    def _add(self, keys: Sequence[int]) -> None:
        if len(keys) > self.most:
            raise InvalidMessage(f"{len(keys)} cached prefixes at once, its cache holds {self.most}")
        keys = keys[:]  # as a list, which is read faster
        self._held.update(keys)
        self._all_bits.set(keys, self._bit)
        if len(self._held) > self.most:
            raise InvalidMessage(f"more than {self.most} cached prefixes, which is all its cache holds")

    def expect(self, keys: Sequence[int]) -> None:
        """Note that the engine computes a prompt with these keys: they count as cached."""
        now = self._clock()
        while self._expiring and (self._expiring[0][0] <= now or len(self._expected) > MOST_EXPECTED):
            self._expected.difference_update(late := self._expiring.popleft()[1])
            self._all_bits.clear((key for key in late if key not in self._held), self._bit)
        if keys:
            self._expected.update(keys)
            self._all_bits.set(keys, self._bit)
            self._expiring.append((now + EXPECTED_S, keys))

    def close(self) -> None:
        """Take the engine's keys out: it has been lost."""
        self._all_bits.clear(self._held | self._expected, self._bit)
        self._all_bits.give_back(self.place)

"""What the prefix caches of engines hold, as they report it, and what they will hold once they have computed more."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, repeat
from operator import and_

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import control_pb2

from ...channel.strides import STRIDE
from .refusals import InvalidMessage

MOST_KEYS = 1 << 20  # of one engine, whatever size it says its cache has: 64 million tokens
EXPECTED_S = 10.0  # a prompt that was sent counts as cached for so long; then the engine has reported it, or never will
MOST_EXPECTED = 1 << 16  # keys
MOST_RECENT = 1 << 14  # keys that were looked up last


class CachedBits:
    """The engines that have each key cached: one bit an engine, so that one look-up finds all of them.

    reporting  the bits of the engines that report what they have cached
    """

    def __init__(self) -> None:
        self.reporting = 0
        self._bits: dict[int, int] = {}  # key → its engines
        # Each look-up among millions of keys waits for memory. Keys that are looked up again lie close together here.
        self._recent: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._bits)

    def set(self, keys: Iterable[int], bit: int) -> None:
        bits, recent = self._bits, self._recent
        for key in keys:
            bits[key] = bits[key] | bit if key in bits else bit  # most keys share this number with others of the engine
            if key in recent:
                recent[key] = bits[key]

    def clear(self, keys: Iterable[int], bit: int) -> None:
        bits, recent = self._bits, self._recent
        for key in keys:
            recent.pop(key, None)
            if rest := bits.get(key, 0) & ~bit:
                bits[key] = rest
            else:
                bits.pop(key, None)

    def num_cached(self, keys: Sequence[int], num_rows: int) -> list[int]:
        """Count the leading keys that the engine in each row has. No count: no engine has any."""
        left = self._bits.get(keys[0], 0) if keys else 0
        if not left:
            return []
        found = [0] * num_rows
        holders = accumulate(self._look_up(keys), and_)
        for count, now in enumerate(chain(holders, (0,))):
            if ended := left ^ now:  # the engines that have no more
                while ended:
                    row = ended.bit_length() - 1
                    found[row] = count
                    ended ^= 1 << row
                if not now:
                    break
                left = now
        return found

    def _look_up(self, keys: Sequence[int]) -> list[int]:
        """Return the engines that have each key, up to the first key that no engine has."""
        bits, recent = self._bits, self._recent
        found = list(map(recent.get, keys, repeat(0)))
        if 0 in found:
            if len(recent) + len(keys) > MOST_RECENT:
                recent.clear()
            for place, key in enumerate(keys):
                if not found[place]:
                    if key not in bits:
                        return found[: place + 1]
                    recent[key] = found[place] = bits[key]
        return found


class CachedKeys:
    """The stride keys of an engine's prefix cache (channel/strides.py).

    One costs about 240 bytes, and 90 an engine if many engines have it.

    row   the engine's bit in `all_bits`
    most  keys that the cache can hold
    """

    def __init__(
        self, info: control_pb2.EngineInfo, all_bits: CachedBits, row: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        cache = info.kv_cache
        self.most = min(cache.num_blocks * max(1, -(-cache.block_size // STRIDE)), MOST_KEYS)
        self._bit = 1 << row
        self._all_bits = all_bits
        all_bits.reporting |= self._bit
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
        self._all_bits.reporting &= ~self._bit

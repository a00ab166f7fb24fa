"""What one engine's prefix cache holds, as the engine reports it, and what it will hold once it has computed more."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import control_pb2

from ...channel.strides import STRIDE
from .refusals import InvalidMessage

MOST_KEYS = 1 << 20  # of one engine, whatever size it says its cache has: 64 million tokens
EXPECTED_S = 10.0  # a prompt that was sent counts as cached for so long; then the engine has reported it, or never will
MOST_EXPECTED = 1 << 16  # keys


class CachedKeys:
    """The stride keys of an engine's prefix cache (channel/strides.py). It costs about 100 bytes for each.

    most  keys that the cache can hold
    """

    def __init__(self, info: control_pb2.EngineInfo, clock: Callable[[], float] = time.monotonic) -> None:
        cache = info.kv_cache
        self.most = min(cache.num_blocks * max(1, -(-cache.block_size // STRIDE)), MOST_KEYS)
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
            self._held = set()
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
        self._held.difference_update(delta.removed)
        self._add(delta.stored)
        return True

    def _add(self, keys: Sequence[int]) -> None:
        if len(keys) > self.most:
            raise InvalidMessage(f"{len(keys)} cached prefixes at once, its cache holds {self.most}")
        self._held.update(keys)
        if len(self._held) > self.most:
            raise InvalidMessage(f"more than {self.most} cached prefixes, which is all its cache holds")

    def num_cached(self, keys: Sequence[int]) -> int:
        """Count the leading keys that are cached, or will be. Chains lose their tails first, so bisection finds it."""
        held, expected = self._held, self._expected
        if not keys or (keys[0] not in held and keys[0] not in expected):
            return 0
        return bisect_left(keys, True, key=lambda key: key not in held and key not in expected)

    def expect(self, keys: Sequence[int]) -> None:
        """Note that the engine computes a prompt with these keys."""
        now = self._clock()
        while self._expiring and (self._expiring[0][0] <= now or len(self._expected) > MOST_EXPECTED):
            self._expected.difference_update(self._expiring.popleft()[1])
        if keys:
            self._expected.update(keys)
            self._expiring.append((now + EXPECTED_S, keys))

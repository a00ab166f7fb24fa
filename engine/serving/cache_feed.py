"""Reports what the prefix cache holds to the routers that follow it. The event loop's thread owns it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import TypeAlias

from pagoda.engine.v1 import engine_pb2

DELTA_EVERY_S, DELTA_KEYS = 0.25, 256  # a delta waits for the first of these
SNAPSHOT_KEYS = 8192  # of a part: tokens do not wait for a whole snapshot
MOST_BEHIND = 64  # deltas that a router has not taken: one that has more gets a snapshot instead

News: TypeAlias = engine_pb2.CacheSnapshot | engine_pb2.CacheDelta


class Follower:
    """What one router has not been sent yet.

    feed  the whole cache
    wake  called when there is news
    """

    def __init__(self, feed: CacheFeed, wake: Callable[[], None]) -> None:
        self._feed = feed
        self._wake = wake
        self._news: deque[News] = deque()
        self._needs_snapshot = True

    def restart(self) -> None:
        """Begin with a snapshot, which is made once the router takes it."""
        self._news.clear()
        self._needs_snapshot = True
        self._wake()

    def add(self, delta: engine_pb2.CacheDelta) -> None:
        if self._needs_snapshot:
            return
        self._news.append(delta)
        if len(self._news) > MOST_BEHIND + self._feed.num_parts:
            self.restart()
        self._wake()

    def take(self) -> News | None:
        """Return the next message; None: there is none."""
        if self._needs_snapshot:
            self._needs_snapshot = False
            self._news.extend(self._feed.snapshot())
        return self._news.popleft() if self._news else None


class CacheFeed:
    """The keys that the prefix cache holds, and the routers that get every change."""

    def __init__(self) -> None:
        self._keys: set[int] = set()
        self._changes: dict[int, bool] = {}  # since the last delta: key → whether it is cached now
        self._number = 0  # of the last delta
        self._followers: set[Follower] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_parts(self) -> int:
        """How many messages a snapshot has."""
        return -(-len(self._keys) // SNAPSHOT_KEYS) or 1

    def follow(self, wake: Callable[[], None]) -> Follower:
        follower = Follower(self, wake)
        self._followers.add(follower)
        wake()
        return follower

    def leave(self, follower: Follower) -> None:
        self._followers.discard(follower)

    def add(self, changes: dict[int, bool]) -> None:
        """Note what has changed in a step."""
        self._changes |= changes
        if len(self._changes) >= DELTA_KEYS:
            self._send()
        elif changes and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DELTA_EVERY_S, self._send)

    def snapshot(self) -> list[engine_pb2.CacheSnapshot]:
        """Return everything, in parts."""
        self._send()
        keys = iter(self._keys)
        parts = [
            engine_pb2.CacheSnapshot(number=self._number, keys=islice(keys, SNAPSHOT_KEYS))
            for _ in range(self.num_parts)
        ]
        parts[0].is_first = parts[-1].is_last = True
        return parts

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._changes:
            return
        stored = [key for key, is_cached in self._changes.items() if is_cached]
        removed = [key for key, is_cached in self._changes.items() if not is_cached]
        self._changes = {}
        self._keys.update(stored)
        self._keys.difference_update(removed)
        self._number += 1
        delta = engine_pb2.CacheDelta(number=self._number, stored=stored, removed=removed)
        for follower in self._followers:
            follower.add(delta)

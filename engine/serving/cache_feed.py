"""Reports what the prefix cache holds to the routers that follow it. The event loop's thread owns it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from pagoda.engine.v1 import engine_pb2

from ..core.step import CachedBlock

DELTA_KEYS = 256  # a delta waits for so many, or for `every_s`
SNAPSHOT_KEYS, SNAPSHOT_BLOCKS = 8192, 512  # of a part: tokens do not wait for a whole snapshot
MOST_BEHIND = 64  # deltas that a router has not taken: one that has more gets a snapshot instead

News: TypeAlias = dict[str, Any]  # what an EngineMessage says, by field
Value = TypeVar("Value")


class Follower:
    """What one router has not been sent yet.

    feed  the whole cache
    wake  called when there is news
    """

    def __init__(self, feed: Feed[Any], wake: Callable[[], None]) -> None:
        self._feed = feed
        self._wake = wake
        self._news: deque[News] = deque()
        self._needs_snapshot = True

    def restart(self) -> None:
        """Begin with a snapshot, which is made once the router takes it."""
        self._news.clear()
        self._needs_snapshot = True
        self._wake()

    def add(self, delta: News) -> None:
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

    def leave(self) -> None:
        self._feed.leave(self)


class Feed(ABC, Generic[Value]):
    """What the prefix cache holds, by key, and the routers that get every change."""

    part_len: ClassVar[int]  # of a snapshot
    every_s: ClassVar[float]

    def __init__(self) -> None:
        self._held: dict[int, Value] = {}
        self._changes: dict[int, Value | None] = {}  # since the last delta; nothing: it is no longer cached
        self._followers: set[Follower] = set()
        self._timer: asyncio.TimerHandle | None = None

    @abstractmethod
    def delta(self, stored: Mapping[int, Value], removed: Sequence[int]) -> News:
        """Make the message about a change."""

    @abstractmethod
    def part(self, held: Mapping[int, Value], is_first: bool, is_last: bool) -> News:
        """Make a part of a snapshot."""

    @property
    def num_parts(self) -> int:
        """How many messages a snapshot has."""
        return -(-len(self._held) // self.part_len) or 1

    def follow(self, wake: Callable[[], None]) -> Follower:
        follower = Follower(self, wake)
        self._followers.add(follower)
        wake()
        return follower

    def leave(self, follower: Follower) -> None:
        self._followers.discard(follower)

    def add(self, changes: Mapping[int, Value | None]) -> None:
        """Note what has changed in a step."""
        self._changes |= changes
        if len(self._changes) >= DELTA_KEYS:
            self._send()
        elif changes and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.every_s, self._send)

    def snapshot(self) -> list[News]:
        """Return everything, in parts."""
        self._send()
        entries, last = iter(self._held.items()), self.num_parts - 1
        return [self.part(dict(islice(entries, self.part_len)), at == 0, at == last) for at in range(last + 1)]

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._changes:
            return
        stored = {key: value for key, value in self._changes.items() if value}
        removed = [key for key, value in self._changes.items() if not value]
        self._changes = {}
        self._held |= stored
        for key in removed:
            self._held.pop(key, None)
        delta = self.delta(stored, removed)
        for follower in self._followers:
            follower.add(delta)


class StrideFeed(Feed[bool]):
    """The stride keys of the cache."""

    part_len, every_s = SNAPSHOT_KEYS, 0.25

    def __init__(self) -> None:
        super().__init__()
        self._number = 0  # of the last delta

    def delta(self, stored: Mapping[int, bool], removed: Sequence[int]) -> News:
        self._number += 1
        return {"cache_delta": engine_pb2.CacheDelta(number=self._number, stored=stored, removed=removed)}

    def part(self, held: Mapping[int, bool], is_first: bool, is_last: bool) -> News:
        part = engine_pb2.CacheSnapshot(number=self._number, keys=held, is_first=is_first, is_last=is_last)
        return {"cache_snapshot": part}


class BlockFeed(Feed[CachedBlock]):
    """The blocks of the cache, with their tokens."""

    # A gateway has no other source: what it does not know yet it sends elsewhere. A router expects what it has sent.
    part_len, every_s = SNAPSHOT_BLOCKS, 0.02

    def delta(self, stored: Mapping[int, CachedBlock], removed: Sequence[int]) -> News:
        return {"cached_blocks": engine_pb2.CachedBlocks(stored=map(_message, stored.items()), removed=removed)}

    def part(self, held: Mapping[int, CachedBlock], is_first: bool, is_last: bool) -> News:
        return {"cached_blocks": engine_pb2.CachedBlocks(stored=map(_message, held.items()), is_first=is_first)}


def _message(entry: tuple[int, CachedBlock]) -> engine_pb2.CachedBlock:
    return engine_pb2.CachedBlock(hash=entry[0], parent=entry[1].parent, tokens=entry[1].tokens)

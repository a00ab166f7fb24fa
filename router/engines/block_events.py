"""What the prefix caches of a router's engines hold, block by block, for subscribers outside.

Engines report blocks only once somebody has subscribed, because a block's tokens are many times as long as a key.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pagoda.engine.v1 import engine_pb2

from ..errors import ResourceExhausted, Unavailable
from .refusals import InvalidMessage

MOST_SUBSCRIPTIONS = 16
MOST_BLOCKS = 1 << 20  # of one engine
MOST_BEHIND = 1 << 16  # blocks that a subscriber has not taken, beside twice those that there are


@dataclass(frozen=True, slots=True)
class Change:
    """A change of which a subscriber learns.

    stored   blocks that no engine had before; the block before another one comes first
    removed  hashes of blocks that no engine has any more
    """

    stored: list[engine_pb2.CachedBlock] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.stored) + len(self.removed)


class Subscription:
    """What one subscriber knows of the blocks of some engines: a block is there if one of these has it."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._engines_of: dict[int, set[int]] = {}  # by a block's hash
        self._num_blocks: Counter[int] = Counter()  # by engine
        self._changes: deque[Change] = deque()
        self._num_behind = 0
        self._has_news = asyncio.Event()

    async def next(self) -> Change:
        """Wait for the next change. Raises Unavailable if too many have not been taken: the subscriber starts again."""
        while not self._changes:
            self._has_news.clear()
            await self._has_news.wait()
        if self._is_late:
            raise Unavailable("the subscriber is too slow: subscribe again")
        change = self._changes.popleft()
        self._num_behind -= len(change)
        return change

    @property
    def _is_late(self) -> bool:
        return self._num_behind > MOST_BEHIND + 2 * len(self._engines_of)

    def take(self, engine: int, blocks: engine_pb2.CachedBlocks) -> None:
        """Note what an engine has reported. Raises InvalidMessage."""
        if blocks.is_first:
            self.lose(engine)
        change = Change()
        for block in blocks.stored:
            engines = self._engines_of.setdefault(block.hash, set())
            if not engines:
                change.stored.append(block)
            self._num_blocks[engine] += engine not in engines
            engines.add(engine)
        if self._num_blocks[engine] > MOST_BLOCKS:
            raise InvalidMessage(f"cached_blocks: more than {MOST_BLOCKS}")
        self._remove(engine, blocks.removed, change)
        self._add(change)

    def lose(self, engine: int) -> None:
        """Note that an engine has nothing any more, or reports everything again."""
        change = Change()
        self._remove(engine, [key for key, engines in self._engines_of.items() if engine in engines], change)
        self._add(change)

    def _remove(self, engine: int, keys: Iterable[int], change: Change) -> None:
        for key in keys:
            if engine in (engines := self._engines_of.get(key, set())):
                engines.remove(engine)
                self._num_blocks[engine] -= 1
                if not engines:
                    del self._engines_of[key]
                    change.removed.append(key)

    def _add(self, change: Change) -> None:
        if not len(change) or self._is_late:  # one that is late starts again, so nothing more is kept for it
            return
        self._num_behind += len(change)
        self._changes.append(change)
        self._has_news.set()


class BlockEvents:
    """The subscriptions of a router, and what its engines report."""

    def __init__(self) -> None:
        self._subscriptions: set[Subscription] = set()

    @property
    def is_wanted(self) -> bool:
        return bool(self._subscriptions)

    @contextmanager
    def subscribe(self, model: str) -> Iterator[Subscription]:
        """Subscribe to engines that have the model. Raises ResourceExhausted, which names the limit.

        The caller then has the engines report everything.
        """
        if len(self._subscriptions) >= MOST_SUBSCRIPTIONS:
            raise ResourceExhausted(f"there are {MOST_SUBSCRIPTIONS} subscriptions, which is the limit")
        subscription = Subscription(model)
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.remove(subscription)

    def take(self, engine: int, model: str, blocks: engine_pb2.CachedBlocks) -> None:
        """Raises InvalidMessage."""
        for each in self._subscriptions:
            if each.model == model:
                each.take(engine, blocks)

    def lose(self, engine: int) -> None:
        for each in self._subscriptions:
            each.lose(engine)

"""How routers follow an engine's prefix cache."""

from __future__ import annotations

import asyncio

import pytest

from pagoda_server.engine.core.step import CachedBlock
from pagoda_server.engine.serving.cache_feed import (
    DELTA_KEYS,
    MOST_BEHIND,
    SNAPSHOT_BLOCKS,
    SNAPSHOT_KEYS,
    BlockFeed,
    Follower,
    StrideFeed,
)

pytestmark = pytest.mark.usefixtures("virtual_time")


class Router:
    """Applies what it takes, as a router does."""

    def __init__(self, feed: StrideFeed) -> None:
        self.num_wakes = self.num_deltas = 0
        self.follower: Follower = feed.follow(self.wake)
        self.keys: set[int] = set()
        self.number = -1

    def wake(self) -> None:
        self.num_wakes += 1

    def take_all(self) -> None:
        while (message := self.follower.take()) is not None:
            ((kind, news),) = message.items()
            if kind == "cache_snapshot":
                assert len(news.keys) <= SNAPSHOT_KEYS
                self.keys = {*news.keys} if news.is_first else self.keys | {*news.keys}
            else:
                assert news.number == self.number + 1
                self.num_deltas += 1
                self.keys = (self.keys | {*news.stored}) - {*news.removed}
            self.number = news.number


async def test_changes_gather_for_a_quarter_second_or_until_there_are_256() -> None:
    feed = StrideFeed()
    router = Router(feed)
    router.take_all()
    for key in range(10):
        feed.add({key: True})
    feed.add({3: False})
    router.take_all()
    assert router.keys == set()
    await asyncio.sleep(0.3)
    router.take_all()
    assert (router.keys, router.num_deltas) == ({*range(10)} - {3}, 1)
    feed.add(dict.fromkeys(range(100, 100 + DELTA_KEYS), True))
    router.take_all()
    assert router.num_deltas == 2


async def test_a_router_that_joins_or_asks_again_gets_everything_in_parts() -> None:
    feed = StrideFeed()
    keys = {*range(3 * SNAPSHOT_KEYS + 5)}
    feed.add(dict.fromkeys(keys, True))
    router = Router(feed)
    router.take_all()
    assert router.keys == keys
    feed.add({1 << 63: True})
    router.follower.restart()
    router.take_all()
    assert router.keys == {*keys, 1 << 63}


async def test_a_router_that_takes_nothing_gets_a_snapshot_instead_of_everything() -> None:
    feed = StrideFeed()
    router = Router(feed)
    router.take_all()
    for at in range(3 * MOST_BEHIND):
        feed.add(dict.fromkeys(range(DELTA_KEYS * at, DELTA_KEYS * (at + 1)), True))
    before = router.num_deltas
    router.number = -1
    router.take_all()
    assert router.num_deltas == before, "it got a snapshot"
    assert len(router.keys) == 3 * MOST_BEHIND * DELTA_KEYS


async def test_blocks_come_with_their_tokens_whoever_asks_for_them_later_too() -> None:
    feed = BlockFeed()
    blocks = {key: CachedBlock(key - 1 if key else None, [key, 7]) for key in range(SNAPSHOT_BLOCKS + 9)}
    feed.add(blocks)
    follower = feed.follow(lambda: None)
    first, second = (follower.take() or {} for _ in range(2))
    assert (first["cached_blocks"].is_first, second["cached_blocks"].is_first) == (True, False)
    came = [*first["cached_blocks"].stored, *second["cached_blocks"].stored]
    assert [(each.hash, list(each.tokens)) for each in came] == [(key, [key, 7]) for key in blocks]
    assert not came[0].HasField("parent")
    assert all(each.parent == each.hash - 1 for each in came[1:])
    feed.add({3: None, 4: None, 5: CachedBlock(None, [1, 2])})
    await asyncio.sleep(0.3)
    delta = (follower.take() or {})["cached_blocks"]
    assert (list(delta.removed), [each.hash for each in delta.stored], delta.is_first) == ([3, 4], [5], False)
    assert follower.take() is None

"""How routers follow an engine's prefix cache."""

from __future__ import annotations

import asyncio

import pytest

from pagoda.engine.v1 import engine_pb2
from pagoda_server.engine.serving.cache_feed import DELTA_KEYS, MOST_BEHIND, SNAPSHOT_KEYS, CacheFeed, Follower

pytestmark = pytest.mark.usefixtures("virtual_time")


class Router:
    """Applies what it takes, as a router does."""

    def __init__(self, feed: CacheFeed) -> None:
        self.num_wakes = self.num_deltas = 0
        self.follower: Follower = feed.follow(self.wake)
        self.keys: set[int] = set()
        self.number = -1

    def wake(self) -> None:
        self.num_wakes += 1

    def take_all(self) -> None:
        while (news := self.follower.take()) is not None:
            if isinstance(news, engine_pb2.CacheSnapshot):
                assert len(news.keys) <= SNAPSHOT_KEYS
                self.keys = {*news.keys} if news.is_first else self.keys | {*news.keys}
            else:
                assert news.number == self.number + 1
                self.num_deltas += 1
                self.keys = (self.keys | {*news.stored}) - {*news.removed}
            self.number = news.number


async def test_changes_gather_for_a_quarter_second_or_until_there_are_256() -> None:
    feed = CacheFeed()
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
    feed = CacheFeed()
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
    feed = CacheFeed()
    router = Router(feed)
    router.take_all()
    for at in range(3 * MOST_BEHIND):
        feed.add(dict.fromkeys(range(DELTA_KEYS * at, DELTA_KEYS * (at + 1)), True))
    before = router.num_deltas
    router.number = -1
    router.take_all()
    assert router.num_deltas == before, "it got a snapshot"
    assert len(router.keys) == 3 * MOST_BEHIND * DELTA_KEYS

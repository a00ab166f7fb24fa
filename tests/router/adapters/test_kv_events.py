"""SubscribeKvEvents: what caches hold, on real sockets, to subscribers that come, go, and are slow."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import admin_pb2, admin_pb2_grpc, control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from pagoda_server.router.adapters.kv_events import BATCH_BLOCKS, batches
from pagoda_server.router.adapters.protocols import smg_common_pb2 as smg
from pagoda_server.router.engines.block_events import (
    MOST_BEHIND,
    MOST_SUBSCRIPTIONS,
    BlockEvents,
    Change,
    Subscription,
)
from pagoda_server.router.errors import ResourceExhausted, Unavailable
from tests.end_to_end.asking import ask, request
from tests.end_to_end.test_tenants import by, tenants_file
from tests.servers import running_engine, running_server

METHOD = "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents"
SYNTHETIC = ("--model", "synthetic", "--step-ms", "1")
BLOCK = 4  # tokens of a block of the synthetic model


class Index:
    """Applies events as a gateway does, and checks that their numbers follow each other."""

    def __init__(self, address: str, start: int = 0) -> None:
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}  # hash → the hash before it, tokens
        self._channel = grpc.insecure_channel(address)
        subscribe = self._channel.unary_stream(
            METHOD, smg.SubscribeKvEventsRequest.SerializeToString, smg.KvEventBatch.FromString
        )
        self._batches = subscribe(smg.SubscribeKvEventsRequest(start_sequence_number=start), timeout=60)
        first = next(self._batches)
        assert first.events[0].HasField("cleared")
        self.number = first.sequence_number

    def close(self) -> None:
        self._batches.cancel()
        self._channel.close()

    def take(self) -> None:
        batch = next(self._batches)
        assert batch.sequence_number == self.number + 1
        self.number += 1
        for event in batch.events:
            before = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
            for block in event.stored.blocks:
                assert block.block_size == len(block.token_ids) == BLOCK
                self.blocks[block.block_hash] = (before, list(block.token_ids))
                before = block.block_hash
            for key in event.removed.block_hashes:
                del self.blocks[key]

    def take_until(self, *prompts: bytes) -> None:
        while not all(self.has(prompt) for prompt in prompts):
            self.take()

    def has(self, prompt: bytes) -> bool:
        return has_chain(self.blocks, prompt)


def has_chain(blocks: dict[int, tuple[int | None, list[int]]], prompt: bytes) -> bool:
    """Whether the chain of the prompt's full blocks is there.

    blocks  by hash: the hash before it, and its tokens
    """
    tokens, before = list(prompt), None
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        entry = (before, tokens[start : start + BLOCK])
        before = next((key for key, block in blocks.items() if block == entry), None)
        if before is None:
            return False
    return True


@pytest.fixture
def address() -> Iterator[str]:
    with running_server(*SYNTHETIC) as server:
        yield server.address


def complete(address: str, *prompts: bytes, salt: str = "") -> None:
    with grpc.insecure_channel(address) as channel:
        for prompt in prompts:
            message = request(prompt.decode(), max_tokens=1)
            message.cache.CopyFrom(inference_pb2.Cache(salt=salt))
            ask(inference_pb2_grpc.InferenceStub(channel), message)


def test_subscribers_learn_what_is_cached_and_what_no_longer_is(address: str) -> None:
    one, two, salted = b"the first prompt of several", b"the first prompt of them all", b"a prompt that is to be hidden"
    first = Index(address)
    complete(address, one)
    first.take_until(one)
    complete(address, salted, salt="s")
    complete(address, two)
    first.take_until(one, two)
    assert not first.has(salted)
    second = Index(address, start=1000)
    assert second.number == 1001, "numbers go on from the last one that the subscriber knows"
    second.take_until(one, two)
    assert second.blocks == first.blocks
    first.close()
    with grpc.insecure_channel(address) as channel:
        admin_pb2_grpc.AdminStub(channel).FlushCache(admin_pb2.FlushCacheRequest())
    complete(address, two)  # the engine reports with its steps
    while second.has(one):
        second.take()
    second.take_until(two)
    second.close()


def test_what_only_a_lost_engine_had_is_no_longer_there(tmp_path: Path) -> None:
    addresses = [f"unix:{tmp_path / name}" for name in ("one", "two")]
    prompts = [f"{at} is a prompt of one engine".encode() for at in range(4)]
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as dying:
        stack.enter_context(running_engine(addresses[0], *SYNTHETIC))
        dying.enter_context(running_engine(addresses[1], *SYNTHETIC))
        model = ("--model", "synthetic", "--engine", ",".join(addresses), "--choose", "load")
        server = stack.enter_context(running_server(*model))
        with grpc.insecure_channel(server.address) as channel:
            control = control_pb2_grpc.ControlStub(channel)
            while len(control.GetLoad(control_pb2.GetLoadRequest()).engines) < 2:
                time.sleep(0.05)
        index = Index(server.address)
        complete(server.address, *prompts)  # in turn
        index.take_until(*prompts)
        dying.close()
        while sum(map(index.has, prompts)) > 2:
            index.take()
        assert sum(map(index.has, prompts)) == 2
        index.close()


def test_only_an_admin_sees_what_all_tenants_have_cached(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(tenants_file("acme", "operators"))
    with (
        running_server(*SYNTHETIC, "--tenants-file", str(path)) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        subscribe = channel.unary_stream(
            METHOD, smg.SubscribeKvEventsRequest.SerializeToString, smg.KvEventBatch.FromString
        )
        with pytest.raises(grpc.RpcError) as caught:
            next(subscribe(smg.SubscribeKvEventsRequest(), timeout=10, metadata=by("acme")))
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert (
            next(subscribe(smg.SubscribeKvEventsRequest(), timeout=10, metadata=by("operators"))).sequence_number == 1
        )


def test_a_number_that_leaves_no_room_for_others_is_refused(address: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        Index(address, start=(1 << 64) - 1)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "start_sequence_number" in caught.value.details()


def block(key: int, parent: int | None = None) -> engine_pb2.CachedBlock:
    return engine_pb2.CachedBlock(hash=key, parent=parent, tokens=[1, 2])


async def test_engines_are_united_and_one_that_tells_of_everything_again_is_compared() -> None:
    subscription = Subscription("")

    async def next_change() -> tuple[list[int], list[int]]:
        change = await subscription.next()
        return [each.hash for each in change.stored], change.removed

    subscription.take(0, engine_pb2.CachedBlocks(stored=[block(1), block(2)], is_first=True))
    assert await next_change() == ([1, 2], [])
    subscription.take(1, engine_pb2.CachedBlocks(stored=[block(2), block(3)], is_first=True))
    assert await next_change() == ([3], [])
    subscription.take(0, engine_pb2.CachedBlocks(removed=[1, 2, 9]))
    assert await next_change() == ([], [1])
    subscription.take(1, engine_pb2.CachedBlocks(stored=[block(4)], is_first=True))
    assert await next_change() == ([], [2, 3])
    assert await next_change() == ([4], [])
    subscription.lose(1)
    assert await next_change() == ([], [4])


async def test_a_subscriber_that_takes_nothing_starts_again_and_little_is_kept_for_it() -> None:
    subscription = Subscription("")
    for at in range(MOST_BEHIND):
        subscription.take(0, engine_pb2.CachedBlocks(stored=[block(at % 7)]))
        subscription.take(0, engine_pb2.CachedBlocks(removed=[at % 7]))
    assert len(subscription._changes) <= MOST_BEHIND + 3  # blocks that there are count, too
    with pytest.raises(Unavailable, match="subscribe again"):
        await subscription.next()


async def test_subscriptions_are_bounded_and_leave_nothing_behind() -> None:
    events = BlockEvents()

    async def subscribe() -> None:
        with events.subscribe("") as subscription:
            await subscription.next()

    tasks = [asyncio.create_task(subscribe()) for _ in range(MOST_SUBSCRIPTIONS)]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted, match=str(MOST_SUBSCRIPTIONS)):
        await subscribe()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not events.is_wanted


def test_a_change_is_cut_into_batches_and_runs_keep_together() -> None:
    chain = [block(1 << 63), *(block((1 << 63) + at, (1 << 63) + at - 1) for at in range(1, BATCH_BLOCKS + 1))]
    first, second = batches(Change([*chain[:-1], block(7, 5)], list(range(BATCH_BLOCKS + 3))), 10)
    assert (first.sequence_number, second.sequence_number) == (10, 11)
    run, removed = first.events
    assert (len(run.stored.blocks), run.stored.HasField("parent_block_hash")) == (BATCH_BLOCKS, False)
    assert run.stored.blocks[0].block_hash == -(1 << 63), "hashes are signed there"
    assert len(removed.removed.block_hashes) == BATCH_BLOCKS
    alone, rest = second.events
    assert (alone.stored.parent_block_hash, alone.stored.blocks[0].block_hash) == (5, 7)
    assert list(rest.removed.block_hashes) == [BATCH_BLOCKS, BATCH_BLOCKS + 1, BATCH_BLOCKS + 2]

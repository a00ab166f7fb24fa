"""The router's end of the channel, over shared memory to an engine that the test plays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, TypeAlias

import grpc
import pytest

from pagoda.engine.v1 import engine_pb2, engine_pb2_grpc
from pagoda.v1 import control_pb2, inference_pb2
from pagoda_server.channel.link import Link
from pagoda_server.channel.shm import ShmServer
from pagoda_server.router.engines.channel import EngineChannel
from pagoda_server.router.engines.choosing import Asked, LeastLoaded
from pagoda_server.router.engines.fleet import Fleet, Member
from pagoda_server.router.engines.stream import WOKEN_AT_ONCE, EngineStream
from pagoda_server.router.engines.table import EngineTable
from pagoda_server.router.errors import Internal, Unavailable

HELLO = control_pb2.EngineInfo(
    vocab_size=1000, max_model_len=100_000, kv_cache=control_pb2.KvCacheInfo(token_capacity=100_000)
)
EngineEnd: TypeAlias = Link[engine_pb2.RouterMessage, engine_pb2.EngineMessage]


@asynccontextmanager
async def connected(
    answers_pings: bool = False, on_hang: Callable[[], None] = lambda: None, table: EngineTable | None = None
) -> AsyncIterator[tuple[EngineChannel, EngineEnd]]:
    """A channel and its engine's end, once the channel has greeted; it is ready if the engine answers no pings."""
    address = f"shm:@pagoda-test-channel-{os.getpid()}"
    accepted: asyncio.Future[EngineEnd] = asyncio.get_running_loop().create_future()
    ready, over = asyncio.Event(), asyncio.Event()

    async def serve(link: EngineEnd) -> None:
        await link.write(engine_pb2.EngineMessage(hello=HELLO, answers_pings=answers_pings))
        if not accepted.done():
            accepted.set_result(link)
        await over.wait()

    async def on_change() -> None:
        ready.set()

    server = ShmServer(address, engine_pb2.RouterMessage.FromString, serve)
    await server.start()
    channel = EngineChannel(address, hang_timeout_s=60, on_change=on_change, on_hang=on_hang, table=table)
    running = asyncio.create_task(channel.run())
    if not answers_pings:
        await ready.wait()
    yield channel, await accepted
    running.cancel()
    over.set()
    await asyncio.gather(running, return_exceptions=True)
    await server.stop()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110 (other tasks make it so)
            await asyncio.sleep(0.001)


def submit(prompt_len: int = 1) -> engine_pb2.Submit:
    return engine_pb2.Submit(prompt=[1] * prompt_len, sampling=inference_pb2.Sampling(n=1), max_tokens=9)


@pytest.mark.usefixtures("virtual_time")
async def test_first_tokens_are_taken_before_those_of_streams_that_run() -> None:
    order: list[tuple[int, int]] = []

    async def take(stream: EngineStream) -> None:
        while True:
            await stream.wait()
            order.extend((stream.first_sequence, token) for token in stream.inboxes[0].tokens)
            stream.inboxes[0].tokens.clear()

    async with connected() as (channel, engine):
        streams = [channel.submit(submit()) for _ in range(3)]
        tasks = [asyncio.create_task(take(stream)) for stream in streams]
        for sequences, tokens in (([1, 2], [10, 20]), ([1, 2, 3], [11, 21, 30])):
            step = engine_pb2.StepOutput(sequences=sequences, tokens=tokens)
            await engine.write(engine_pb2.EngineMessage(step=step))
            await asyncio.sleep(0.02)
        assert order == [(1, 10), (2, 20), (3, 30), (1, 11), (2, 21)]
        for task in tasks:
            task.cancel()


@pytest.mark.parametrize("news", ["first tokens", "tokens", "ends", "the engine's loss"])
async def test_what_arrives_while_a_step_is_written_does_not_wait_for_its_end(news: str) -> None:
    count = 10 * WOKEN_AT_ONCE
    sequences = range(1, count + 1)
    woken: list[int] = []
    seen = 0  # how many were woken when the loop saw what had arrived
    here, peer = socket.socketpair()

    def see() -> None:
        nonlocal seen
        here.recv(1)
        seen = len(woken)

    async def take(stream: EngineStream) -> None:
        while stream.error is None:
            with contextlib.suppress(Unavailable):
                await stream.wait()
            woken.append(stream.first_sequence)
            if len(woken) == 1:
                peer.send(b"!")

    async with connected() as (channel, engine), asyncio.TaskGroup() as group:
        asyncio.get_running_loop().add_reader(here, see)
        tasks = [group.create_task(take(channel.submit(submit()))) for _ in sequences]
        tokens = engine_pb2.StepOutput(sequences=sequences, tokens=[5] * count)
        if news != "first tokens":
            await engine.write(engine_pb2.EngineMessage(step=tokens))
            await until(lambda: len(woken) == count)
            woken.clear()
        if news == "the engine's loss":
            engine.close()
        elif news == "ends":
            ended = [engine_pb2.Ended(sequence=at, reason=engine_pb2.END_REASON_LENGTH) for at in sequences]
            await engine.write(engine_pb2.EngineMessage(step=engine_pb2.StepOutput(ended=ended)))
        else:
            await engine.write(engine_pb2.EngineMessage(step=tokens))
        await until(lambda: len(woken) == count)
        for task in tasks:
            task.cancel()
        asyncio.get_running_loop().remove_reader(here)
    assert woken == list(sequences)
    assert 0 < seen < count
    here.close()
    peer.close()


async def test_a_stream_that_waits_for_its_turn_keeps_its_place_and_gets_all_its_tokens_at_once() -> None:
    count = 10 * WOKEN_AT_ONCE
    taken: dict[int, list[list[int]]] = {at: [] for at in range(1, count + 1)}

    async def take(stream: EngineStream) -> None:
        while True:
            await stream.wait()
            if tokens := stream.inboxes[0].tokens[:]:
                taken[stream.first_sequence].append(tokens)
                stream.inboxes[0].tokens.clear()

    async with connected() as (channel, engine):
        tasks = [asyncio.create_task(take(channel.submit(submit()))) for _ in taken]
        for token in range(5):  # one after another, before the first few have been woken
            step = engine_pb2.StepOutput(sequences=taken, tokens=[token] * count)
            await engine.write(engine_pb2.EngineMessage(step=step))
        await until(lambda: all(list(chain(*each)) == list(range(5)) for each in taken.values()))
        assert len(taken[count]) < 5
        for task in tasks:
            task.cancel()


@pytest.mark.usefixtures("virtual_time")
async def test_a_stream_hears_of_its_start_however_the_engine_tells_it() -> None:
    starts: list[int] = []
    steps = [
        engine_pb2.StepOutput(started=[1]),
        engine_pb2.StepOutput(sequences=[2], tokens=[20]),
        engine_pb2.StepOutput(ended=[engine_pb2.Ended(sequence=3, reason=engine_pb2.END_REASON_DEADLINE)]),
    ]
    async with connected() as (channel, engine):
        streams = [channel.submit(submit(), partial(starts.append, number)) for number in (1, 2, 3)]
        channel.submit(submit()).close()
        for number, step in enumerate(steps, 1):
            step.started.append(4)  # it has been forgotten
            await engine.write(engine_pb2.EngineMessage(step=step))
            await asyncio.sleep(0.02)
            assert starts == list(range(1, number + 1))
        for stream in streams:
            stream.close()


@pytest.mark.usefixtures("virtual_time")
async def test_a_stream_whose_start_cannot_be_reported_ends_alone() -> None:
    def fails() -> None:
        raise ValueError("no place for it")

    step = engine_pb2.StepOutput(
        started=[1, 2], sequences=[2], tokens=[20],
        ended=[engine_pb2.Ended(sequence=2, reason=engine_pb2.END_REASON_LENGTH)],
    )  # fmt: skip
    async with connected() as (channel, engine):
        broken, other = channel.submit(submit(), fails), channel.submit(submit())
        await engine.write(engine_pb2.EngineMessage(step=step))
        await other.wait()
        assert other.inboxes[0].tokens == [20]
        assert other.inboxes[0].ended is not None
        with pytest.raises(Internal) as caught:
            await broken.wait()
        assert isinstance(caught.value.__cause__, ValueError)
        broken.close()
        messages = [await engine.read() for _ in range(3)]  # behind both requests
        assert messages[-1].abort.sequences == [1]


async def test_requests_reach_an_engine_that_reads_late_in_their_order() -> None:
    async with connected() as (channel, engine):
        streams = [channel.submit(submit(prompt_len=20_000)) for _ in range(30)]  # twice what the ring holds
        got = [await engine.read() for _ in streams]
        assert [message.submit.first_sequence for message in got if message] == list(range(1, 31))
        assert all(len(message.submit.prompt) == 20_000 for message in got if message)


@pytest.mark.usefixtures("virtual_time")
async def test_a_flush_whose_call_was_cancelled_leaves_the_channel_as_it_was() -> None:
    def flushed(freed_blocks: int) -> engine_pb2.EngineMessage:
        return engine_pb2.EngineMessage(cache_flushed=engine_pb2.CacheFlushed(freed_blocks=freed_blocks))

    async with connected() as (channel, engine):
        given_up, wanted = (asyncio.create_task(channel.questions.flush_cache()) for _ in range(2))
        for _ in range(2):
            await engine.read()
        given_up.cancel()
        await engine.write(flushed(3))
        await engine.write(flushed(5))
        assert await asyncio.wait_for(wanted, 5) == 5
        assert channel.is_ready


@asynccontextmanager
async def running(channel: EngineChannel) -> AsyncIterator[None]:
    task = asyncio.create_task(channel.run())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def nothing() -> None:
    pass


@pytest.mark.parametrize("address", ["127.0.0.1:9", "shm:/no/such/socket", "unix:/no/such/socket"])
async def test_an_address_where_no_engine_answers_is_logged_once_and_not_at_once(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(EngineChannel(address, hang_timeout_s=60, patience_s=600, on_change=nothing)):
        await asyncio.sleep(0.5)
    assert not caplog.records
    async with running(EngineChannel(address, hang_timeout_s=60, patience_s=0.3, on_change=nothing)):
        while not caplog.records:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
    assert [record.message.startswith(f"no engine at {address}: ") for record in caplog.records] == [True]


async def test_an_address_that_takes_no_connection_is_not_said_to_hang(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections wait in its queue
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with running(EngineChannel(address, hang_timeout_s=0.5, on_change=nothing)):
            await until(lambda: bool(caplog.messages))
    assert caplog.messages[0] == f"no engine at {address}: no connection within 0.5 s"


class ForgetfulCall:
    """A call as gRPC's are where a cancellation of its reader meets its end: the reader is told of the end alone.

    A second reader, if there is one, can be cancelled: then the test fails instead of hanging.
    """

    def __init__(self) -> None:
        self.is_read = asyncio.Event()
        self.has_ended = False

    async def __aiter__(self) -> AsyncIterator[engine_pb2.EngineMessage]:
        self.is_read.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if self.has_ended:
                raise
            self.has_ended = True
            nothing_told = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing_told, nothing_told, "refused") from None
        yield engine_pb2.EngineMessage()

    def cancel(self) -> None:
        pass


async def test_a_channel_that_is_cancelled_as_its_call_ends_is_not_opened_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = ForgetfulCall()
    monkeypatch.setattr(engine_pb2_grpc, "EngineStub", lambda _: SimpleNamespace(Connect=lambda metadata: call))
    task = asyncio.create_task(EngineChannel("127.0.0.1:9", hang_timeout_s=60, on_change=nothing).run())
    await call.is_read.wait()
    task.cancel()
    await asyncio.wait([task], timeout=10)
    assert task.cancelled()


@pytest.mark.usefixtures("virtual_time")
async def test_an_engine_that_goes_is_told_with_its_address(caplog: pytest.LogCaptureFixture) -> None:
    async with connected() as (channel, engine):
        engine.close()
        for _ in range(500):
            if not channel.is_ready:
                break
            await asyncio.sleep(0.01)
        assert caplog.messages == [f"lost the engine at {channel.address}: it has closed the connection"]


async def test_an_engine_is_ready_once_its_loop_has_answered() -> None:
    async with connected(answers_pings=True) as (channel, engine):
        message = await engine.read()
        assert message is not None
        assert message.WhichOneof("message") == "ping"
        await engine.write(engine_pb2.EngineMessage(step=engine_pb2.StepOutput()))  # other threads send load, too
        await asyncio.sleep(0.1)
        assert not channel.is_ready
        await engine.write(engine_pb2.EngineMessage(pong=engine_pb2.Pong()))
        await until(lambda: channel.is_ready)


@pytest.mark.usefixtures("virtual_time")
async def test_an_engine_is_picked_from_when_it_is_ready_until_it_says_goodbye_unless_its_answer_is_late() -> None:
    """A fleet keeps its candidates while no channel says that they have changed."""
    chooser = LeastLoaded()
    other: Any = SimpleNamespace(takes_requests=True, is_suspect=False, role="both", num_sequences=9, name="other")
    async with connected(answers_pings=True, table=chooser.table) as (channel, engine):
        fleet = Fleet(lambda member, number: (other, channel)[number], chooser)
        for name in ("other", "channel"):
            fleet.join(Member(name, name))
        assert fleet.pick() is other
        await engine.write(engine_pb2.EngineMessage(pong={}))
        await until(lambda: channel.is_ready)
        assert fleet.pick() is channel
        await until(lambda: channel.is_suspect)
        assert fleet.pick() is other
        await engine.write(engine_pb2.EngineMessage(pong={}))
        await until(lambda: not channel.is_suspect)
        assert fleet.pick() is channel
        await engine.write(engine_pb2.EngineMessage(goodbye={}))
        await until(lambda: channel.says_goodbye)
        assert fleet.pick() is other


@pytest.mark.usefixtures("virtual_time")
async def test_an_engine_that_knows_no_pings_gets_none_and_its_hang_is_not_hidden_by_short_requests() -> None:
    hangs: list[float] = []
    async with connected(on_hang=lambda: hangs.append(time.monotonic())) as (channel, engine):
        await asyncio.sleep(300)
        assert channel.is_ready, "an idle engine owes no message"
        began = time.monotonic()
        while not hangs:
            stream = channel.submit(submit())
            assert len(channel.sequences) == 1
            await asyncio.sleep(3)
            stream.close()
        assert 60 <= hangs[0] - began <= 65
        for kind in ("submit", "abort", "submit"):
            message = await engine.read()
            assert message is not None
            assert message.WhichOneof("message") == kind


async def test_a_cache_is_followed_only_once_that_is_wanted_and_if_the_engine_offers_it() -> None:
    async with connected() as (channel, engine):
        await engine.write(engine_pb2.EngineMessage(cache_snapshot={"keys": [1], "is_first": True, "is_last": True}))
        channel.follow_cache()
        stream = channel.submit(submit())
        message = await engine.read()
        assert message is not None
        assert message.WhichOneof("message") == "submit", "an engine that offers nothing is not asked"
        assert channel.cached is None
        stream.close()


async def test_an_engine_that_reports_more_than_its_cache_holds_is_lost() -> None:
    async with connected() as (channel, engine):
        channel.follow_cache()
        stream = channel.submit(submit())
        await engine.write(engine_pb2.EngineMessage(cache_snapshot={"keys": range(100), "is_first": True}))
        with pytest.raises(Unavailable):
            await stream.wait()
        assert channel.cached is None


async def test_prompt_tokens_count_until_the_first_token_and_those_of_other_routers_as_reported() -> None:
    async with connected() as (channel, engine):
        asked = Asked([1] * 100)
        asked.num_cached = 64
        first, second = channel.submit(submit(100), asked=asked), channel.submit(submit(10))
        assert channel.num_uncomputed == 46
        load = control_pb2.EngineLoad(uncomputed_tokens=146, prefill_tokens_per_s=1000)
        await engine.write(engine_pb2.EngineMessage(step={"load": load}))
        await until(lambda: (channel.num_sequences, channel.num_uncomputed) == (2, 146))
        step = engine_pb2.StepOutput(sequences=[first.first_sequence], tokens=[1])
        await engine.write(engine_pb2.EngineMessage(step=step))
        await until(lambda: channel.num_uncomputed == 10)
        second.close()
        assert channel.num_uncomputed == 0

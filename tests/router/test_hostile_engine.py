"""Engines that lie, flood and loop, over shared memory and gRPC: their connection ends, and nothing else does."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagoda.engine.v1 import engine_pb2, engine_pb2_grpc
from pagoda.v1 import control_pb2, inference_pb2, trace_pb2
from pagoda_server.channel.shm import ShmServer
from pagoda_server.router.engines import checking
from pagoda_server.router.engines.channel import RECONNECT_S, EngineChannel
from pagoda_server.router.engines.checking import IDLE_MESSAGES, MAX_TRACE_BYTES, Checks
from pagoda_server.router.engines.refusals import InvalidMessage, Standing
from pagoda_server.router.engines.stream import Wakeups
from pagoda_server.router.errors import Unavailable
from pagoda_server.runtime.restarts import LONGEST_PAUSE_S, PROVEN_S

Message = engine_pb2.EngineMessage
EPOCH = 7


def hello(epoch: int = EPOCH, **fields: Any) -> Message:
    info = {"vocab_size": 100, "max_model_len": 1000, "hidden_size": 4, "epoch": EPOCH} | fields
    info.setdefault("kv_cache", control_pb2.KvCacheInfo(token_capacity=1000))
    return Message(epoch=epoch, hello=control_pb2.EngineInfo(**info), answers_pings=True)


def with_adapters(**fields: int) -> Message:
    """The greeting of an engine that computes with adapters."""
    greeting = hello()
    greeting.adapter_limits.CopyFrom(engine_pb2.AdapterLimits(**({"max_adapters": 1, "max_loaded": 2} | fields)))
    return greeting


def held(*names: str, **fields: Any) -> Message:
    adapters = [engine_pb2.Adapter(name=name, **({"identity": bytes(32)} | fields)) for name in names]
    return Message(epoch=EPOCH, adapters=engine_pb2.Adapters(held=adapters))


def step(**fields: Any) -> Message:
    return Message(epoch=EPOCH, step=engine_pb2.StepOutput(**fields))


def ended(sequence: int = 1, **fields: Any) -> engine_pb2.Ended:
    return engine_pb2.Ended(sequence=sequence, reason=engine_pb2.END_REASON_STOP, **fields)


def logprobs(at: int = 0, **fields: Any) -> Message:
    return step(sequences=[1], tokens=[5], logprobs=[engine_pb2.Logprobs(at=at, **fields)])


def reading(sequence: int = 3, **fields: Any) -> Message:
    return step(readings=[engine_pb2.Reading(sequence=sequence, **fields)])


def trace(number: int = 0, is_last: bool = False) -> Message:
    return Message(epoch=EPOCH, trace=engine_pb2.Trace(number=number, part=trace_pb2.StepTracePart(), is_last=is_last))


PONG = Message(epoch=EPOCH, pong=engine_pb2.Pong())
# What an engine says after its greeting and the answer to the first ping. Sequences 1 and 2 run with up to 3 tokens,
# 3 reads a prompt of 2; 4 was never submitted.
LIES: dict[str, list[Message]] = {
    "hello twice": [hello()],
    "wrong epoch": [Message(epoch=8, step=engine_pb2.StepOutput(sequences=[1], tokens=[5]))],
    "pong without a ping": [PONG, PONG],
    "a token beyond the vocabulary": [step(sequences=[1], tokens=[100])],
    "fewer tokens than sequences": [step(sequences=[1, 2], tokens=[5])],
    "a sequence never submitted": [step(sequences=[4], tokens=[5])],
    "the start of a sequence never submitted": [step(started=[4])],
    "ended twice": [step(ended=[ended()]), step(ended=[ended()])],
    "ended twice in a message": [step(ended=[ended(), ended()])],
    "a token after the end": [step(ended=[ended()]), step(sequences=[1], tokens=[5])],
    "more tokens than asked for": [step(sequences=[1] * 4, tokens=[5] * 4)],
    "an end without a time": [step(ended=[ended(queue_s=math.nan)])],
    "an end before its start": [step(ended=[ended(decode_s=-1.0)])],
    "a long detail": [step(ended=[ended(detail="x" * (checking.MAX_DETAIL + 1))])],
    "absurd load": [step(load=control_pb2.EngineLoad(running=1 << 31))],
    "negative load": [step(load=control_pb2.EngineLoad(step_time_s=-1.0))],
    "load that is no number": [step(load=control_pb2.EngineLoad(step_time_s=math.nan))],
    "too many tenants": [step(tenants=engine_pb2.Tenants(listed=[control_pb2.TenantLoad()] * 65))],
    "a tenant's name": [step(tenants=engine_pb2.Tenants(listed=[control_pb2.TenantLoad(name="a\nb")]))],
    "more logprobs than tokens": [step(logprobs=[engine_pb2.Logprobs()])],
    "logprobs of no token": [logprobs(at=1)],
    "logprobs that are no number": [logprobs(logprob=math.nan)],
    "huge logprobs": [logprobs(top_ids=[1] * 1000, top_logprobs=[0.0] * 1000)],
    "logprobs of unequal lengths": [logprobs(top_ids=[1])],
    "logprobs beyond the vocabulary": [logprobs(top_ids=[100], top_logprobs=[0.0])],
    "readings nobody asked for": [reading(1)],
    "readings beyond the prompt": [reading(start=1, logprobs=[engine_pb2.Logprobs()] * 2)],
    "readings without an end": [reading(start=0)] * 5,
    "a short embedding": [reading(embedding=[0.0] * 3)],
    "an embedding that is no number": [reading(embedding=[math.inf] * 4)],
    "a flush nobody asked for": [Message(epoch=EPOCH, cache_flushed=engine_pb2.CacheFlushed())],
    "a trace nobody asked for": [trace(number=5)],
    "blocks nobody asked for": [Message(epoch=EPOCH, cached_blocks=engine_pb2.CachedBlocks(removed=[1]))],
    "adapters nobody asked for": [Message(epoch=EPOCH, adapters=engine_pb2.Adapters())],
    "an adapter nobody asked for": [Message(epoch=EPOCH, adapter_answer=engine_pb2.AdapterAnswer(number=3))],
    "a flood of loads": [step()] * (IDLE_MESSAGES + 2),
    "a flood of nothing": [Message(epoch=EPOCH)] * (IDLE_MESSAGES + 2),
    "a flood of starts": [step(started=[1])] * (IDLE_MESSAGES + 2),
}
GREETINGS: dict[str, list[Message]] = {
    "a step before hello": [step()],
    "an epoch of its own beside hello": [hello(epoch=8)],
    "a million settings": [hello(settings={str(at): "" for at in range(1_000_000)})],
    "a setting with control characters": [hello(settings={"a": "b\x1b[2J"})],
    "a model with control characters": [hello(model="m\nERROR root")],
    "a long name": [hello(device="x" * 10_000)],
    "no vocabulary": [hello(vocab_size=0)],
    "a huge vocabulary": [hello(vocab_size=1 << 31)],
    "room for no adapter": [with_adapters(max_loaded=0)],
    "more adapters than it may hold": [with_adapters(), held("a", "b", "c")],
    "twice the same adapter": [with_adapters(), held("a", "a")],
    "an adapter with control characters": [with_adapters(), held("a\nERROR root")],
    "an adapter without a name": [with_adapters(), held("")],
    "a short identity": [with_adapters(), held("a", identity=b"x")],
    "a long path": [with_adapters(), held("a", path="x" * 10_000)],
    "a flood of adapters": [with_adapters(), *[held("a")] * (IDLE_MESSAGES + 2)],
    "no cache": [hello(kv_cache=control_pb2.KvCacheInfo())],
}
Play = Callable[[Any], Any]


class _Servicer(engine_pb2_grpc.EngineServicer):
    def __init__(self, play: Play) -> None:
        self._play = play

    async def Connect(self, request_iterator: Any, context: Any) -> None:
        await self._play(_GrpcEnd(request_iterator, context))


class _GrpcEnd:
    """The engine's end of a call, as a Link."""

    def __init__(self, requests: Any, context: Any) -> None:
        self._requests, self._context = requests, context

    async def read(self) -> engine_pb2.RouterMessage | None:
        message: engine_pb2.RouterMessage | None = await anext(aiter(self._requests), None)
        return message

    async def write(self, message: Message) -> None:
        try:
            await self._context.write(message)
        except Exception as error:
            raise ConnectionError("the call is over") from error


@asynccontextmanager
async def playing(transport: str, folder: Path, play: Play) -> AsyncIterator[str]:
    """An engine that plays to every router that connects."""
    if transport == "shm":
        address = f"shm:@pagoda-hostile-{os.getpid()}-{id(play)}"
        server = ShmServer(address, engine_pb2.RouterMessage.FromString, play)
        await server.start()
        yield address
        await server.stop()
        return
    grpc_server = grpc.aio.server()
    engine_pb2_grpc.add_EngineServicer_to_server(_Servicer(play), grpc_server)
    address = f"unix:{folder / 'engine'}"
    grpc_server.add_insecure_port(address)
    await grpc_server.start()
    yield address
    await grpc_server.stop(0)


@asynccontextmanager
async def used(address: str, wakeups: Wakeups | None = None, **options: Any) -> AsyncIterator[EngineChannel]:
    async def on_change() -> None:
        pass

    channel = EngineChannel(address, hang_timeout_s=60, on_change=on_change, wakeups=wakeups, **options)
    task = asyncio.create_task(channel.run())
    try:
        yield channel
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110 (other tasks make it so)
            await asyncio.sleep(0.002)


def submit(max_tokens: int = 3, **fields: Any) -> engine_pb2.Submit:
    return engine_pb2.Submit(prompt=[1, 2], sampling=inference_pb2.Sampling(n=1), max_tokens=max_tokens, **fields)


async def greeted(link: Any) -> None:
    """Greet as an honest engine does, and read what was submitted."""
    await link.write(hello())
    await link.read()
    await link.write(PONG)


TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "grpc"])


@TRANSPORTS
@pytest.mark.parametrize("lie", [*LIES, *GREETINGS])
async def test_a_lie_ends_its_connection_alone(
    transport: str, lie: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "IDLE_S", 60.0)  # this machine may send a flood slowly
    submitted = asyncio.Event()

    async def play_good(link: Any) -> None:
        await greeted(link)
        while (message := await link.read()) and not message.HasField("submit"):
            pass
        with contextlib.suppress(ConnectionError):
            while True:
                await link.write(step(sequences=[1], tokens=[5]))
                await asyncio.sleep(0.005)

    async def play_bad(link: Any) -> None:
        with contextlib.suppress(ConnectionError):
            if lie in GREETINGS:
                for message in GREETINGS[lie]:
                    await link.write(message)
            else:
                await greeted(link)
                await submitted.wait()
                for message in LIES[lie]:
                    await link.write(message)
            await asyncio.sleep(60)

    wakeups = Wakeups()
    async with (
        playing("shm", tmp_path, play_good) as good_address,
        playing(transport, tmp_path, play_bad) as bad_address,
        used(good_address, wakeups) as good,
        used(bad_address, wakeups) as bad,
    ):
        await until(lambda: good.is_ready)
        steady = good.submit(submit(max_tokens=100_000))
        await until(lambda: steady.inboxes[0].tokens)
        if lie in LIES:
            await until(lambda: bad.is_ready)
            streams = [bad.submit(submit()), bad.submit(submit())]
            streams.append(bad.submit(submit(readout=engine_pb2.Readout(logprobs_from=1))))
            submitted.set()
        await until(lambda: bad.standing.refusals["protocol"])
        assert not bad.is_ready
        if lie in LIES:
            live = [stream for stream in streams if stream.live]
            await until(lambda: all(isinstance(stream.error, Unavailable) for stream in live))
        count = len(steady.inboxes[0].tokens)
        await until(lambda: len(steady.inboxes[0].tokens) > count + 3)
        assert good.is_ready
        assert steady.error is None
    about = [each for each in caplog.messages if bad_address in each and "breaks the protocol" in each]
    assert len(about) == 1
    assert about[0].isprintable()


@TRANSPORTS
async def test_an_engine_that_breaks_the_protocol_again_and_again_is_tried_seldom_and_logged_once(
    transport: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[float] = []

    async def play(link: Any) -> None:
        tried.append(asyncio.get_running_loop().time())
        with contextlib.suppress(ConnectionError):
            await link.write(step())
            await asyncio.sleep(60)

    async with playing(transport, tmp_path, play) as address, used(address) as channel:
        await until(lambda: len(tried) == 3)
        assert tried[1] - tried[0] >= 1
        assert tried[2] - tried[1] >= 2
        assert channel.standing.refusals["protocol"] >= 2
    assert len([each for each in caplog.messages if "breaks the protocol" in each]) == 1


async def test_a_message_beyond_the_limit_is_not_kept(tmp_path: Path) -> None:
    tried = 0

    async def play(link: Any) -> None:
        nonlocal tried
        tried += 1
        with contextlib.suppress(ConnectionError):
            await greeted(link)
            await link.write(step(ended=[ended(detail="x" * (65 << 20))]))
            await asyncio.sleep(60)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with playing("grpc", tmp_path, play) as address, used(address):
        await until(lambda: tried >= 2)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KB; the engine is in this process


# -- without a connection ----------------------------------------------------------------------------------------------


@pytest.fixture
def checks() -> Checks:
    checks = Checks()
    checks.check(hello())
    return checks


def test_a_trace_that_never_ends_is_cut(checks: Checks) -> None:
    checks.sends(engine_pb2.RouterMessage(take_trace=engine_pb2.TakeTrace(number=0)))
    part = trace()
    part.trace.part.moves.extend([trace_pb2.TracedMove(tenant="t" * 1000)] * 2000)
    for _ in range(MAX_TRACE_BYTES // (part.ByteSize() + 64)):
        checks.check(part)
    with pytest.raises(InvalidMessage, match="trace: too long"):
        checks.check(part)


def test_a_trace_that_has_ended_does_not_go_on(checks: Checks) -> None:
    checks.sends(engine_pb2.RouterMessage(take_trace=engine_pb2.TakeTrace(number=0)))
    checks.check(trace(is_last=True))
    with pytest.raises(InvalidMessage, match="trace"):
        checks.check(trace())


def test_sequences_that_were_aborted_and_never_end_are_counted(checks: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "MAX_UNENDED", 10)
    for number in range(1, 12):
        checks.sends(engine_pb2.RouterMessage(submit=submit(first_sequence=number)))
        checks.forgets([number])
        checks.forgets([number])
    with pytest.raises(InvalidMessage, match="aborted"):
        checks.check(step())


def test_what_an_honest_engine_says_passes(checks: Checks) -> None:
    checks.sends(engine_pb2.RouterMessage(submit=submit(first_sequence=1)))
    checks.sends(engine_pb2.RouterMessage(submit=submit(first_sequence=2, outputs=[inference_pb2.TokenIds(ids=[5])])))
    checks.forgets([2])
    entry = engine_pb2.Logprobs(at=1, logprob=-math.inf, top_ids=[1], top_logprobs=[0.0])
    checks.check(step(started=[1, 2]))
    checks.check(step(sequences=[1, 1, 1, 2, 2], tokens=[5] * 5, logprobs=[entry], ended=[ended(1), ended(2)]))


@pytest.mark.usefixtures("virtual_time")
async def test_a_pause_grows_with_each_fault_until_the_engine_has_served_for_a_minute() -> None:
    standing = Standing()
    assert [standing.strike() for _ in range(7)] == [1, 2, 4, 8, 16, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    standing.served(PROVEN_S - 1)
    assert standing.strike() == LONGEST_PAUSE_S
    standing.served(PROVEN_S)
    assert [standing.strike(RECONNECT_S) for _ in range(3)] == [RECONNECT_S, 1, 2]


@pytest.mark.usefixtures("virtual_time")
async def test_a_fault_is_one_line_a_minute_however_many_there_are() -> None:
    standing = Standing()
    assert [standing.may_say("a"), standing.may_say("a"), standing.may_say("b")] == [True, False, True]
    await asyncio.sleep(61)
    assert standing.may_say("a")
    for at in range(10_000):
        standing.may_say(str(at))
    assert len(standing._said) <= 64

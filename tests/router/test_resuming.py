"""What is kept of streams, within which bounds, and what of it a client is sent again."""

from __future__ import annotations

import asyncio
import random
import tracemalloc

import pytest

from pagoda.engine.v1 import engine_pb2
from pagoda.v1.inference_pb2 import GenerateRequest, GenerateResponse, Sampling
from pagoda_server.router.errors import Aborted, NotFound
from pagoda_server.router.request.generate_call import GenerateCall
from pagoda_server.router.request.resuming import KeptSequence, KeptStream, KeptStreams
from pagoda_server.router.request.validation import to_submit, validate_generate
from tests.router.test_generate_call import LENGTH, LIMITS, Engine, Letters, Writer, said

ABORTED = engine_pb2.END_REASON_ABORTED


class OneSequence(Engine):
    async def wait(self) -> None:
        await super().wait()
        del self.inboxes[1:]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def add(streams: KeptStreams, request_id: str, n: int = 1, *, tenant: str = "", stop: str = "") -> KeptStream:
    request = GenerateRequest(request_id=request_id, prompt="x", sampling=Sampling(n=n), resumable=True)
    request.stopping.stop.extend([stop] if stop else [])
    params = validate_generate(request, LIMITS)
    stream = streams.add(tenant, params, 0.0, None)
    stream.submitted(to_submit(params, [1], 100, ()))
    return stream


def found(streams: KeptStreams, request_id: str, tenant: str = "") -> bool:
    return streams.find(tenant, request_id) is not None


async def responses_of(stream: KeptStream, engine: Engine, counts: list[int]) -> list[GenerateResponse]:
    """What a call writes that goes on with a kept stream."""
    writer = Writer()
    async with stream:
        call = GenerateCall(stream.params, 1, Letters(), writer, 0.0, stream)  # type: ignore[arg-type]
        await call.replay(stream, counts, ())
        await call.run(engine)  # type: ignore[arg-type]
    return writer.responses


def text(responses: list[GenerateResponse]) -> str:
    return "".join(response.tokens.text for response in responses)


async def test_text_that_only_the_end_added_comes_again_and_other_text_does_not() -> None:
    stream = add(KeptStreams(9.0), "a", stop="bcz")
    whole = await responses_of(stream, OneSequence({0: said([1, 2, 3])}, {0: said([], reason=ABORTED)}), [0])
    assert [response.tokens.text for response in whole] == ["a", "bc", ""]
    assert text(await responses_of(stream, OneSequence(), [0])) == "abc"
    assert text(await responses_of(stream, OneSequence(), [1])) == "bc"
    last, end = await responses_of(stream, OneSequence(), [3])
    assert (last.tokens.text, len(last.tokens.tokens)) == ("bc", 0)
    assert end.finished == whole[-1].finished
    together = add(KeptStreams(9.0), "b", stop="bcz")
    await responses_of(together, OneSequence({0: said([1, 2, 3], reason=ABORTED)}), [0])
    (end,) = await responses_of(together, OneSequence(), [3])
    assert end.HasField("usage")


async def test_a_sequence_that_met_its_stop_string_does_not_run_again() -> None:
    stream = add(KeptStreams(9.0), "a", stop="b")
    engine = OneSequence({0: said([1, 2, 9])})
    with pytest.raises(IndexError):  # the engine dies before it has read the abort
        await responses_of(stream, engine, [0])
    assert engine.aborted == [0]
    assert stream.num_unfinished == 0
    (end,) = await responses_of(stream, OneSequence(), [2])
    assert end.finished.stop_string == "b"
    assert end.usage.completion_tokens == 2


async def test_a_long_replay_is_cut_into_messages_that_clients_accept() -> None:
    stream = add(KeptStreams(9.0), "a")
    await responses_of(stream, OneSequence({0: said([1] * 1000, reason=LENGTH)}), [0])
    *parts, _ = await responses_of(stream, OneSequence(), [100])
    assert sum(len(part.tokens.tokens) for part in parts) == 900
    assert max(len(part.tokens.tokens) for part in parts) <= 256


async def test_a_deadline_ends_the_call_and_leaves_the_sequence_open() -> None:
    stream = add(KeptStreams(9.0), "a")
    late = said([1], reason=engine_pb2.END_REASON_DEADLINE)
    with pytest.raises(Exception, match="deadline"):
        await responses_of(stream, OneSequence({0: late}), [0])
    assert stream.num_unfinished == 1
    rest = await responses_of(stream, OneSequence({0: said([2], reason=LENGTH)}), [1])
    assert text(rest) == "b"


async def test_a_stream_is_kept_for_its_time_after_each_of_its_calls() -> None:
    clock = Clock()
    streams = KeptStreams(10.0, clock=clock)
    stream = add(streams, "a")
    async with stream:
        clock.now += 100.0
        assert found(streams, "a"), "time passes only while no call writes it"
    clock.now += 9.0
    async with stream:
        clock.now += 9.0
    clock.now += 9.0
    assert found(streams, "a")
    clock.now += 1.0
    assert not found(streams, "a")
    assert (len(streams), streams.num_bytes) == (0, 0)
    with pytest.raises(NotFound):
        await stream.__aenter__()


async def test_ids_are_of_one_tenant_and_a_new_request_replaces_an_ended_one() -> None:
    streams = KeptStreams(10.0)
    for tenant in ("one", "two"):
        async with add(streams, "a", tenant=tenant):
            pass
    assert len(streams) == 2
    assert not found(streams, "a", "three")
    former = streams.find("one", "a")
    async with add(streams, "a", tenant="one"):
        assert streams.find("one", "a") is not former
    assert len(streams) == 2


async def test_what_was_never_submitted_is_not_kept() -> None:
    streams = KeptStreams(10.0)
    params = validate_generate(GenerateRequest(request_id="a", prompt="x", resumable=True), LIMITS)
    async with streams.add("", params, 0.0, None):
        assert found(streams, "a")
    assert not found(streams, "a")


@pytest.mark.usefixtures("virtual_time")
async def test_a_call_that_resumes_ends_the_one_before_it() -> None:
    stream = add(KeptStreams(10.0), "a")
    order = []

    async def write(name: str, seconds: float) -> None:
        async with stream:
            order.append(f"{name} begins")
            try:
                await asyncio.sleep(seconds)
            finally:
                order.append(f"{name} ends")

    calls = [asyncio.create_task(write(name, 60.0)) for name in "123"]
    await asyncio.sleep(0.01)
    await write("last", 0.0)
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(end) for end in ends] == [Aborted] * 3
    assert [name.split()[1] for name in order] == ["begins", "ends"] * 4, "one at a time"
    assert order[-1] == "last ends"


async def test_memory_and_number_stay_within_their_bounds() -> None:
    random.seed(0)
    streams = KeptStreams(10.0, max_streams=20, max_bytes=300_000)
    live = []
    for at in range(300):
        stream = add(streams, str(at))
        await stream.__aenter__()
        live.append(stream)
        for each in live:
            each.note(0, [1] * random.randrange(200), (), None)
        if at % 3:
            await live.pop(random.randrange(len(live))).__aexit__(None, None, None)
        if len(live) > 9:
            await live.pop().__aexit__(None, None, None)
        assert len(streams) <= 20
        assert 0 <= streams.num_bytes <= 300_000
        held = [stream for stream in live if stream.is_kept]
        assert len(held) == len(live) or len(streams) == len(held), "streams that have ended go first"
    for stream in live:
        await stream.__aexit__(None, None, None)


def test_the_bytes_that_a_sequence_counts_are_those_that_it_takes() -> None:
    step = engine_pb2.StepOutput()
    for at in range(64):
        step.logprobs.add(at=at, logprob=-1.5, top_ids=range(90_000, 90_020), top_logprobs=[-2.5] * 20)
    sequence = KeptSequence()
    tracemalloc.start()
    try:
        counted = sum(sequence.note([at], [step.logprobs[at % 64]], None) for at in range(2000))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken <= 1.1 * counted


async def test_a_stream_that_makes_room_for_others_is_written_to_its_end() -> None:
    streams = KeptStreams(10.0, max_streams=1)
    stream = add(streams, "a")
    await responses_of(stream, OneSequence({0: said([1, 2])}, {0: said([3], reason=LENGTH)}), [0])
    async with stream:
        add(streams, "b")
        assert not stream.is_kept
        writer = Writer()
        call = GenerateCall(stream.params, 1, Letters(), writer, 0.0, stream)  # type: ignore[arg-type]
        await call.replay(stream, [1], ())
        assert text(writer.responses) == "bc"


@pytest.mark.usefixtures("virtual_time")
async def test_time_passes_without_further_calls() -> None:
    streams = KeptStreams(0.05, clock=asyncio.get_running_loop().time)
    for request_id in "ab":
        async with add(streams, request_id):
            pass
        await asyncio.sleep(0.01)
    assert len(streams) == 2
    await asyncio.sleep(0.4)
    assert len(streams) == 0


async def test_a_stream_that_made_room_for_others_is_not_kept_on() -> None:
    streams = KeptStreams(10.0, max_bytes=20_000)
    stream = add(streams, "a")
    async with stream:
        stream.note(0, [1] * 10_000, (), None)
        assert not stream.is_kept
        stream.note(0, [1] * 10_000, (), None)
        assert streams.num_bytes == 0
    assert not found(streams, "a")

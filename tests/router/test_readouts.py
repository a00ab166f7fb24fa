"""How the sequences of Embed and Score reach an engine: a few at a time, and the first one ahead if the others gain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pagoda.engine.v1 import engine_pb2
from pagoda_server.router.engines.stream import EngineStream
from pagoda_server.router.errors import Unavailable
from pagoda_server.router.request.readouts import AT_ONCE, ReadoutStream

LENGTH = engine_pb2.END_REASON_LENGTH


class Engine:
    """Takes requests and ends their sequences on demand."""

    def __init__(self) -> None:
        self.streams: list[EngineStream] = []
        self.starts: list[Callable[[], None]] = []
        self.aborted: list[int] = []

    def submit(self, submit: engine_pb2.Submit, on_start: Callable[[], None]) -> EngineStream:
        number = submit.first_sequence
        stream = EngineStream(number, 1, abort=self.aborted.extend, forget=lambda _: None, on_start=on_start)
        self.streams.append(stream)
        self.starts.append(on_start)
        return stream

    def end(self, at: int, reason: engine_pb2.EndReason = LENGTH) -> None:
        stream = self.streams[at]
        stream.inboxes[0].ended = engine_pb2.Ended(sequence=at, reason=reason)
        stream.live.clear()
        stream.wake.set()


def stream_of(engine: Engine, count: int, leads: bool, started: list[int] | None = None) -> ReadoutStream:
    def submit(at: int) -> engine_pb2.Submit:
        return engine_pb2.Submit(first_sequence=at)

    channel: Any = engine
    return ReadoutStream(channel, count, submit, leads, (started if started is not None else []).append)


async def test_few_sequences_are_with_the_engine_at_once_and_all_of_them_end() -> None:
    engine, count = Engine(), AT_ONCE + 20
    stream = stream_of(engine, count, leads=False)
    assert len(engine.streams) == AT_ONCE
    for at in (3, 1, 2):
        engine.end(at)
    ended = []
    async for at, inbox in stream.outputs():
        assert inbox.ended is not None
        ended.append(at)
        assert len(engine.streams) - len(ended) <= AT_ONCE
        for live in [at for at, each in enumerate(engine.streams) if each.live]:
            engine.end(live)
    assert sorted(ended) == list(range(count))
    assert ended[:3] == [1, 2, 3]


async def test_the_first_sequence_goes_ahead_of_those_that_share_with_it() -> None:
    engine = Engine()
    stream = stream_of(engine, 5, leads=True)
    assert len(engine.streams) == 1
    outputs = stream.outputs()
    engine.streams[0].wake.set()  # a token, not yet its end
    engine.end(0)
    assert (await anext(outputs))[0] == 0
    following = anext(outputs)
    task = following.__await__()
    next(task)  # runs until it waits
    assert len(engine.streams) == 5


async def test_a_start_is_told_once_for_each_sequence() -> None:
    engine, started = Engine(), list[int]()
    stream_of(engine, 3, leads=False, started=started)
    for at in (1, 1, 0, 1, 2):
        engine.starts[at]()
    assert started == [1, 0, 2]


async def test_an_abort_sends_no_further_sequences() -> None:
    engine = Engine()
    stream = stream_of(engine, AT_ONCE + 5, leads=False)
    stream.abort()
    assert sorted(engine.aborted) == list(range(AT_ONCE))
    for at in range(AT_ONCE):
        engine.end(at, engine_pb2.END_REASON_ABORTED)
    assert len([at async for at, _ in stream.outputs()]) == AT_ONCE
    assert len(engine.streams) == AT_ONCE


async def test_a_lost_engine_ends_the_call_and_closing_ends_its_sequences() -> None:
    engine = Engine()
    stream = stream_of(engine, 4, leads=False)
    engine.streams[2].error = Unavailable("lost")
    engine.streams[2].wake.set()
    with pytest.raises(Unavailable):
        await anext(stream.outputs())
    stream.close()
    assert sorted(engine.aborted) == [0, 1, 2, 3]

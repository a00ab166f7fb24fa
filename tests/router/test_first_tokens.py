"""The first tokens of a request, from an engine for prompts: their readers do not see that they end there."""

from __future__ import annotations

import pytest

from pagoda.engine.v1 import engine_pb2
from pagoda_server.router.engines.stream import EngineStream
from pagoda_server.router.request.placement import FirstTokens, HandedOver


def arrives(stream: EngineStream, index: int, token: int, reason: engine_pb2.EndReason) -> None:
    stream.inboxes[index].tokens.append(token)
    stream.inboxes[index].ended = engine_pb2.Ended(reason=reason)
    stream.live.discard(index)
    stream.wake.set()


def taken(first: FirstTokens, index: int) -> tuple[list[int], bool]:
    """Take all that an inbox holds, as a reader does: the tokens, and whether their sequence has ended."""
    inbox = first.inboxes[index]
    tokens, ended = inbox.tokens, inbox.ended
    inbox.tokens, inbox.ended = [], None
    return tokens, ended is not None


def streams(count: int) -> tuple[EngineStream, FirstTokens]:
    """A stream of so many sequences from the engine, and what its reader sees."""
    stream = EngineStream(7, count, abort=lambda which: None, forget=lambda stream: None, on_start=lambda: None)
    return stream, FirstTokens(stream)


async def test_an_end_that_arrives_while_the_reader_writes_is_hidden_too() -> None:
    stream, first = streams(2)
    arrives(stream, 0, 11, engine_pb2.END_REASON_LENGTH)
    await first.wait()
    assert taken(first, 0) == ([11], False)
    arrives(stream, 1, 12, engine_pb2.END_REASON_LENGTH)  # before the reader comes to this sequence
    assert taken(first, 1) == ([], False)
    await first.wait()
    assert taken(first, 1) == ([12], False)
    assert [end.ended.reason for end in first.ends if end.ended] == [engine_pb2.END_REASON_LENGTH] * 2
    with pytest.raises(HandedOver):
        await first.wait()


async def test_an_end_that_is_the_answers_own_is_seen() -> None:
    stream, first = streams(1)
    arrives(stream, 0, 11, engine_pb2.END_REASON_STOP)
    await first.wait()
    assert taken(first, 0) == ([11], True)

"""Events with ids: which ones a client gets that goes on from any of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pagoda.v1 import inference_pb2
from pagoda_server.router.errors import InvalidArgument
from pagoda_server.router.http.openai.requests import Asked
from pagoda_server.router.http.openai.resuming import EventId, ResumableAnswer
from tests.router.http.openai.test_answers import finished, tokens

Message = inference_pb2.GenerateResponse


def late(text: str, index: int = 0) -> Message:
    """Text that only the end has added, without a token."""
    return Message(tokens=inference_pb2.Tokens(index=index, text=text))


def record(raw: bytes) -> inference_pb2.Token:
    return inference_pb2.Token(id=1, bytes=raw, logprob=-1.0)


def answered(asked: Asked, messages: Sequence[Message], received: EventId | None = None) -> list[tuple[str, str]]:
    """Id and data of each event."""
    answer = ResumableAnswer(asked, "r: é", "m", received)
    raw = b"".join(answer.take(message) for message in messages) + answer.end()
    assert raw.endswith(b"data: [DONE]\n\n")
    lines = [event.split("\n") for event in raw.decode().split("\n\n")[:-2]]
    return [(id.removeprefix("id: "), data) for id, data in lines]


def resent(messages: Sequence[Message], received: EventId) -> list[Message]:
    """What a kept stream sends again, by index: what holds tokens that the client lacks, and all that holds none."""
    found, counts = [], [0] * len(received.places)
    for index in range(len(counts)):
        for message in messages:
            if (message.finished if message.HasField("finished") else message.tokens).index == index:
                counts[index] += len(message.tokens.tokens)
                if not message.tokens.tokens or counts[index] > received.places[index].num_tokens:
                    found.append(Message.FromString(message.SerializeToString()))
                    found[-1].ClearField("usage")
    found[-1].usage.CopyFrom(messages[-1].usage)
    return found


CHAT = Asked(is_chat=True, is_stream=True, is_resumable=True, has_usage=True, n=2, created=5)
TEXT = Asked(is_chat=False, is_stream=True, is_resumable=True, has_usage=True, n=2, created=5, logprobs=0)
SILENT = [tokens(""), tokens("a"), tokens("", index=1), finished(index=1, is_last=False), tokens("b"), late("c"),
          late("d"), finished()]  # fmt: skip
ENDS = [late("a"), finished(is_last=False), late("b", index=1), finished(index=1)]
PARTS = [tokens("", record(b"\xc3")), tokens("x", record(b"x"), index=1), tokens("é", record(b"\xa9"), record(b"y")),
         finished(index=1, is_last=False), tokens("!", record(b"!")), late("z"), finished()]  # fmt: skip


@pytest.mark.parametrize(("asked", "messages"), [(CHAT, SILENT), (CHAT, ENDS), (TEXT, PARTS), (TEXT, ENDS)])
def test_a_client_gets_each_event_behind_its_last_one_once(asked: Asked, messages: Sequence[Message]) -> None:
    whole = answered(asked, messages)
    assert len({id for id, _ in whole}) == len(whole)
    for at, (id, _) in enumerate(whole, start=1):
        received = EventId.read(id)
        assert (received.created, received.request_id) == (5, "r: é")
        rest = answered(asked, resent(messages, received), received)
        assert sorted(data for _, data in rest) == sorted(data for _, data in whole[at:])
        assert not rest or rest[-1] == whole[-1]


def test_an_id_of_fewer_sequences_than_the_stream_has_ends_it_with_an_error() -> None:
    answer = ResumableAnswer(Asked(is_chat=True, is_stream=True, is_resumable=True), "r", "m")
    with pytest.raises(InvalidArgument, match="more sequences"):
        answer.take(tokens("x", index=1))

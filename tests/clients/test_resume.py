"""What the client makes of a resumable stream that breaks: which call follows, and what of its answer is new."""

from __future__ import annotations

import grpc
import pytest

from pagoda import NotFound, Unavailable
from pagoda.connection import Attempts
from pagoda.errors import PagodaError
from pagoda.resume import Resumption
from pagoda.v1.inference_pb2 import Finished, GenerateRequest, GenerateResponse, Prompt, Token, Tokens, Usage

PROMPT = GenerateResponse(prompt=Prompt())


def tokens(index: int, count: int, text: str = "") -> GenerateResponse:
    return GenerateResponse(tokens=Tokens(index=index, tokens=[Token(id=7)] * count, text=text))


def end(index: int, *, is_last: bool = False) -> GenerateResponse:
    return GenerateResponse(finished=Finished(index=index), usage=Usage(prompt_tokens=1) if is_last else None)


def resumption(retries: int = 3) -> Resumption:
    return Resumption(GenerateRequest(prompt="x", resumable=True), Attempts(retries, None, jitter=lambda: 1.0))


def lost() -> Unavailable:
    return Unavailable("gone", grpc.StatusCode.UNAVAILABLE)


def unknown() -> NotFound:
    return NotFound("no stream is kept", grpc.StatusCode.NOT_FOUND)


def test_it_says_how_many_tokens_of_each_sequence_have_arrived() -> None:
    stream = resumption()
    assert isinstance(first := stream.request(), GenerateRequest)
    assert first.request_id, "so that a stream whose first message is lost can be resumed"
    assert all(stream.takes(message) for message in (PROMPT, tokens(2, 3), tokens(0, 1), tokens(2, 2), end(0)))
    assert stream.delay_after(lost()) == pytest.approx(0.1)
    again = stream.request()
    assert (again.request_id, list(again.received)) == (first.request_id, [1, 0, 5])  # type: ignore[union-attr]


def test_what_comes_again_is_taken_once() -> None:
    stream = resumption()
    for message in (PROMPT, tokens(0, 2), tokens(0, 0, "the end"), end(0), tokens(1, 1)):
        assert stream.takes(message)
    stream.delay_after(lost())
    assert [stream.takes(message) for message in (PROMPT, tokens(0, 0, "the end"), end(0))] == [False] * 3
    assert stream.takes(tokens(1, 0, "another end"))
    assert stream.takes(end(1))


def test_an_end_may_add_several_messages_without_tokens() -> None:
    stream = resumption()
    texts = ["an end", "in", "three parts"]
    assert all(stream.takes(message) for message in (tokens(0, 2), *(tokens(0, 0, text) for text in texts[:2])))
    for known in (2, 3, 3):
        stream.delay_after(lost())
        assert [stream.takes(tokens(0, 0, text)) for text in texts] == [at >= known for at in range(3)]


def test_the_usage_is_told_even_if_it_comes_with_an_end_that_is_known() -> None:
    stream = resumption()
    assert stream.takes(end(0))
    last = end(0, is_last=True)
    assert stream.takes(last)
    assert not last.HasField("finished")
    assert last.usage.prompt_tokens == 1


def test_a_connection_that_breaks_after_the_last_message_has_broken_nothing() -> None:
    stream = resumption()
    stream.takes(end(0, is_last=True))
    assert stream.delay_after(lost()) is None


def test_a_stream_that_the_server_does_not_know_begins_anew_if_nothing_had_arrived() -> None:
    stream = resumption()
    stream.delay_after(lost())
    assert stream.resumes
    assert stream.delay_after(unknown()) == 0
    assert not stream.resumes


def test_a_stream_that_is_not_kept_any_more_ends_with_what_broke_it() -> None:
    stream = resumption()
    stream.takes(tokens(0, 1))
    broken = lost()
    stream.delay_after(broken)
    with pytest.raises(Unavailable) as caught:
        stream.delay_after(unknown())
    assert caught.value is broken


def test_attempts_count_anew_when_the_stream_has_gone_on() -> None:
    stream = resumption(retries=2)
    for _ in range(5):
        stream.takes(tokens(0, 1))
        stream.delay_after(lost())
        stream.delay_after(lost())
    stream.takes(PROMPT)
    stream.delay_after(lost())
    stream.takes(PROMPT)  # it comes again with each attempt and says nothing new
    stream.delay_after(lost())
    with pytest.raises(Unavailable):
        stream.delay_after(lost())


@pytest.mark.parametrize("code", [grpc.StatusCode.ABORTED, grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED])
def test_other_errors_end_it(code: grpc.StatusCode) -> None:
    stream = resumption()
    stream.takes(tokens(0, 1))
    with pytest.raises(PagodaError):
        stream.delay_after(PagodaError("no", code))

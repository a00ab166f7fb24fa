"""Which of several sequences are returned, and what their client sees of it."""

from __future__ import annotations

import pytest

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import inference_pb2
from pagoda.v1.inference_pb2 import GenerateRequest, GenerateResponse, Sampling
from pagoda_server.router.engines.engine_stream import SequenceInbox
from pagoda_server.router.errors import DeadlineExceeded
from pagoda_server.router.request.inference import GenerateCall
from pagoda_server.router.request.limits import Limits
from pagoda_server.router.request.validation import validate_generate

LIMITS = Limits(max_model_len=2048, vocab_size=1000, kv_token_capacity=8192)


class Letters:
    """A detokenizer: id 1 is "a"."""

    def push(self, ids: tuple[int, ...] | list[int]) -> str:
        return "".join(chr(ord("`") + id) for id in ids)

    def flush(self) -> str:
        return ""

    def detokenizer(self, skips_special_tokens: bool) -> Letters:
        return self


class Writer:
    def __init__(self) -> None:
        self.responses: list[GenerateResponse] = []

    async def write(self, response: GenerateResponse) -> None:
        copy = GenerateResponse()
        copy.CopyFrom(response)
        self.responses.append(copy)


Said = tuple[int, list[int], list[float], int | None]  # index, tokens, their logprobs, the reason of its end


class Engine:
    """A stream that says one thing after the other; `written` is what the client had before each."""

    def __init__(self, count: int, says: list[Said], writer: Writer) -> None:
        self.inboxes = [SequenceInbox() for _ in range(count)]
        self.written: list[int] = []
        self.aborted: list[int] = []
        self._says = says
        self._writer = writer

    async def wait(self) -> None:
        self.written.append(len(self._writer.responses))
        index, tokens, logprobs, reason = self._says.pop(0)
        inbox = self.inboxes[index]
        inbox.tokens += tokens
        inbox.logprobs += [engine_pb2.Logprobs(logprob=logprob) for logprob in logprobs]
        if reason is not None:
            inbox.ended = engine_pb2.Ended(reason=reason)

    def abort(self, index: int) -> None:
        self.aborted.append(index)


LENGTH = engine_pb2.END_REASON_LENGTH


async def returned(
    says: list[Said], n: int, best_of: int, *, stop: tuple[str, ...] = (), logprobs: int | None = None
) -> tuple[list[GenerateResponse], Engine]:
    request = GenerateRequest(text="x", sampling=Sampling(n=n, best_of=best_of))
    request.stopping.stop.extend(stop)
    if logprobs is not None:
        request.output.logprobs = logprobs
    writer = Writer()
    engine = Engine(best_of, says, writer)
    call = GenerateCall(validate_generate(request, LIMITS, "m"), 1, Letters(), writer, 0.0)  # type: ignore[arg-type]
    await call.run(engine)  # type: ignore[arg-type]
    return writer.responses, engine


def texts(responses: list[GenerateResponse]) -> list[str]:
    """By index; each is told in full before the next."""
    ends = [response.finished.index for response in responses if response.HasField("finished")]
    assert ends == list(range(len(ends)))
    told = [response.tokens for response in responses if response.HasField("tokens")]
    return ["".join(tokens.text for tokens in told if tokens.index == at) for at in ends]


async def test_the_best_are_returned_best_first_and_not_before_all_have_ended() -> None:
    says: list[Said] = [
        (0, [1], [-1.0], None),
        (1, [2], [-0.1], None),
        (2, [3], [-0.5], LENGTH),
        (1, [2], [-0.2], LENGTH),
        (0, [1], [-0.9], LENGTH),
    ]
    responses, engine = await returned(says, n=2, best_of=3)
    assert texts(responses) == ["bb", "c"]
    assert engine.written == [0] * 5
    assert not any(token.HasField("logprob") for response in responses for token in response.tokens.tokens)


async def test_length_is_no_disadvantage_and_equals_come_in_their_order() -> None:
    says: list[Said] = [
        (2, [3] * 4, [-0.5] * 4, LENGTH),
        (1, [2], [-0.5], LENGTH),
        (0, [1] * 2, [-0.5, -0.75], LENGTH),
    ]
    responses, _ = await returned(says, n=2, best_of=3)
    assert texts(responses) == ["b", "cccc"]


async def test_logprobs_are_told_where_they_are_asked_for() -> None:
    says: list[Said] = [(0, [1], [-1.0], LENGTH), (1, [2, 2], [-0.25, -0.5], LENGTH)]
    responses, _ = await returned(says, n=1, best_of=2, logprobs=0)
    assert [token.logprob for token in responses[0].tokens.tokens] == [-0.25, -0.5]


async def test_what_comes_after_a_stop_string_counts_for_nothing() -> None:
    says: list[Said] = [
        (0, [1, 2, 9, 9], [-0.3, -0.3, -8.0, -8.0], None),
        (1, [3], [-0.4], LENGTH),
        (0, [9], [-8.0], engine_pb2.END_REASON_ABORTED),
    ]
    responses, engine = await returned(says, n=1, best_of=2, stop=("b",))
    assert engine.aborted == [0]
    assert texts(responses) == ["a"]
    assert responses[-1].finished.stop == "b"
    assert responses[-1].usage.completion_tokens == 3


async def test_a_cancelled_sequence_without_tokens_is_returned_only_for_want_of_others() -> None:
    cancelled = engine_pb2.END_REASON_ABORTED
    says: list[Said] = [(0, [], [], cancelled), (1, [2], [-9.0], cancelled)]
    responses, _ = await returned(list(says), n=1, best_of=2)
    assert texts(responses) == ["b"]
    assert responses[-1].finished.reason == inference_pb2.FINISH_REASON_CANCELLED


async def test_one_that_misses_the_deadline_ends_the_call_and_nothing_is_told() -> None:
    says: list[Said] = [(0, [1], [-1.0], LENGTH), (1, [2], [-1.0], engine_pb2.END_REASON_DEADLINE)]
    with pytest.raises(DeadlineExceeded):
        await returned(says, n=1, best_of=2)


async def test_a_long_answer_is_told_in_messages_of_bounded_size() -> None:
    says: list[Said] = [(0, [1], [-9.0], LENGTH), *[(1, [2] * 10, [-0.5] * 10, None)] * 60, (1, [], [], LENGTH)]
    responses, _ = await returned(says, n=1, best_of=2)
    assert texts(responses) == ["b" * 600]
    assert [len(response.tokens.tokens) for response in responses[:-1]] == [260, 260, 80]

"""What a client receives, in whatever order sequences advance."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pagoda.engine.v1 import engine_pb2
from pagoda.v1.inference_pb2 import GenerateRequest, GenerateResponse, Sampling
from pagoda_server.router.engines.stream import SequenceInbox
from pagoda_server.router.errors import DeadlineExceeded
from pagoda_server.router.request.fields import Limits
from pagoda_server.router.request.generate_call import GenerateCall, OutputRoom
from pagoda_server.router.request.validation import validate_generate

LIMITS = Limits(max_model_len=2048, vocab_size=1000, kv_token_capacity=8192)
LENGTH = engine_pb2.END_REASON_LENGTH


class Letters:
    """A detokenizer: id 1 is "a"."""

    def push(self, ids: tuple[int, ...] | list[int]) -> str:
        return "".join(chr(ord("`") + id) for id in ids)

    def flush(self) -> str:
        return ""

    def detokenizer(self, skips_special_tokens: bool, kept: Sequence[str] = ()) -> Letters:
        return self


class Writer:
    def __init__(self) -> None:
        self.responses: list[GenerateResponse] = []

    async def write(self, response: GenerateResponse) -> None:
        copy = GenerateResponse()
        copy.CopyFrom(response)
        self.responses.append(copy)


class Engine:
    """A stream that gives its reader these inboxes, one set after the other."""

    def __init__(self, *says: dict[int, SequenceInbox]) -> None:
        self.inboxes: list[SequenceInbox] = []
        self.aborted: list[int] = []
        self._says = list(says)

    async def wait(self) -> None:
        now = self._says.pop(0)
        self.inboxes = [now.get(index, SequenceInbox()) for index in range(3)]

    def abort(self, index: int) -> None:
        self.aborted.append(index)


def said(
    tokens: list[int], logprob: float = -1.0, reason: engine_pb2.EndReason | None = None, score: float | None = None
) -> SequenceInbox:
    ended = None if reason is None else engine_pb2.Ended(reason=reason)
    return SequenceInbox(tokens, [engine_pb2.Logprobs(logprob=logprob) for _ in tokens], ended, score)


async def responses_to(engine: Engine, sampling: Sampling, stop: tuple[str, ...] = ()) -> list[GenerateResponse]:
    request = GenerateRequest(prompt="x", sampling=sampling)
    request.stopping.stop.extend(stop)
    request.output.logprobs = 0
    writer = Writer()
    call = GenerateCall(validate_generate(request, LIMITS), 1, Letters(), writer, 0.0)  # type: ignore[arg-type]
    await call.run(engine)  # type: ignore[arg-type]
    return writer.responses


def texts(responses: list[GenerateResponse]) -> list[str]:
    told = [response.tokens for response in responses if response.HasField("tokens")]
    return ["".join(tokens.text for tokens in told if tokens.index == at) for at in range(3)]


async def test_what_comes_after_a_stop_string_counts_for_nothing() -> None:
    engine = Engine(
        {0: said([1, 2, 9, 9]), 1: said([3], reason=LENGTH), 2: said([4], reason=LENGTH)},
        {0: said([9], reason=engine_pb2.END_REASON_ABORTED)},
    )
    responses = await responses_to(engine, Sampling(n=3), stop=("b",))
    assert engine.aborted == [0]
    assert texts(responses) == ["a", "c", "d"]
    assert responses[-1].finished.stop_string == "b"
    assert responses[-1].usage.completion_tokens == 2 + 1 + 1


async def test_one_that_misses_the_deadline_ends_the_call() -> None:
    engine = Engine({0: said([1], reason=LENGTH), 1: said([2], reason=engine_pb2.END_REASON_DEADLINE)})
    with pytest.raises(DeadlineExceeded):
        await responses_to(engine, Sampling(n=3))


async def test_room_for_an_open_length_grows_with_the_output_up_to_the_most() -> None:
    grown: list[int] = []
    room = OutputRoom(4, 11, grown.append)
    engine = Engine(
        {0: said([1, 2]), 2: said([1], reason=LENGTH)},
        {1: said([1, 2, 3])},
        {0: said([1] * 5, reason=LENGTH)},
        {1: said([], reason=LENGTH)},
    )
    params = validate_generate(GenerateRequest(prompt="x", sampling=Sampling(n=3)), LIMITS)
    assert params.has_open_length
    writer = Writer()
    await GenerateCall(params, 1, Letters(), writer, 0.0, room=room).run(engine)  # type: ignore[arg-type]
    assert (room.num_tokens, grown) == (11, [2, 3, 2])


def test_a_length_is_open_only_if_nothing_limits_it() -> None:
    limited = GenerateRequest(prompt="x", stopping={"max_tokens": 5})
    assert not validate_generate(limited, LIMITS).has_open_length


async def test_usage_sums_what_was_drafted_and_accepted_for_all_sequences() -> None:
    ends = [engine_pb2.Ended(reason=LENGTH, drafted_tokens=5, accepted_tokens=at) for at in range(3)]
    engine = Engine({at: SequenceInbox([1], [engine_pb2.Logprobs()], end, None) for at, end in enumerate(ends)})
    usage = (await responses_to(engine, Sampling(n=3)))[-1].usage
    assert (usage.drafted_tokens, usage.accepted_tokens) == (15, 3)

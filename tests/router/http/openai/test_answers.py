"""Messages of the protocol as answers of the OpenAI API."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from pagoda.v1 import inference_pb2
from pagoda_server.router.errors import Aborted, InvalidArgument
from pagoda_server.router.http.openai.answers import DONE, answer_to
from pagoda_server.router.http.openai.requests import MAX_WHOLE_LOGPROBS, Asked

STOP, LENGTH = inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_LENGTH
CANCELLED = inference_pb2.FINISH_REASON_CANCELLED
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 0},
}


def tokens(text: str, *records: inference_pb2.Token, index: int = 0) -> inference_pb2.GenerateResponse:
    records = records or (inference_pb2.Token(id=1),)
    return inference_pb2.GenerateResponse(tokens=inference_pb2.Tokens(index=index, text=text, tokens=records))


def finished(reason: Any = STOP, index: int = 0, *, is_last: bool = True) -> inference_pb2.GenerateResponse:
    usage = inference_pb2.Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4) if is_last else None
    return inference_pb2.GenerateResponse(finished=inference_pb2.Finished(index=index, reason=reason), usage=usage)


def answered(asked: Asked, *messages: inference_pb2.GenerateResponse) -> bytes:
    answer = answer_to(asked, "r", 'the "model"')
    return b"".join(answer.take(message) for message in messages) + answer.end()


def events(raw: bytes) -> list[Any]:
    """The JSON of a stream's events, without those in which every event must be equal."""
    assert raw.endswith(DONE)
    found = []
    for line in raw.removesuffix(DONE).decode().split("\n\n")[:-1]:
        event = json.loads(line.removeprefix("data: "))
        assert (event.pop("created"), event.pop("model")) == (5, 'the "model"')
        found.append((event.pop("id"), event.pop("object"), event))
    assert len({(id, kind) for id, kind, _ in found}) == 1
    return [event for _, _, event in found]


def delta(content: dict[str, str], reason: str | None = None, index: int = 0) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": content, "logprobs": None, "finish_reason": reason}]}


def test_a_chat_is_streamed_with_its_role_first() -> None:
    asked = Asked(is_chat=True, is_stream=True, created=5)
    raw = answered(asked, tokens('say "é"\n'), tokens(""), tokens("\u2028"), finished())
    assert b'"id":"chatcmpl-r","object":"chat.completion.chunk"' in raw
    assert "é" in raw.decode()
    assert events(raw) == [
        delta({"role": "assistant", "content": ""}),
        delta({"content": 'say "é"\n'}),
        delta({"content": "\u2028"}),
        delta({}, "stop"),
    ]


def test_an_answer_without_text_still_has_its_role_and_end() -> None:
    assert events(answered(Asked(is_chat=True, is_stream=True, created=5), finished(LENGTH))) == [
        delta({"role": "assistant", "content": ""}),
        delta({}, "length"),
    ]


def test_usage_comes_last_in_an_event_without_choices() -> None:
    raw = answered(Asked(is_chat=True, is_stream=True, has_usage=True, created=5), tokens("a"), finished())
    *others, last = events(raw)
    assert last == {"choices": [], "usage": USAGE}
    assert all(event["usage"] is None for event in others)


@pytest.mark.parametrize("has_usage", [False, True])
def test_timings_come_with_the_last_event(has_usage: bool) -> None:
    end = finished()
    end.usage.drafted_tokens, end.usage.accepted_tokens = 6, 2
    end.timing.MergeFrom(
        inference_pb2.Timing(
            queue_s=0.001, prefill_s=0.03, decode_s=0.03, preempted_s=0.01, time_to_first_token_s=0.032, total_s=0.0725
        )
    )
    expected = {
        "cache_n": 4, "prompt_n": 3, "prompt_ms": 30, "prompt_per_token_ms": 10, "prompt_per_second": 100,
        "predicted_n": 3, "predicted_ms": 40, "predicted_per_token_ms": 20, "predicted_per_second": 50,
        "queue_ms": 1, "time_to_first_token_ms": 32, "total_ms": 72.5, "draft_n": 6, "draft_n_accepted": 2,
    }  # fmt: skip
    asked = Asked(is_chat=True, is_stream=True, has_usage=has_usage, has_timings=True, created=5)
    *others, last = events(answered(asked, tokens("a"), end))
    assert last["timings"] == expected
    assert bool(last["choices"]) != has_usage
    assert not any("timings" in event for event in others)
    asked.is_stream = False
    assert json.loads(answered(asked, tokens("a"), end))["timings"] == expected


def test_timings_of_an_answer_of_one_token_divide_by_nothing() -> None:
    end = inference_pb2.GenerateResponse(
        finished=inference_pb2.Finished(reason=STOP),
        usage=inference_pb2.Usage(prompt_tokens=5, completion_tokens=1, cached_tokens=5),
    )
    timings = json.loads(answered(Asked(is_chat=False, has_timings=True), tokens("a"), end))["timings"]
    assert (timings["prompt_per_second"], timings["predicted_per_second"], timings["predicted_n"]) == (0, 0, 1)


def test_several_sequences_are_told_apart() -> None:
    asked = Asked(is_chat=True, is_stream=True, n=2, created=5)
    raw = answered(asked, tokens("b", index=1), tokens("a"), finished(is_last=False), finished(LENGTH, index=1))
    assert events(raw) == [
        delta({"role": "assistant", "content": ""}, index=1),
        delta({"content": "b"}, index=1),
        delta({"role": "assistant", "content": ""}),
        delta({"content": "a"}),
        delta({}, "stop"),
        delta({}, "length", index=1),
    ]


def test_a_completion_is_streamed() -> None:
    raw = answered(Asked(is_chat=False, is_stream=True, created=5), tokens("a"), finished())
    assert b'"id":"cmpl-r","object":"text_completion"' in raw
    assert events(raw) == [
        {"choices": [{"index": 0, "text": "a", "logprobs": None, "finish_reason": None}]},
        {"choices": [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}]},
    ]


def test_a_whole_chat() -> None:
    raw = answered(
        Asked(is_chat=True, n=2, created=5), tokens("a"), tokens("b", index=1), tokens("c"),
        finished(is_last=False), finished(LENGTH, index=1),
    )  # fmt: skip
    assert json.loads(raw) == {
        "id": "chatcmpl-r", "object": "chat.completion", "created": 5, "model": 'the "model"', "usage": USAGE,
        "choices": [
            {
                "index": index, "logprobs": None, "finish_reason": reason,
                "message": {"role": "assistant", "content": content, "refusal": None},
            }
            for index, reason, content in ((0, "stop", "ac"), (1, "length", "b"))
        ],
    }  # fmt: skip


def test_a_whole_completion() -> None:
    raw = answered(Asked(is_chat=False, created=5), tokens("a"), finished())
    assert json.loads(raw) == {
        "id": "cmpl-r", "object": "text_completion", "created": 5, "model": 'the "model"', "usage": USAGE,
        "choices": [{"index": 0, "text": "a", "logprobs": None, "finish_reason": "stop"}],
    }  # fmt: skip


E, ACUTE = (
    inference_pb2.TopToken(id=1, bytes=b"\xc3", logprob=-0.5),
    inference_pb2.TopToken(id=2, bytes=b"x", logprob=-2),
)
RECORDS = (
    inference_pb2.Token(id=1, bytes=b"\xc3", logprob=-0.5, top=[E, ACUTE]),
    inference_pb2.Token(id=2, bytes=b"\xa9", logprob=-math.inf, top=[E]),
    inference_pb2.Token(id=3, bytes=b" a", logprob=0, top=[E]),
)
CHAT_LOGPROBS = [
    {
        "token": "\ufffd", "logprob": -0.5, "bytes": [0xC3], "top_logprobs": [
            {"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3]}, {"token": "x", "logprob": -2, "bytes": [0x78]},
        ],
    },
    {
        "token": "\ufffd", "logprob": -9999, "bytes": [0xA9],
        "top_logprobs": [{"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3]}],
    },
    {
        "token": " a", "logprob": 0, "bytes": [0x20, 0x61],
        "top_logprobs": [{"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3]}],
    },
]  # fmt: skip


def test_log_probabilities_of_a_chat_have_the_tokens_bytes() -> None:
    messages = (tokens("", RECORDS[0]), tokens("é a", *RECORDS[1:]), finished())
    whole = json.loads(answered(Asked(is_chat=True, logprobs=2, created=5), *messages))
    assert whole["choices"][0]["logprobs"] == {"content": CHAT_LOGPROBS, "refusal": None}
    _, first, second, _ = events(answered(Asked(is_chat=True, is_stream=True, logprobs=2, created=5), *messages))
    assert first["choices"][0]["logprobs"]["content"] == CHAT_LOGPROBS[:1]
    assert second["choices"][0]["logprobs"]["content"] == CHAT_LOGPROBS[1:]


def test_log_probabilities_of_a_completion_are_four_lists() -> None:
    messages = (tokens("", RECORDS[0]), tokens("é a", *RECORDS[1:]), finished())
    whole = json.loads(answered(Asked(is_chat=False, logprobs=2, created=5), *messages))
    half, other = "bytes:\\xc3", "bytes:\\xa9"
    assert whole["choices"][0]["logprobs"] == {
        "tokens": [half, other, " a"],
        "token_logprobs": [-0.5, -9999, 0],
        "top_logprobs": [{half: -0.5, "x": -2}, {half: -0.5, other: -9999}, {half: -0.5, " a": 0}],
        "text_offset": [0, 0, 1],
    }


def test_log_probabilities_of_an_answer_without_tokens_are_empty() -> None:
    for is_chat, expected in (
        (True, {"content": [], "refusal": None}),
        (False, {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}),
    ):
        whole = json.loads(answered(Asked(is_chat, logprobs=0, created=5), finished()))
        assert whole["choices"][0]["logprobs"] == expected


@pytest.mark.parametrize("is_stream", [True, False])
def test_an_answer_that_the_server_cut_short_is_none(is_stream: bool) -> None:
    with pytest.raises(Aborted):
        answered(Asked(is_chat=True, is_stream=is_stream, created=5), tokens("a"), finished(CANCELLED))


def part(**delta: Any) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(tokens=inference_pb2.Tokens(**delta))


def called(name: str = "", arguments: str = "", index: int = 0) -> inference_pb2.GenerateResponse:
    id = f"call-{index}" if name else ""
    return part(tool_call=inference_pb2.ToolCallDelta(index=index, id=id, name=name, arguments=arguments))


ANSWER = (
    part(reasoning="I look "),
    part(reasoning='it "up".'),
    part(text="Wait."),
    called("weather"),
    called(arguments='{"city":'),
    called(arguments='"Bonn"}'),
    called("time", "{}", index=1),
    finished(inference_pb2.FINISH_REASON_TOOL_CALLS),
)


def test_reasoning_and_tool_calls_are_streamed_apart_from_the_text() -> None:
    found = [event["choices"][0] for event in events(answered(Asked(True, is_stream=True, created=5), *ANSWER))]
    assert [each["delta"] for each in found] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "I look "},
        {"reasoning_content": 'it "up".'},
        {"content": "Wait."},
        {
            "tool_calls": [
                {"index": 0, "id": "call-0", "type": "function", "function": {"name": "weather", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Bonn"}'}}]},
        {
            "tool_calls": [
                {"index": 1, "id": "call-1", "type": "function", "function": {"name": "time", "arguments": "{}"}}
            ]
        },
        {},
    ]
    assert found[-1]["finish_reason"] == "tool_calls"


def test_a_whole_answer_holds_reasoning_and_tool_calls() -> None:
    choice = json.loads(answered(Asked(True), *ANSWER))["choices"][0]
    calls = [{"name": "weather", "arguments": '{"city":"Bonn"}'}, {"name": "time", "arguments": "{}"}]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Wait.",
        "tool_calls": [{"id": f"call-{at}", "type": "function", "function": call} for at, call in enumerate(calls)],
        "reasoning_content": 'I look it "up".',
        "refusal": None,
    }
    assert json.loads(answered(Asked(True), *ANSWER[3:]))["choices"][0]["message"]["content"] is None


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("given", ["", "Zoë sat"])
def test_a_prompt_that_comes_in_parts_is_repeated_once(is_stream: bool, given: str) -> None:
    asked = Asked(False, is_stream, logprobs=0, is_echo=True, prompts=(given,), created=5)
    first = [inference_pb2.Token(id=1, bytes=b"Zo"), inference_pb2.Token(id=2, bytes=b"\xc3", logprob=-2)]
    second = [inference_pb2.Token(id=3, bytes=b"\xab sat", logprob=-0.5)]
    prompts = [inference_pb2.GenerateResponse(prompt=inference_pb2.Prompt(tokens=each)) for each in (first, second)]
    after = tokens(" down", inference_pb2.Token(id=4, bytes=b" down", logprob=-1))
    raw = answered(asked, *prompts, after, finished())
    parts = [each["choices"][0] for each in (events(raw) if is_stream else [json.loads(raw)])]
    assert "".join(each["text"] for each in parts) == "Zoë sat down"
    told = [each["logprobs"] for each in parts if each["logprobs"]]
    assert [number for each in told for number in each["token_logprobs"]] == [None, -2, -0.5, -1]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("drops_output", [False, True])
def test_a_completion_that_repeats_its_prompt(is_stream: bool, drops_output: bool) -> None:
    asked = Asked(False, is_stream, logprobs=0, is_echo=True, drops_output=drops_output, created=5)
    prompt = inference_pb2.Prompt(
        tokens=[inference_pb2.Token(id=1, bytes=b"O"), inference_pb2.Token(id=2, bytes=b"nce", logprob=-0.5)]
    )
    after = tokens(" upon", inference_pb2.Token(id=3, bytes=b" upon", logprob=-1))
    raw = answered(asked, inference_pb2.GenerateResponse(prompt=prompt), after, finished())
    parts = [each["choices"][0] for each in (events(raw) if is_stream else [json.loads(raw)])]
    assert "".join(each["text"] for each in parts) == ("Once" if drops_output else "Once upon")
    told = [each["logprobs"] for each in parts if each["logprobs"]]
    numbers = [number for each in told for number in each["token_logprobs"]]
    assert numbers == [None, -0.5] + ([] if drops_output else [-1])
    assert [offset for each in told for offset in each["text_offset"]] == [0, 1, 4][: len(numbers)]


def test_a_whole_answer_ends_when_it_has_too_many_log_probabilities() -> None:
    answer = answer_to(Asked(is_chat=True, logprobs=0), "r", "m")
    message = tokens("a")
    message.tokens.tokens.extend(inference_pb2.Token(id=1, logprob=-1) for _ in range(MAX_WHOLE_LOGPROBS // 2 - 1))
    for _ in range(2):
        answer.take(message)
    with pytest.raises(InvalidArgument, match="stream: must be true"):
        answer.take(message)

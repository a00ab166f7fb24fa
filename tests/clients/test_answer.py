"""Whole answers, as both clients put them together."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagoda import Answer, FinishReason, InvalidArgument, ToolCall
from pagoda.v1 import inference_pb2
from tests.clients.conftest import Blocking
from tests.clients.fake_server import FakeServer, answer


class Capital:
    """What pydantic's classes offer, as far as the client uses it."""

    def __init__(self, city: str) -> None:
        self.city = city

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}

    @classmethod
    def model_validate_json(cls, text: str) -> Capital:
        return cls(**json.loads(text))


def test_an_answer_is_put_together(client: Blocking) -> None:
    whole: Answer = client.call("answer", "Say hello")
    assert (whole.text, whole.reasoning, whole.tool_calls) == ("Hello world", "", [])
    assert (whole.finish_reason, whole.matched, len(whole.tokens)) == (FinishReason.STOP, ".", 2)
    assert whole.usage is not None
    assert whole.timing is not None


@pytest.mark.parametrize("schema", [{"type": "object"}, '{"type": "object"}'])
def test_an_answer_of_a_schema_is_parsed(client: Blocking, server: FakeServer, schema: Any) -> None:
    server.behaviours = [answer('{"city": ', '"Stockholm"}')]
    assert client.call("answer", "Which?", json_schema=schema).parsed == {"city": "Stockholm"}
    assert server.requests[0].guided.json_schema == '{"type": "object"}'


def test_a_class_gives_the_schema_and_gets_the_answer(client: Blocking, server: FakeServer) -> None:
    server.behaviours = [answer('{"city": "Stockholm"}')]
    parsed = client.call("answer", "Which?", json_schema=Capital).parsed
    assert (type(parsed), parsed.city) == (Capital, "Stockholm")
    assert json.loads(server.requests[0].guided.json_schema) == Capital.model_json_schema()


def test_an_answer_that_was_cut_is_no_object(client: Blocking, server: FakeServer) -> None:
    server.behaviours = [answer('{"city": ', reason=inference_pb2.FINISH_REASON_LENGTH)]
    whole = client.call("answer", "Which?", json_object=True)
    assert whole.finish_reason is FinishReason.LENGTH
    with pytest.raises(ValueError, match="Expecting value"):
        whole.parsed  # noqa: B018


def test_reasoning_and_tool_calls_are_apart(client: Blocking, server: FakeServer) -> None:
    parts = [
        inference_pb2.Tokens(reasoning="Let me "),
        inference_pb2.Tokens(reasoning="see."),
        inference_pb2.Tokens(tool_call=inference_pb2.ToolCallDelta(id="a", name="f", arguments='{"x"')),
        inference_pb2.Tokens(tool_call=inference_pb2.ToolCallDelta(arguments=":1}")),
        inference_pb2.Tokens(tool_call=inference_pb2.ToolCallDelta(index=1, id="b", name="g")),
    ]

    def behave(request: Any, context: Any) -> Any:
        for each in parts:
            yield inference_pb2.GenerateResponse(tokens=each)
        reason = inference_pb2.FINISH_REASON_TOOL_CALLS
        yield inference_pb2.GenerateResponse(finished=inference_pb2.Finished(reason=reason))

    server.behaviours = [behave]
    whole = client.call("answer", chat="Which?", tools=[{"name": "f"}, {"name": "g"}])
    assert (whole.text, whole.reasoning) == ("", "Let me see.")
    assert whole.tool_calls == [ToolCall("a", "f", '{"x":1}'), ToolCall("b", "g", "")]
    assert [call.parsed for call in whole.tool_calls] == [{"x": 1}, {}]
    assert whole.finish_reason is FinishReason.TOOL_CALLS


def test_what_cannot_be_one_answer_of_one_format_is_refused(client: Blocking) -> None:
    for options, field in (({"n": 2}, "sampling.n"), ({"regex": "a", "choice": ["b"]}, "guided")):
        with pytest.raises(InvalidArgument) as refused:
            client.call("answer", "Which?", **options)
        assert refused.value.field == field

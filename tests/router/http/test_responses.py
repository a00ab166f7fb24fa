"""OpenAI's Responses API: what becomes of a request, and its answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagoda.v1 import chat_pb2, inference_pb2
from pagoda_server.router.errors import Aborted, InvalidArgument, Unimplemented
from pagoda_server.router.http.errors import refusal
from pagoda_server.router.http.responses.answers import StreamedResponse, WholeResponse
from pagoda_server.router.http.responses.requests import Asked, generate_request, own_name
from pagoda_server.router.request.validation import validate_generate
from tests.router.http.test_messages import ANSWER, LIMITS, SMALL_LIMITS, finished, tokens


def translated(asked: Asked | None = None, **body: Any) -> inference_pb2.GenerateRequest:
    return generate_request(json.dumps({"input": "Hi"} | body).encode(), LIMITS, asked or Asked())


def test_items_become_a_chat_in_which_what_an_assistant_did_is_one_message() -> None:
    request = translated(
        model="m", instructions="Be brief.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "s"}],
             "content": [{"type": "reasoning_text", "text": "Hm."}], "encrypted_content": None},
            {"type": "message", "id": "msg", "role": "assistant", "status": "completed",
             "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
            {"type": "function_call", "id": "fc", "call_id": "c1", "name": "weather", "arguments": '{"city":"Oslo"}'},
            {"type": "function_call", "call_id": "c2", "name": "now", "arguments": ""},
            {"type": "function_call_output", "call_id": "c1", "output": "12"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "13"}]},
            {"role": "developer", "content": "And?"},
        ],
        tools=[{"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}],
        tool_choice={"type": "function", "name": "weather"}, parallel_tool_calls=False, store=False,
        include=["reasoning.encrypted_content"], reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_object"}, "verbosity": "low"}, max_output_tokens=7, temperature=0.5, top_p=0.25,
    )  # fmt: skip
    messages = request.chat.messages
    assert [message.role for message in messages] == [
        chat_pb2.ROLE_SYSTEM, chat_pb2.ROLE_USER, chat_pb2.ROLE_ASSISTANT, chat_pb2.ROLE_TOOL, chat_pb2.ROLE_TOOL,
        chat_pb2.ROLE_SYSTEM,
    ]  # fmt: skip
    assert [part.text for part in messages[1].parts] == ["a", "b"]
    assert (messages[2].reasoning, messages[2].content) == ("Hm.", "I look.")
    calls = [(call.id, call.name, call.arguments) for call in messages[2].tool_calls]
    assert calls == [("c1", "weather", '{"city":"Oslo"}'), ("c2", "now", "{}")]
    assert [(each.tool_call_id, each.content) for each in messages[3:5]] == [("c1", "12"), ("c2", "13")]
    assert request.chat.tool_choice.tool == "weather"
    assert request.chat.tool_choice.at_most_one
    assert request.guided.json_object
    assert (request.model, request.stopping.max_tokens) == ("m", 7)
    assert (request.sampling.temperature, request.sampling.top_p) == (0.5, 0.25)


def test_a_schema_is_followed() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    assert json.loads(translated(text={"format": schema}).guided.json_schema) == {"type": "object"}


@pytest.mark.parametrize(
    ("body", "kind", "field"),
    [
        ({"input": None}, InvalidArgument, "input"),
        ({"input": []}, InvalidArgument, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, InvalidArgument, "input[0].role"),
        ({"input": [{"role": "user"}]}, InvalidArgument, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            InvalidArgument, "input[0].content[0].text",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            Unimplemented, "input[0].content[0].type input_image",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, Unimplemented, "input[0].type item_reference"),
        ({"input": [{"role": "user", "content": "x"}] * 4097}, InvalidArgument, "input"),
        ({"input": [{"type": "function_call", "name": "x"}] * 129}, InvalidArgument, "input[128].type"),
        ({"store": True}, Unimplemented, "store"),
        ({"background": True}, Unimplemented, "background"),
        ({"include": ["message.output_text.logprobs"]}, Unimplemented, "include[0] message.output_text.logprobs"),
        ({"previous_response_id": "resp_1"}, InvalidArgument, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, Unimplemented, "tools[0].type web_search"),
        ({"tool_choice": "some"}, InvalidArgument, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, InvalidArgument, "text.format.type"),
        ({"reasoning": {"effort": "much"}}, InvalidArgument, "reasoning.effort"),
        ({"stream_options": {"include_obfuscation": False}}, InvalidArgument, "stream_options"),
        ({"metadata": {"a": "\ud800"}}, InvalidArgument, "body"),
        ({"max_output_tokens": 0}, InvalidArgument, "max_output_tokens"),
        ({"input": [{"role": "user", "content": "x", "id": 5}]}, InvalidArgument, "input[0].id"),
    ],
)  # fmt: skip
def test_a_field_that_cannot_be_followed_is_refused_by_its_name(body: Any, kind: Any, field: str) -> None:
    with pytest.raises(kind) as caught:
        translated(**body)
    assert caught.value.field == own_name(field, Asked()) == field


def call(name: str, arguments: str = "{}", id: str = "c") -> Any:
    return {"type": "function_call", "call_id": id, "name": name, "arguments": arguments}


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"input": "x" * 5000}, "input"),
        ({"instructions": "x" * 5000}, "instructions"),
        ({"instructions": "i", "input": [{"role": "user", "content": "x" * 5000}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [
                {"type": "input_text", "text": "a"}, {"type": "input_text", "text": "x" * 5000},
            ]}]},
            "input[0].content",
        ),
        ({"instructions": "i", "input": [{"role": "user", "content": "a"}, call("f"), call("a b")]}, "input[2].name"),
        ({"input": [call("f"), call("f", "[")]}, "input[1].arguments"),
        ({"input": [call("f", id="x" * 5000)]}, "input[0].call_id"),
        (
            {"input": [call("f"), {"type": "function_call_output", "call_id": "c", "output": "x" * 5000}]},
            "input[1].output",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "x" * 5000, "output": ""}]},
            "input[0].call_id",
        ),
        (
            {"input": [
                {"role": "assistant", "content": "a"},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x" * 5000}]},
            ]},
            "input[1].content",
        ),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"a": "x" * 5000}}]}, "tools[0].parameters"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": ""}}}, "text.format"),
    ],
)  # fmt: skip
def test_what_validation_refuses_has_the_clients_own_name(body: dict[str, Any], name: str) -> None:
    request = translated(found := Asked(), **body)
    with pytest.raises(InvalidArgument) as refused:
        validate_generate(request, SMALL_LIMITS)
    assert own_name(refused.value.field, found) == name
    assert "chat." not in refused.value.description


# -- answers ----------------------------------------------------------------------------------------------------------


def asked(**body: Any) -> Asked:
    found = Asked(created=5)
    translated(found, **body)
    return found


def whole(*messages: inference_pb2.GenerateResponse, **body: Any) -> Any:
    answer = WholeResponse(asked(**body), "r", "m")
    assert all(answer.take(message) == b"" for message in messages)
    return json.loads(answer.end())


def streamed(*messages: inference_pb2.GenerateResponse, **body: Any) -> list[Any]:
    answer = StreamedResponse(asked(**body), "r", "m")
    raw = b"".join(answer.take(message) for message in messages) + answer.end()
    found = []
    for event in raw.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == [*range(len(found))]
    return found


def test_a_whole_response_has_an_item_for_each_run_of_its_kind_and_repeats_its_request() -> None:
    response = whole(*ANSWER, finished("TOOL_CALLS"), instructions='"é"', metadata={"a": "b"})
    assert (response["id"], response["created_at"], response["status"]) == ("resp_r", 5, "completed")
    assert (response["instructions"], response["metadata"], response["tool_choice"]) == ('"é"', {"a": "b"}, "auto")
    part = {"type": "output_text", "text": 'I "look".', "annotations": [], "logprobs": []}
    assert response["output"] == [
        {"type": "reasoning", "id": "rs_r_0", "status": "completed", "summary": [],
         "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "id": "msg_r_1", "status": "completed", "role": "assistant", "content": [part]},
        {"type": "function_call", "id": "fc_r_2", "status": "completed", "call_id": "c0", "name": "weather",
         "arguments": '{"city":"Oslo"}'},
        {"type": "function_call", "id": "fc_r_3", "status": "completed", "call_id": "c1", "name": "now",
         "arguments": "{}"},
    ]  # fmt: skip
    assert response["usage"] == {
        "input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 15,
    }  # fmt: skip


def test_a_streams_events_begin_grow_and_end_each_item_and_its_last_one_has_the_response() -> None:
    events = streamed(*ANSWER, finished("TOOL_CALLS"), instructions="x")
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["instructions"] == "x"
    assert events[-1]["type"] == "response.completed"
    response = events[-1]["response"]
    assert response == whole(*ANSWER, finished("TOOL_CALLS"), instructions="x")
    for index, item in enumerate(response["output"]):
        own = [event for event in events[2:-1] if event["output_index"] == index]
        assert own[0]["type"] == "response.output_item.added"
        assert own[-1] == {**own[-1], "type": "response.output_item.done", "item": item}
        deltas = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert deltas == text
        (done,) = (event for event in own if event["type"].endswith(("text.done", "arguments.done")))
        assert done.get("text", done.get("arguments")) == text
        assert {event["item_id"] for event in own[1:-1]} == {item["id"]}


def test_a_response_that_max_tokens_has_cut_is_incomplete() -> None:
    response = whole(tokens(text="x"), finished("LENGTH"))
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"
    assert streamed(tokens(text="x"), finished("LENGTH"))[-1] == {
        "type": "response.incomplete", "sequence_number": 8, "response": response,
    }  # fmt: skip


def test_an_answer_without_text_has_no_items() -> None:
    assert whole(finished())["output"] == []
    assert [event["type"] for event in streamed(finished())] == [
        "response.created", "response.in_progress", "response.completed",
    ]  # fmt: skip


def test_an_answer_that_the_server_cut_is_an_error() -> None:
    with pytest.raises(Aborted):
        whole(tokens(text="x"), finished("CANCELLED"))
    answer = StreamedResponse(asked(), "r", "m")
    answer.take(tokens(text="x"))
    event = json.loads(answer.failed(refusal(Aborted("gone"))).split(b"data: ")[1])
    assert (event["type"], event["message"], event["code"], event["sequence_number"]) == ("error", "gone", "aborted", 5)

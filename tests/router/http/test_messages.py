"""Anthropic's Messages API: what becomes of a request, and its answers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pagoda.v1 import chat_pb2, inference_pb2
from pagoda_server.router.errors import Aborted, InvalidArgument, Unimplemented
from pagoda_server.router.http.anthropic.answers import StreamedMessage, WholeMessage
from pagoda_server.router.http.anthropic.requests import Asked, generate_request, own_name, tokenize_request
from pagoda_server.router.http.errors import refusal
from pagoda_server.router.request.fields import Limits
from pagoda_server.router.request.validation import validate_generate

LIMITS = Limits(max_model_len=100, vocab_size=50, kv_token_capacity=1000)
SMALL_LIMITS = replace(LIMITS, max_text_bytes=4096)
HI = [{"role": "user", "content": "Hi"}]


def translated(asked: Asked | None = None, **body: Any) -> inference_pb2.GenerateRequest:
    return generate_request(json.dumps({"max_tokens": 5, "messages": HI} | body).encode(), LIMITS, asked or Asked())


def test_a_conversation_with_tools_becomes_a_chat() -> None:
    request = translated(
        model="m", system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "12"}]},
                {"type": "text", "text": "And?"},
            ]},
        ],
        tools=[{"name": "weather", "description": "d", "input_schema": {"type": "object"}}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True}, thinking={"type": "disabled"},
        stop_sequences=["x"], temperature=0.5, top_p=0.25, top_k=3, metadata={"user_id": "u"},
    )  # fmt: skip
    messages = request.chat.messages
    assert [message.role for message in messages] == [
        chat_pb2.ROLE_SYSTEM, chat_pb2.ROLE_USER, chat_pb2.ROLE_ASSISTANT, chat_pb2.ROLE_TOOL, chat_pb2.ROLE_USER,
    ]  # fmt: skip
    assert (messages[2].reasoning, messages[2].parts[0].text) == ("Hm.", "I look.")
    (call,) = messages[2].tool_calls
    assert (call.id, call.name, json.loads(call.arguments)) == ("c1", "weather", {"city": "Oslo"})
    assert (messages[3].tool_call_id, messages[3].parts[0].text, messages[4].parts[0].text) == ("c1", "12", "And?")
    (tool,) = request.chat.tools
    assert (tool.name, json.loads(tool.parameters)) == ("weather", {"type": "object"})
    assert request.chat.tool_choice.mode == chat_pb2.TOOL_CHOICE_MODE_REQUIRED
    assert request.chat.tool_choice.at_most_one
    assert request.chat.template_kwargs["enable_thinking"] is False
    assert not request.chat.continue_last
    assert (request.model, request.stopping.max_tokens, [*request.stopping.stop]) == ("m", 5, ["x"])
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 3)


def test_an_answer_goes_on_from_an_assistants_last_message() -> None:
    assert translated(messages=[*HI, {"role": "assistant", "content": "He"}]).chat.continue_last


def test_an_output_format_is_a_schema_that_the_answer_follows() -> None:
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    assert json.loads(translated(output_config={"format": schema}).guided.json_schema) == {"type": "object"}


def test_tokens_are_counted_for_the_same_prompt() -> None:
    body = {"messages": HI, "tools": [{"name": "t", "input_schema": {}}], "thinking": {"type": "adaptive"}}
    assert tokenize_request(json.dumps(body).encode(), LIMITS, Asked()).chat == translated(**body).chat


@pytest.mark.parametrize(
    ("body", "kind", "field"),
    [
        ({"max_tokens": None}, InvalidArgument, "max_tokens"),
        ({"max_tokens": 0}, InvalidArgument, "max_tokens"),
        ({"messages": []}, InvalidArgument, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, InvalidArgument, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, InvalidArgument, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{}]}]}, InvalidArgument, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            InvalidArgument, "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            Unimplemented, "messages[0].content[0].type image",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "x"}]}]},
            Unimplemented, "messages[0].content[0].type tool_use",
        ),
        ({"messages": HI * 4097}, InvalidArgument, "messages"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, Unimplemented, "tools[0].type web_search_20250305"),
        ({"tools": [{"name": "w"}]}, InvalidArgument, "tools[0].input_schema"),
        ({"tool_choice": {"type": "some"}}, InvalidArgument, "tool_choice.type"),
        ({"thinking": {"type": "much"}}, InvalidArgument, "thinking.type"),
        ({"stop_sequences": [1]}, InvalidArgument, "stop_sequences[0]"),
        ({"output_config": {"format": {"type": "xml"}}}, InvalidArgument, "output_config.format.type"),
        ({"service_tier": "priority"}, Unimplemented, "service_tier"),
        ({"system": "\ud800"}, InvalidArgument, "body"),
        ({"mcp_servers": []}, InvalidArgument, "mcp_servers"),
        ({"system": [{"type": "text"}]}, InvalidArgument, "system[0].text"),
        ({"messages": [HI[0] | {"reasoning": "x"}]}, InvalidArgument, "messages[0].reasoning"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "arguments": {}}]}]},
            InvalidArgument, "messages[0].content[0].arguments",
        ),
    ],
)  # fmt: skip
def test_a_field_that_cannot_be_followed_is_refused_by_its_name(body: Any, kind: Any, field: str) -> None:
    with pytest.raises(kind) as caught:
        translated(**body)
    assert caught.value.field == own_name(field, Asked()) == field


def use(name: str, **more: Any) -> Any:
    return {"type": "tool_use", "id": "c", "name": name} | more


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"system": "x" * 5000}, "system"),
        ({"system": [{"type": "text", "text": "x" * 5000}]}, "system"),
        ({"system": "s", "messages": [*HI, {"role": "user", "content": "x" * 5000}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 5000}]}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": "12"},
                {"type": "tool_result", "tool_use_id": "c", "content": "x" * 5000},
            ]}]},
            "messages[0].content[1].content",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x" * 5000}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"system": "s", "messages": [
                *HI, {"role": "assistant", "content": [{"type": "text", "text": "a"}, use("f"), use("a b")]},
            ]},
            "messages[1].content[2].name",
        ),
        (
            {"messages": [{"role": "assistant", "content": [use("f", input={"a": "x" * 5000})]}]},
            "messages[0].content[0].input",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "x" * 5000}]}]},
            "messages[0].content",
        ),
        ({"messages": [{"role": "assistant", "content": [use("f")] * 129}]}, "messages[0].content"),
        ({"messages": [*HI, {"role": "assistant", "content": [use("f")]}]}, "messages"),
        ({"tools": [{"name": "f", "input_schema": {"a": "x" * 5000}}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ],
)  # fmt: skip
def test_what_validation_refuses_has_the_clients_own_name(body: dict[str, Any], name: str) -> None:
    request = translated(asked := Asked(), **body)
    with pytest.raises(InvalidArgument) as refused:
        validate_generate(request, SMALL_LIMITS)
    assert own_name(refused.value.field, asked) == name
    assert "chat." not in refused.value.description


# -- answers ----------------------------------------------------------------------------------------------------------


def tokens(**delta: Any) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(tokens=inference_pb2.Tokens(tokens=[inference_pb2.Token(id=1)], **delta))


def call(index: int, arguments: str, name: str = "") -> inference_pb2.GenerateResponse:
    part = inference_pb2.ToolCallDelta(index=index, id=f"c{index}" if name else "", name=name, arguments=arguments)
    return tokens(tool_call=part)


def finished(reason: str = "STOP", **matched: Any) -> inference_pb2.GenerateResponse:
    ended = inference_pb2.Finished(reason=getattr(inference_pb2, f"FINISH_REASON_{reason}"), **matched)
    usage = inference_pb2.Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=6, reasoning_tokens=2)
    return inference_pb2.GenerateResponse(finished=ended, usage=usage)


ANSWER = [
    tokens(reasoning="Hm"), tokens(reasoning="."), tokens(), tokens(text="I "), tokens(text='"look".'),
    call(0, "", "weather"), call(0, '{"city":'), call(0, '"Oslo"}'), call(1, "{}", "now"),
]  # fmt: skip
USAGE = {
    "input_tokens": 5, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4, "output_tokens": 6,
}  # fmt: skip


def streamed(*messages: inference_pb2.GenerateResponse) -> list[Any]:
    answer = StreamedMessage("r", "m")
    raw = b"".join(answer.take(message) for message in messages) + answer.end()
    found = []
    for event in raw.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def whole(*messages: inference_pb2.GenerateResponse) -> Any:
    answer = WholeMessage("r", "m")
    assert all(answer.take(message) == b"" for message in messages)
    return json.loads(answer.end())


def test_a_whole_message_has_a_block_for_each_run_of_its_kind() -> None:
    assert whole(*ANSWER, finished("TOOL_CALLS")) == {
        "id": "msg_r", "type": "message", "role": "assistant", "model": "m", "stop_reason": "tool_use",
        "stop_sequence": None, "usage": USAGE,
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": 'I "look".'},
            {"type": "tool_use", "id": "c0", "name": "weather", "input": {"city": "Oslo"}},
            {"type": "tool_use", "id": "c1", "name": "now", "input": {}},
        ],
    }  # fmt: skip


def test_a_streams_events_make_the_same_message() -> None:
    events = streamed(*ANSWER, finished("TOOL_CALLS"))
    assert events[0]["message"]["content"] == []
    content: list[Any] = []
    texts: list[str] = []
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(content)
                content.append(event["content_block"])
                texts.append("")
            case "content_block_delta":
                assert event["index"] == len(content) - 1
                kind, text = (value for value in event["delta"].values())
                texts[-1] += text
                assert kind.split("_")[0] in ("thinking", "text", "input")
            case "content_block_stop":
                assert event["index"] == len(content) - 1
    for block, text in zip(content, texts, strict=True):
        field = {"thinking": "thinking", "text": "text", "tool_use": "input"}[block["type"]]
        block[field] = json.loads(text) if field == "input" else text
    expected = whole(*ANSWER, finished("TOOL_CALLS"))
    assert content == expected["content"]
    starts = [event["index"] for event in events if event["type"] == "content_block_start"]
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == starts == [0, 1, 2, 3]
    assert events[-2] == {
        "type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None}, "usage": USAGE,
    }  # fmt: skip
    assert events[-1] == {"type": "message_stop"}


@pytest.mark.parametrize(
    ("last", "reason", "sequence"),
    [
        (finished(), "end_turn", None),
        (finished(stop_token_id=3), "end_turn", None),
        (finished(stop_string="END"), "stop_sequence", "END"),
        (finished("LENGTH"), "max_tokens", None),
    ],
)
def test_why_a_message_ended(last: inference_pb2.GenerateResponse, reason: str, sequence: str | None) -> None:
    answer = whole(tokens(text="x"), last)
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    assert streamed(tokens(text="x"), last)[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_an_answer_without_text_has_no_blocks_and_a_start() -> None:
    assert whole(finished())["content"] == []
    assert [event["type"] for event in streamed(finished())] == ["message_start", "message_delta", "message_stop"]


def test_arguments_that_max_tokens_has_cut_are_left_out() -> None:
    assert whole(call(0, '{"ci', "weather"), finished("LENGTH"))["content"][0]["input"] == {}


def test_an_answer_that_the_server_cut_is_an_error() -> None:
    with pytest.raises(Aborted):
        whole(tokens(text="x"), finished("CANCELLED"))
    answer = StreamedMessage("r", "m")
    answer.take(tokens(text="x"))
    assert answer.failed(refusal(Aborted("gone"))).startswith(b'event: error\ndata: {"')

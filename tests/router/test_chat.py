"""Chats from a client: what each field becomes, and every limit."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict

from pagoda.v1 import chat_pb2
from pagoda_server.router.errors import InvalidArgument
from pagoda_server.router.request.chat import chat_from
from pagoda_server.router.request.fields import Limits
from pagoda_server.router.text.chat_template import Chat, Message, ToolCall

LIMITS = Limits(max_model_len=2048, vocab_size=1000, kv_token_capacity=8192)
SMALL = dataclasses.replace(LIMITS, max_text_bytes=20, max_json_bytes=15)
USER = {"role": "ROLE_USER", "content": "Hello"}


def chat_of(limits: Limits = LIMITS, **fields: Any) -> Chat:
    return chat_from(ParseDict({"messages": [USER], **fields}, chat_pb2.Chat()), limits)


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "ROLE_ASSISTANT", **fields}


def nested(depth: int) -> Any:
    value: Any = 1
    for at in range(depth):
        value = {"a": value} if at % 2 else [value]
    return value


def test_everything_that_a_conversation_may_have_is_kept() -> None:
    call = {"id": "c1", "name": "add", "arguments": '{"b": [1, 2.5, null], "a": "x"}'}
    chat = chat_of(
        messages=[
            {"role": "ROLE_SYSTEM", "parts": [{"text": "Be"}, {"text": "brief"}]},
            {"role": "ROLE_USER", "content": "2+3?", "name": "ann"},
            assistant(reasoning="I add.", toolCalls=[call, {"name": "noop"}]),
            {"role": "ROLE_TOOL", "content": "5", "toolCallId": "c1", "name": "add"},
            assistant(content="It is "),
        ],
        continueLast=True,
        tools=[{"name": "add", "description": "Adds.", "parameters": '{"type": "object", "a": 1}'}, {"name": "noop"}],
        templateKwargs={
            "enable_thinking": False,
            "effort": "high",
            "budget": 3,
            "share": 0.5,
            "list": [None, {"a": []}],
        },
    )
    assert chat.messages == (
        Message("system", "Be\nbrief"),
        Message("user", "2+3?", name="ann"),
        Message(
            "assistant", "", "I add.", (ToolCall("add", {"b": [1, 2.5, None], "a": "x"}, "c1"), ToolCall("noop", {}))
        ),
        Message("tool", "5", tool_call_id="c1", name="add"),
        Message("assistant", "It is "),
    )
    assert chat.continue_last
    assert json.dumps(chat.tools[0]) == (  # keys in the order that the client gave them
        '{"type": "function", "function": {"name": "add", "description": "Adds.", '
        '"parameters": {"type": "object", "a": 1}}}'
    )
    assert chat.tools[1]["function"] == {
        "name": "noop", "description": "", "parameters": {"type": "object", "properties": {}}
    }  # fmt: skip
    assert chat.template_kwargs == {
        "enable_thinking": False, "effort": "high", "budget": 3, "share": 0.5, "list": [None, {"a": []}]
    }  # fmt: skip
    assert isinstance(chat.template_kwargs["budget"], int)


@pytest.mark.parametrize(
    ("choice", "are_shown"),
    [
        ({}, True),
        ({"mode": "TOOL_CHOICE_MODE_UNSPECIFIED"}, True),
        ({"mode": "TOOL_CHOICE_MODE_AUTO"}, True),
        ({"mode": "TOOL_CHOICE_MODE_NONE"}, False),
        ({"mode": "TOOL_CHOICE_MODE_REQUIRED"}, True),
        ({"tool": "f"}, True),
    ],
)
def test_tools_are_shown_to_the_model_unless_it_is_to_call_none(choice: dict[str, Any], are_shown: bool) -> None:
    assert bool(chat_of(tools=[{"name": "f"}], toolChoice=choice).tools) == are_shown


BAD: list[tuple[str, dict[str, Any]]] = [
    ("chat.messages[0].parts", {"messages": [{**USER, "parts": [{"text": "x"}]}]}),
    ("chat.messages[0].parts[1]", {"messages": [{"role": "ROLE_USER", "parts": [{"text": "x"}, {}]}]}),
    ("chat.messages[0].parts", {"messages": [{"role": "ROLE_USER", "parts": [{"text": "x"}] * 257}]}),
    ("chat.messages[0].reasoning", {"messages": [{**USER, "reasoning": "x"}]}),
    ("chat.messages[0].tool_calls", {"messages": [{**USER, "toolCalls": [{"name": "f"}]}]}),
    ("chat.messages[0].tool_calls", {"messages": [assistant(toolCalls=[{"name": "f"}] * 129)]}),
    ("chat.messages[0].tool_call_id", {"messages": [{**USER, "toolCallId": "x"}]}),
    ("chat.messages[0].tool_calls[0].name", {"messages": [assistant(toolCalls=[{}])]}),
    (
        "chat.messages[0].tool_calls[0].arguments",
        {"messages": [assistant(toolCalls=[{"name": "f", "arguments": "[1]"}])]},
    ),
    (
        "chat.messages[0].tool_calls[0].arguments",
        {"messages": [assistant(toolCalls=[{"name": "f", "arguments": "{"}])]},
    ),
    ("chat.continue_last", {"messages": [assistant(toolCalls=[{"name": "f"}])], "continueLast": True}),
    ("chat.tools", {"tools": [{"name": "f"}] * 129}),
    ("chat.tools[0].name", {"tools": [{}]}),
    ("chat.tools[0].name", {"tools": [{"name": "f" * 65}]}),
    ("chat.tools[0].name", {"tools": [{"name": "<|im_end|>"}]}),
    ("chat.tools[1].parameters", {"tools": [{"name": "f"}, {"name": "g", "parameters": '"text"'}]}),
    ("chat.tools[0].parameters", {"tools": [{"name": "f", "parameters": '{"a": NaN}'}]}),
    ("chat.tools[0].parameters", {"tools": [{"name": "f", "parameters": '{"a": ' + "9" * 5000 + "}"}]}),
    ("chat.tools[0].parameters", {"tools": [{"name": "f", "parameters": json.dumps({"a": nested(32)})}]}),
    ("chat.tools[0].parameters", {"tools": [{"name": "f", "parameters": "[" * 100_000}]}),
    ("chat.tools[0].parameters", {"tools": [{"name": "f", "parameters": json.dumps({"a": "x" * (256 << 10)})}]}),
    ("chat.tool_choice.mode", {"toolChoice": {"mode": 17}}),
    ("chat.tool_choice.mode", {"toolChoice": {"mode": "TOOL_CHOICE_MODE_REQUIRED"}}),
    ("chat.tool_choice.tool", {"toolChoice": {"tool": "g"}, "tools": [{"name": "f"}]}),
    ("chat.template_kwargs", {"templateKwargs": {"no name": 1}}),
    ("chat.template_kwargs", {"templateKwargs": {"": 1}}),
    ("chat.template_kwargs", {"templateKwargs": {"a": math.inf}}),
    ("chat.template_kwargs", {"templateKwargs": {"a": nested(16)}}),
    ("chat.template_kwargs", {"templateKwargs": {"a": list(range(1024))}}),
]


@pytest.mark.parametrize(("field", "fields"), BAD, ids=lambda value: str(value)[:60])
def test_a_bad_field_is_refused_by_name(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        chat_of(**fields)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [assistant(reasoning="x" * 21)]},
        {"messages": [{**USER, "name": "x" * 16}]},
        {"messages": [{"role": "ROLE_TOOL", "toolCallId": "x" * 21}]},
        {"messages": [{"role": "ROLE_USER", "parts": [{"text": "xxxxxxx"}] * 3}]},
        {"messages": [assistant(toolCalls=[{"name": "f", "id": "x" * 21}])]},
        {"tools": [{"name": "f", "description": "x" * 16}]},
        {"templateKwargs": {"a": "x" * 15}},
        {"templateKwargs": {"a": {"x" * 16: 1}}},
    ],
)
def test_every_text_counts_towards_the_bound_of_all_texts(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="more than 20 bytes together, the limit"):
        chat_of(SMALL, **fields)


def test_a_refusal_names_the_limit() -> None:
    expected = {
        "is nested more than 32 deep, the limit": {
            "tools": [{"name": "f", "parameters": json.dumps({"a": nested(32)})}]
        },
        "is nested more than 16 deep, the limit": {"templateKwargs": {"a": nested(16)}},
        "has more than 1024 values, the limit": {"templateKwargs": {"a": list(range(1024))}},
        "has more than 128 entries, the limit": {"tools": [{"name": "f"}] * 129},
    }
    for message, fields in expected.items():
        with pytest.raises(InvalidArgument, match=re.escape(message)):
            chat_of(**fields)
    with pytest.raises(InvalidArgument, match="JSON to more than 15 bytes together, the limit"):
        chat_of(SMALL, messages=[assistant()], tools=[{"name": "f", "parameters": '{"a": 1}'}] * 2)


def test_what_is_just_within_the_bounds_is_taken() -> None:
    assert chat_of(tools=[{"name": "f" * 64, "parameters": json.dumps({"a": nested(31)})}] * 128).tools
    assert chat_of(templateKwargs={"a": nested(15)}).template_kwargs == {"a": nested(15)}
    assert len(chat_of(templateKwargs={"a": list(range(1023))}).template_kwargs["a"]) == 1023  # type: ignore[arg-type]


def test_json_with_more_digits_than_python_reads_and_hostile_nesting_tell_nothing_of_python() -> None:
    for parameters in ('{"a": ' + "9" * 5000 + "}", "[" * 100_000, "{" * 100_000, '{"a": Infinity}'):
        with pytest.raises(InvalidArgument) as refused:
            chat_of(tools=[{"name": "f", "parameters": parameters}])
        assert len(refused.value.message) < 100

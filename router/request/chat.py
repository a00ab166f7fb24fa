"""Check every field of a chat and convert it for the template. All of its texts share one limit, as does its JSON."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from google.protobuf.struct_pb2 import ListValue, Struct, Value

from pagoda.v1 import chat_pb2

from ..answers.lark import Calls, Tool
from ..errors import InvalidArgument
from ..text.chat_template import Chat, ChatRole, Json, Message, ToolCall
from .fields import Limits, check_count

_ROLES: dict[int, ChatRole] = {
    chat_pb2.ROLE_SYSTEM: "system",
    chat_pb2.ROLE_USER: "user",
    chat_pb2.ROLE_ASSISTANT: "assistant",
    chat_pb2.ROLE_TOOL: "tool",
}
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


def chat_from(chat: chat_pb2.Chat, limits: Limits) -> Chat:
    """Convert a chat. Raises InvalidArgument."""
    return _ChatReader(limits).read(chat)


def tools_of(chat: Chat) -> tuple[Tool, ...]:
    """The tools that the model is shown."""
    functions: list[Any] = [tool["function"] for tool in chat.tools]
    return tuple(Tool(function["name"], function["parameters"]) for function in functions)


def calls_due(choice: chat_pb2.ToolChoice, tools: tuple[Tool, ...]) -> Calls | None:
    """What the answer has to call of the tools of a chat that was checked; None: the model decides."""
    if choice.HasField("tool"):
        return Calls(tuple(tool for tool in tools if tool.name == choice.tool)[:1], may_repeat=False)
    if choice.mode == chat_pb2.TOOL_CHOICE_MODE_REQUIRED:
        return Calls(tools, may_repeat=not choice.at_most_one)
    return None


class _ChatReader:
    """Reads one chat and adds up the sizes of its texts."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._text_bytes = 0
        self._json_bytes = 0
        self._num_values = 0

    def read(self, chat: chat_pb2.Chat) -> Chat:
        limits = self._limits
        if not chat.messages:
            raise InvalidArgument("chat.messages", "is empty")
        check_count(len(chat.messages), "chat.messages", limits.max_messages)
        check_count(len(chat.tools), "chat.tools", limits.max_tools)
        _check_choice(chat)
        messages = tuple(self._message(each, f"chat.messages[{index}]") for index, each in enumerate(chat.messages))
        tools = [self._tool(each, f"chat.tools[{index}]") for index, each in enumerate(chat.tools)]
        kwargs = self._template_kwargs(chat.template_kwargs)
        if chat.continue_last and messages[-1].role != "assistant":
            raise InvalidArgument("chat.continue_last", "needs the last message to be the assistant's")
        if chat.continue_last and messages[-1].tool_calls:
            raise InvalidArgument("chat.continue_last", "needs a last message without tool calls")
        shows_tools = chat.tool_choice.mode != chat_pb2.TOOL_CHOICE_MODE_NONE
        return Chat(messages, chat.continue_last, tuple(tools) if shows_tools else (), kwargs)

    def _message(self, message: chat_pb2.ChatMessage, field: str) -> Message:
        role = _ROLES.get(message.role)
        if role is None:
            raise InvalidArgument(f"{field}.role", f"is {message.role}, which is not a known role")
        for name, of_role in (("reasoning", "assistant"), ("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if role != of_role and getattr(message, name):
                raise InvalidArgument(f"{field}.{name}", f"is set, and the message's role is {role}, not {of_role}")
        check_count(len(message.tool_calls), f"{field}.tool_calls", self._limits.max_tools)
        return Message(
            role,
            self._content(message, field),
            self._text(message.reasoning, f"{field}.reasoning"),
            tuple(
                self._tool_call(call, f"{field}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
            ),
            self._text(message.tool_call_id, f"{field}.tool_call_id"),
            self._text(message.name, f"{field}.name"),
        )

    def _content(self, message: chat_pb2.ChatMessage, field: str) -> str:
        if not message.parts:
            return self._text(message.content, f"{field}.content")
        if message.content:
            raise InvalidArgument(f"{field}.parts", "must not be set together with content")
        check_count(len(message.parts), f"{field}.parts", self._limits.max_parts)
        for index, part in enumerate(message.parts):
            if not part.HasField("text"):
                raise InvalidArgument(f"{field}.parts[{index}]", "has a kind that this server does not know; set text")
        return self._text("\n".join(part.text for part in message.parts), f"{field}.parts")

    def _tool(self, tool: chat_pb2.Tool, field: str) -> dict[str, Json]:
        function: dict[str, Json] = {
            "name": self._tool_name(tool.name, f"{field}.name"),
            "description": self._text(tool.description, f"{field}.description"),
            "parameters": self._json(tool.parameters, f"{field}.parameters") or {"type": "object", "properties": {}},
        }
        return {"type": "function", "function": function}

    def _tool_call(self, call: chat_pb2.ToolCall, field: str) -> ToolCall:
        return ToolCall(
            self._tool_name(call.name, f"{field}.name"),
            self._json(call.arguments, f"{field}.arguments"),
            self._text(call.id, f"{field}.id"),
        )

    def _tool_name(self, name: str, field: str) -> str:
        if not _TOOL_NAME.fullmatch(name):
            raise InvalidArgument(field, "must be 1 to 64 letters, digits or _.-")
        return name

    def _text(self, text: str, field: str) -> str:
        self._text_bytes += len(text.encode())
        if self._text_bytes > self._limits.max_text_bytes:
            most = self._limits.max_text_bytes
            raise InvalidArgument(field, f"brings the chat's texts to more than {most} bytes together, the limit")
        return text

    def _json(self, text: str, field: str) -> dict[str, Json]:
        """Parse a field of JSON text into an object; an empty field gives an empty object."""
        if not text:
            return {}
        self._text(text, field)
        self._json_bytes += len(text.encode())
        if self._json_bytes > self._limits.max_json_bytes:
            most = self._limits.max_json_bytes
            raise InvalidArgument(field, f"brings the chat's JSON to more than {most} bytes together, the limit")
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
        except RecursionError:
            raise _too_deep(field, self._limits.max_json_depth) from None
        except ValueError as error:
            raise InvalidArgument(field, "is not JSON") from error
        if not isinstance(value, dict):
            raise InvalidArgument(field, "is JSON but not an object")
        if _is_deeper(value, self._limits.max_json_depth):
            raise _too_deep(field, self._limits.max_json_depth)
        return value

    def _template_kwargs(self, kwargs: Struct) -> dict[str, Json]:
        field = "chat.template_kwargs"
        for name in kwargs.fields:
            if not _VARIABLE.fullmatch(name):
                raise InvalidArgument(field, "holds a name that cannot be a template variable")
        return self._struct(kwargs, field, self._limits.max_kwargs_depth)

    def _struct(self, struct: Struct, field: str, depth: int) -> dict[str, Json]:
        """`depth`: levels of objects and lists that are still allowed."""
        found = {}
        for name, value in struct.fields.items():
            self._text(name, field)
            found[name] = self._value(value, field, depth - 1)
        return found

    def _value(self, value: Value, field: str, depth: int) -> Json:
        self._num_values += 1
        if self._num_values > self._limits.max_kwargs_values:
            raise InvalidArgument(field, f"has more than {self._limits.max_kwargs_values} values, the limit")
        match value.WhichOneof("kind"):
            case "string_value":
                return self._text(value.string_value, field)
            case "bool_value":
                return value.bool_value
            case "number_value":
                return _number(value.number_value, field)
            case "struct_value" | "list_value" if depth < 1:
                raise _too_deep(field, self._limits.max_kwargs_depth)
            case "struct_value":
                return self._struct(value.struct_value, field, depth)
            case "list_value":
                return self._list(value.list_value, field, depth)
        return None

    def _list(self, values: ListValue, field: str, depth: int) -> list[Json]:
        return [self._value(value, field, depth - 1) for value in values.values]


def _check_choice(chat: chat_pb2.Chat) -> None:
    choice = chat.tool_choice
    if choice.HasField("tool"):
        if not any(tool.name == choice.tool for tool in chat.tools):
            raise InvalidArgument("chat.tool_choice.tool", "is the name of none of the tools")
    elif choice.mode not in chat_pb2.ToolChoiceMode.values():
        raise InvalidArgument("chat.tool_choice.mode", f"is {choice.mode}, which is not a known value")
    elif choice.mode == chat_pb2.TOOL_CHOICE_MODE_REQUIRED and not chat.tools:
        raise InvalidArgument("chat.tool_choice.mode", "requires a call, and there are no tools")


def _number(value: float, field: str) -> int | float:
    """Convert whole numbers to int: a Struct has only doubles, but a template should print 3, not 3.0."""
    if not math.isfinite(value):
        raise InvalidArgument(field, f"holds a number that is {value}")
    return int(value) if value.is_integer() else value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether objects and lists are nested more than `depth` deep."""
    level = [value]
    for _ in range(depth):
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _too_deep(field: str, most: int) -> InvalidArgument:
    return InvalidArgument(field, f"is nested more than {most} deep, the limit")

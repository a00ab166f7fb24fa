"""Convert a conversation of Python dicts to the protocol's Chat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from google.protobuf.message import Message

from pagoda.fields import assign, assign_json, wrong
from pagoda.v1 import chat_pb2

# OpenAI's format: {"role": "user", "content": "…"}, where content may be a list of {"type": "text", "text": "…"}. An
# assistant's message may have "tool_calls" and "reasoning", a tool's message "tool_call_id", and each a "name".
ChatMessage = Mapping[str, Any]
# {"name": "…", "description": "…", "parameters": {…}}, or this dict under "function", as in OpenAI's format.
Tool = Mapping[str, Any]
# "auto", "none", "required", or the name of a tool as {"name": "…"}.
ToolChoice = Literal["auto", "none", "required"] | Mapping[str, Any]

_ROLES = {
    "system": chat_pb2.ROLE_SYSTEM,
    "user": chat_pb2.ROLE_USER,
    "assistant": chat_pb2.ROLE_ASSISTANT,
    "tool": chat_pb2.ROLE_TOOL,
}
_MODES = {
    "auto": chat_pb2.TOOL_CHOICE_MODE_AUTO,
    "none": chat_pb2.TOOL_CHOICE_MODE_NONE,
    "required": chat_pb2.TOOL_CHOICE_MODE_REQUIRED,
}
_MESSAGE_KEYS = ("role", "content", "reasoning", "tool_calls", "tool_call_id", "name")


def chat(
    messages: str | Sequence[ChatMessage],
    *,
    continue_last: bool | None = None,
    tools: Sequence[Tool] | None = None,
    tool_choice: ToolChoice | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> chat_pb2.Chat:
    """Convert a conversation; a text is one user message. Raises InvalidArgument."""
    conversation: Any = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    rendered = chat_pb2.Chat(continue_last=bool(continue_last))
    _check_list(conversation, "chat.messages", "messages or a text")
    for index, message in enumerate(conversation):
        _add_message(rendered.messages.add(), message, f"chat.messages[{index}]")
    if tools is not None:
        _check_list(tools, "chat.tools", "tools")
        for index, tool in enumerate(tools):
            _add_tool(rendered.tools.add(), tool, f"chat.tools[{index}]")
    if tool_choice is not None:
        _set_choice(rendered.tool_choice, tool_choice, "chat.tool_choice")
    if template_kwargs is not None:
        assign_json(rendered.template_kwargs, template_kwargs, "chat.template_kwargs")
    return rendered


def _add_message(added: chat_pb2.ChatMessage, message: object, field: str) -> None:
    if not isinstance(message, Mapping):
        raise wrong(field, f"is {_kind(message)}, must be a dict with role and content")
    if unknown := [key for key, value in message.items() if key not in _MESSAGE_KEYS and value is not None]:
        raise wrong(field, f"has the unknown key {unknown[0]!r}; known: {', '.join(_MESSAGE_KEYS)}")
    if "role" not in message:
        raise wrong(f"{field}.role", "is missing")
    added.role = _role(message["role"], f"{field}.role")
    calls = message.get("tool_calls")
    if message.get("content") is not None:
        _set_content(added, message["content"], f"{field}.content")
    elif not calls:
        raise wrong(f"{field}.content", "is missing")
    for key in ("reasoning", "tool_call_id", "name"):
        if message.get(key) is not None:
            assign(added, key, message[key], called=f"{field}.{key}")
    if calls is not None:
        _check_list(calls, f"{field}.tool_calls", "tool calls")
        for index, call in enumerate(calls):
            _add_tool_call(added.tool_calls.add(), call, f"{field}.tool_calls[{index}]")


def _role(role: object, field: str) -> chat_pb2.Role:
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(field, f"{role!r} is none of {', '.join(_ROLES)}")
    return _ROLES[role]


def _set_content(added: chat_pb2.ChatMessage, content: object, field: str) -> None:
    if isinstance(content, str):
        assign(added, "content", content, called=field)
        return
    if not isinstance(content, Sequence):
        raise wrong(field, f"is {_kind(content)}, must be a text or a list of parts of type 'text'")
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
        if not isinstance(part, Mapping) or kind != "text":
            raise wrong(f"{field}[{index}]", f"is of type {kind!r}; the only type of part is 'text'")
        if not isinstance(part.get("text"), str):
            raise wrong(f"{field}[{index}].text", f"is {_kind(part.get('text'))}, must be a text")
        assign(added.parts.add(), "text", part["text"], called=f"{field}[{index}].text")


def _add_tool(added: chat_pb2.Tool, tool: object, field: str) -> None:
    function = _function(tool, field)
    _assign_all(added, function, ("name", "description"), field)
    if (parameters := function.get("parameters")) is not None:
        assign(added, "parameters", json_text(parameters, f"{field}.parameters"), called=f"{field}.parameters")


def _add_tool_call(added: chat_pb2.ToolCall, call: Any, field: str) -> None:
    function = _function(call, field)
    _assign_all(added, call, ("id",), field)
    _assign_all(added, function, ("name",), field)
    if (arguments := function.get("arguments")) is not None:
        assign(added, "arguments", json_text(arguments, f"{field}.arguments"), called=f"{field}.arguments")


def _set_choice(added: chat_pb2.ToolChoice, choice: object, field: str) -> None:
    if isinstance(choice, Mapping):
        _assign_all(added, {"tool": _function(choice, field).get("name", "")}, ("tool",), field)
    elif isinstance(choice, str) and choice in _MODES:
        added.mode = _MODES[choice]
    else:
        raise wrong(field, f"{choice!r} is none of {', '.join(_MODES)}, nor a dict with a name")


def _function(value: object, field: str) -> Mapping[str, Any]:
    """The dict under "function", as in OpenAI's format, or the dict itself."""
    if not isinstance(value, Mapping):
        raise wrong(field, f"is {_kind(value)}, must be a dict")
    function = value.get("function", value)
    if not isinstance(function, Mapping):
        raise wrong(f"{field}.function", f"is {_kind(function)}, must be a dict")
    return function


def _assign_all(message: Message, values: Mapping[str, Any], names: Sequence[str], field: str) -> None:
    for name in names:
        if values.get(name) is not None:
            assign(message, name, values[name], called=f"{field}.{name}")


def json_text(value: object, field: str) -> str:
    """Convert a value to JSON text; a str already is JSON text."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise wrong(field, f"cannot be JSON: {error}") from error


def _check_list(value: object, field: str, what: str) -> None:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise wrong(field, f"is {_kind(value)}, must be a list of {what}")


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__

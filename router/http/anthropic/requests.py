"""Requests of Anthropic's Messages API: their JSON as messages of the protocol.

A field that this server does not know, or whose value it cannot follow, is refused by its own name. Limits and ranges
are checked afterwards, by validation.py, which knows the protocol's names: `own_name` translates them back.
"""

from __future__ import annotations

import json
import re

from pagoda.v1 import chat_pb2, inference_pb2

from ...errors import InvalidArgument, Unimplemented
from ...request.fields import Limits, check_count
from ...request.json_body import Fields, Json, json_object, shown, translating
from ...request.structured_outputs import schema_text

_IGNORED = ("metadata", "cache_control")  # they change no answer
_CHOICES = {
    "auto": chat_pb2.TOOL_CHOICE_MODE_AUTO,
    "any": chat_pb2.TOOL_CHOICE_MODE_REQUIRED,
    "none": chat_pb2.TOOL_CHOICE_MODE_NONE,
}
_THINKING = {"enabled": True, "adaptive": True, "disabled": False}
_EFFORTS = ("low", "medium", "high", "xhigh", "max")


def generate_request(raw: bytes, limits: Limits) -> tuple[inference_pb2.GenerateRequest, bool]:
    """Translate a body of /v1/messages. Returns whether its answer is streamed, too.

    Raises InvalidArgument, Unimplemented.
    """
    given, request = _fields(raw, limits), inference_pb2.GenerateRequest()
    with translating():
        request.model = given.text("model")
        _add_chat(given, request.chat, limits)
        if (max_tokens := given.integer("max_tokens", 1)) is None:
            raise InvalidArgument("max_tokens", "is missing")
        request.stopping.max_tokens = max_tokens
        request.stopping.stop.extend(given.texts("stop_sequences", limits.max_stop))
        given.put_parameters(request.sampling, "temperature", "top_p", "top_k")
        _output(given, request)
        if given.take("service_tier") not in (None, "auto", "standard_only"):
            raise Unimplemented("service_tier")
        is_stream = given.flag("stream")
    given.none_left()
    return request, is_stream


def tokenize_request(raw: bytes, limits: Limits) -> inference_pb2.TokenizeRequest:
    """Translate a body of /v1/messages/count_tokens. Raises InvalidArgument, Unimplemented."""
    given, request = _fields(raw, limits), inference_pb2.TokenizeRequest()
    with translating():
        request.model = given.text("model")
        _add_chat(given, request.chat, limits)
        _output(given, inference_pb2.GenerateRequest())  # it adds no tokens to the prompt
    given.none_left()
    return request


def _fields(raw: bytes, limits: Limits) -> Fields:
    given = Fields(json_object(raw, limits))
    for name in _IGNORED:
        given.take(name)
    return given


def _output(given: Fields, request: inference_pb2.GenerateRequest) -> None:
    """The format of the answer; the effort is a wish that need not be followed."""
    if (config := given.take("output_config")) is None:
        return
    fields = Fields(config, "output_config.")
    if fields.take("effort") not in (None, *_EFFORTS):
        raise InvalidArgument("output_config.effort", f"must be one of {', '.join(_EFFORTS)}")
    if (wanted := fields.take("format")) is not None:
        schema = Fields(wanted, "output_config.format.")
        if schema.take("type") != "json_schema":
            raise InvalidArgument("output_config.format.type", "must be json_schema")
        request.guided.json_schema = schema_text(schema.take("schema"), "output_config.format.schema")
        schema.none_left()
    fields.none_left()


# -- the conversation -------------------------------------------------------------------------------------------------


def _add_chat(given: Fields, chat: chat_pb2.Chat, limits: Limits) -> None:
    messages = given.entries("messages", limits.max_messages)
    if not messages:
        raise InvalidArgument("messages", "is missing or empty")
    if not limits.has_chat_template:
        raise InvalidArgument("messages", "the model served here has no chat template; use /v1/completions")
    if (system := given.take("system", (str, list), "a string or a list of text blocks")) is not None:
        chat.messages.append(_system(system, limits))
    for index, message in enumerate(messages):
        _add_message(Fields(message, f"messages[{index}]."), chat, limits)
    chat.continue_last = chat.messages[-1].role == chat_pb2.ROLE_ASSISTANT  # the answer goes on from its text
    for index, tool in enumerate(given.entries("tools", limits.max_tools)):
        chat.tools.append(_tool(Fields(tool, f"tools[{index}].")))
    if (choice := given.take("tool_choice")) is not None:
        _tool_choice(Fields(choice, "tool_choice."), chat.tool_choice)
    if (thinking := given.take("thinking")) is not None:
        fields = Fields(thinking, "thinking.")
        kind = fields.take("type", str, "a string")
        if kind not in _THINKING:
            raise InvalidArgument("thinking.type", f"must be one of {', '.join(_THINKING)}")
        fields.integer("budget_tokens", 1)  # max_tokens bounds both
        fields.text("display")
        fields.none_left()
        chat.template_kwargs["enable_thinking"] = _THINKING[kind]  # templates of models that can choose read it


def _system(system: str | list[Json], limits: Limits) -> chat_pb2.ChatMessage:
    message = chat_pb2.ChatMessage(role=chat_pb2.ROLE_SYSTEM)
    if isinstance(system, str):
        message.content = system
        return message
    check_count(len(system), "system", limits.max_parts)
    for index, block in enumerate(system):
        fields = Fields(block, f"system[{index}].")
        if (kind := fields.take("type", str, "a string")) != "text":
            raise _unknown_block(fields, kind)
        message.parts.add(text=_text(fields))
    return message


def _add_message(given: Fields, chat: chat_pb2.Chat, limits: Limits) -> None:
    """Add a message; results of tools, which a user's message holds, are messages of their own before it."""
    role = given.take("role", str, "a string")
    if role not in ("user", "assistant"):
        raise InvalidArgument(given.name("role"), "must be user or assistant")
    content = given.take("content", (str, list), "a string or a list of blocks")
    if content is None:
        raise InvalidArgument(given.name("content"), "is missing")
    given.none_left()
    message = chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER if role == "user" else chat_pb2.ROLE_ASSISTANT)
    if isinstance(content, str):
        message.content = content
        chat.messages.append(message)
        return
    check_count(len(content), given.name("content"), limits.max_parts)
    for index, each in enumerate(content):
        block = Fields(each, given.name(f"content[{index}]."))
        match role, block.take("type", str, "a string"):
            case _, "text":
                message.parts.add(text=_text(block))
            case "user", "tool_result":
                chat.messages.append(_tool_result(block, limits))
            case "assistant", "tool_use":
                message.tool_calls.append(_tool_use(block))
            case "assistant", "thinking":
                message.reasoning += block.text("thinking")
                block.text("signature")  # there is nothing to prove
                block.none_left()
            case _, kind:
                raise _unknown_block(block, kind)
    if message.parts or message.tool_calls or message.reasoning or not content:
        chat.messages.append(message)


def _unknown_block(block: Fields, kind: str | None) -> Exception:
    name = block.name("type")
    return InvalidArgument(name, "is missing") if kind is None else Unimplemented(f"{name} {shown(kind)}")


def _text(block: Fields) -> str:
    text: str | None = block.take("text", str, "a string")
    if text is None:
        raise InvalidArgument(block.name("text"), "is missing")
    block.take("cache_control")
    if block.take("citations"):
        raise Unimplemented(block.name("citations"))
    block.none_left()
    return text


def _tool_result(block: Fields, limits: Limits) -> chat_pb2.ChatMessage:
    message = chat_pb2.ChatMessage(role=chat_pb2.ROLE_TOOL, tool_call_id=block.text("tool_use_id"))
    block.flag("is_error")  # templates have no place for it: the text says it
    block.take("cache_control")
    content = block.take("content", (str, list), "a string or a list of text blocks")
    block.none_left()
    if not isinstance(content, list):
        message.content = content or ""
        return message
    check_count(len(content), block.name("content"), limits.max_parts)
    for index, each in enumerate(content):
        part = Fields(each, block.name(f"content[{index}]."))
        if (kind := part.take("type", str, "a string")) != "text":
            raise _unknown_block(part, kind)
        message.parts.add(text=_text(part))
    return message


def _tool_use(block: Fields) -> chat_pb2.ToolCall:
    arguments = block.take("input", dict, "an object")
    call = chat_pb2.ToolCall(
        id=block.text("id"), name=block.text("name"), arguments=json.dumps(arguments or {}, ensure_ascii=False)
    )
    block.take("cache_control")
    block.none_left()
    return call


# -- tools ------------------------------------------------------------------------------------------------------------


def _tool(given: Fields) -> chat_pb2.Tool:
    if (kind := given.take("type", str, "a string")) not in (None, "custom"):
        raise Unimplemented(f"{given.name('type')} {shown(kind)}")
    parameters = given.take("input_schema", dict, "an object")
    if parameters is None:
        raise InvalidArgument(given.name("input_schema"), "is missing")
    given.take("cache_control")
    given.flag("strict")  # arguments follow their schema where a call is enforced
    tool = chat_pb2.Tool(
        name=given.text("name"),
        description=given.text("description"),
        parameters=json.dumps(parameters, ensure_ascii=False),
    )
    given.none_left()
    return tool


def _tool_choice(given: Fields, choice: chat_pb2.ToolChoice) -> None:
    kind = given.take("type", str, "a string")
    if kind == "tool":
        choice.tool = given.text("name")
    elif kind in _CHOICES:
        choice.mode = _CHOICES[kind]
    else:
        raise InvalidArgument("tool_choice.type", f"must be one of {', '.join(_CHOICES)}, tool")
    choice.at_most_one = given.flag("disable_parallel_tool_use")
    given.none_left()


# -- names ------------------------------------------------------------------------------------------------------------

_OWN_NAMES = {
    "chat.template_kwargs": "thinking",
    "chat.tool_choice.mode": "tool_choice",
    "chat.tool_choice.tool": "tool_choice.name",
    "input": "messages",
    "chat": "messages",
    "request": "body",
    "request_id": "x-request-id",
}
_INSIDE = (
    (re.compile(r"^guided.*"), "output_config.format"),
    (re.compile(r"^stopping\.stop\b"), "stop_sequences"),
    (re.compile(r"^chat\.messages\b.*"), "messages"),  # a tool's result is a message of its own: numbers differ
    (re.compile(r"^(sampling|stopping|chat)\."), ""),
    (re.compile(r"^(tools\[\d+\])\.parameters$"), r"\1.input_schema"),
)


def own_name(path: str) -> str:
    """The API's name of a field that an error names as the protocol does."""
    if path in _OWN_NAMES:
        return _OWN_NAMES[path]
    for pattern, replacement in _INSIDE:
        path = pattern.sub(replacement, path)
    return path

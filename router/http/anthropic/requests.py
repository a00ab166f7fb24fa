"""Requests of Anthropic's Messages API: their JSON as messages of the protocol.

A field that this server does not know, or whose value it cannot follow, is refused by its own name. Limits and ranges
are checked afterwards, by validation.py, which knows the protocol's names: `own_name` translates them back.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from pagoda.v1 import chat_pb2, inference_pb2

from ...errors import InvalidArgument, Unimplemented
from ...request.fields import Limits, check_count
from ...request.json_body import Fields, Json, json_object, shown, translating
from ...request.structured_outputs import schema_text
from ..field_names import FieldNames, FieldPlaces

_IGNORED = ("metadata", "cache_control")  # they change no answer
_CHOICES = {
    "auto": chat_pb2.TOOL_CHOICE_MODE_AUTO,
    "any": chat_pb2.TOOL_CHOICE_MODE_REQUIRED,
    "none": chat_pb2.TOOL_CHOICE_MODE_NONE,
}
_THINKING = {"enabled": True, "adaptive": True, "disabled": False}
_EFFORTS = ("low", "medium", "high", "xhigh", "max")


@dataclass(slots=True)
class Asked:
    """What an answer has to be like.

    places  which block each part of the conversation is from
    """

    is_stream: bool = False
    places: FieldPlaces = field(default_factory=dict)


def generate_request(raw: bytes, limits: Limits, asked: Asked) -> inference_pb2.GenerateRequest:
    """Translate a body of /v1/messages, and note in `asked` what the answer has to be like.

    Raises InvalidArgument, Unimplemented.
    """
    given, request = _fields(raw, limits), inference_pb2.GenerateRequest()
    with translating():
        request.model = given.text("model")
        _add_chat(given, request.chat, limits, asked.places)
        if (max_tokens := given.integer("max_tokens", 1)) is None:
            raise InvalidArgument("max_tokens", "is missing")
        request.stopping.max_tokens = max_tokens
        request.stopping.stop.extend(given.texts("stop_sequences", limits.max_stop))
        given.put_parameters(request.sampling, "temperature", "top_p", "top_k")
        _output(given, request)
        if given.take("service_tier") not in (None, "auto", "standard_only"):
            raise Unimplemented("service_tier")
        asked.is_stream = given.flag("stream")
    given.none_left()
    return request


def tokenize_request(raw: bytes, limits: Limits, asked: Asked) -> inference_pb2.TokenizeRequest:
    """Translate a body of /v1/messages/count_tokens. Raises InvalidArgument, Unimplemented."""
    given, request = _fields(raw, limits), inference_pb2.TokenizeRequest()
    with translating():
        request.model = given.text("model")
        _add_chat(given, request.chat, limits, asked.places)
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


def _add_chat(given: Fields, chat: chat_pb2.Chat, limits: Limits, places: FieldPlaces) -> None:
    messages = given.entries("messages", limits.max_messages)
    if not messages:
        raise InvalidArgument("messages", "is missing or empty")
    if not limits.has_chat_template:
        raise InvalidArgument("messages", "the model served here has no chat template; use /v1/completions")
    if (system := given.take("system", (str, list), "a string or a list of text blocks")) is not None:
        chat.messages.append(_system(system, limits))
        places["chat.messages[0].content"] = "system"
    for index, message in enumerate(messages):
        _add_message(Fields(message, f"messages[{index}]."), chat, limits, places)
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


def _add_message(given: Fields, chat: chat_pb2.Chat, limits: Limits, places: FieldPlaces) -> None:
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
        places[_next(chat)] = given.path
        chat.messages.append(message)
        return
    check_count(len(content), given.name("content"), limits.max_parts)
    for index, each in enumerate(content):
        block = Fields(each, given.name(f"content[{index}]."))
        match role, block.take("type", str, "a string"):
            case _, "text":
                message.parts.add(text=_text(block))
            case "user", "tool_result":
                places[_next(chat)] = block.path
                chat.messages.append(_tool_result(block, limits))
            case "assistant", "tool_use":
                places[f"{_next(chat)}.tool_calls[{len(message.tool_calls)}]"] = block.path
                message.tool_calls.append(_tool_use(block))
            case "assistant", "thinking":
                message.reasoning += block.text("thinking")
                block.text("signature")  # there is nothing to prove
                block.none_left()
            case _, kind:
                raise _unknown_block(block, kind)
    if message.parts or message.tool_calls or message.reasoning or not content:
        places[_next(chat)] = given.path
        chat.messages.append(message)


def _next(chat: chat_pb2.Chat) -> str:
    """The path of the message that is added next."""
    return f"chat.messages[{len(chat.messages)}]"


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

_NAMES = FieldNames(
    (r"^chat$", "messages"),
    (r"^chat\.(messages\b.*|continue_last)$", "messages"),
    (r"^chat\.template_kwargs\b.*", "thinking"),
    (r"^chat\.tool_choice\.mode$", "tool_choice"),
    (r"^chat\.tool_choice\.tool$", "tool_choice.name"),
    (r"^chat\.(tools\[\d+\])\.parameters$", r"\1.input_schema"),
    (r"^guided\b.*", "output_config.format"),
    (r"^stopping\.stop\b", "stop_sequences"),
    inside=(
        (r"^(chat\.messages\b.*)\.arguments$", r"\1.input"),
        (r"^(chat\.messages\b.*)\.tool_call_id$", r"\1.tool_use_id"),
        (r"^(chat\.messages\b.*)\.(parts|reasoning|tool_calls)$", r"\1.content"),
    ),
)


def own_name(path: str, asked: Asked) -> str:
    """The API's name of a field that an error names as the protocol does."""
    return _NAMES.of(path, asked.places)

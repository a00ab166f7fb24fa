"""The conversation of a chat completion: messages, tools and template variables as the protocol's Chat."""

from __future__ import annotations

import json

from pagoda.v1 import chat_pb2

from ...errors import InvalidArgument, Unimplemented
from ...request.fields import Limits, check_count, too_many
from ...request.json_body import Fields, shown
from ..field_names import FieldPlaces

_ROLES = {
    "system": chat_pb2.ROLE_SYSTEM,
    "developer": chat_pb2.ROLE_SYSTEM,
    "user": chat_pb2.ROLE_USER,
    "assistant": chat_pb2.ROLE_ASSISTANT,
    "tool": chat_pb2.ROLE_TOOL,
}
_MODES = {
    "none": chat_pb2.TOOL_CHOICE_MODE_NONE,
    "auto": chat_pb2.TOOL_CHOICE_MODE_AUTO,
    "required": chat_pb2.TOOL_CHOICE_MODE_REQUIRED,
}


def add_chat(given: Fields, chat: chat_pb2.Chat, limits: Limits, places: FieldPlaces) -> None:
    """Fill the chat, and note in `places` what has another name there. Raises InvalidArgument, Unimplemented."""
    messages = given.entries("messages", limits.max_messages)
    if not messages:
        raise InvalidArgument("messages", "is missing or empty")
    if not limits.has_chat_template:
        raise InvalidArgument("messages", "the model served here has no chat template; use /v1/completions")
    for index, message in enumerate(messages):
        chat.messages.append(_message(Fields(message, f"messages[{index}]."), limits, places))
    chat.continue_last = given.flag("continue_last")
    _tools(given, chat, limits)
    variables = given.take("chat_template_kwargs", dict, "an object") or {}
    if len(variables) > limits.max_kwargs_values:
        raise too_many("chat_template_kwargs", limits.max_kwargs_values)
    try:
        chat.template_kwargs.update(variables)
    except UnicodeEncodeError:
        raise
    except (ValueError, TypeError, OverflowError):
        raise InvalidArgument("chat_template_kwargs", "holds a value that is out of range") from None


def _message(given: Fields, limits: Limits, places: FieldPlaces) -> chat_pb2.ChatMessage:
    role = given.take("role", str, "a string")
    if role not in _ROLES:
        raise InvalidArgument(given.name("role"), f"must be one of {', '.join(_ROLES)}")
    older, newer = given.text("reasoning_content"), given.text("reasoning")
    message = chat_pb2.ChatMessage(
        role=_ROLES[role],
        reasoning=newer or older,
        tool_call_id=given.text("tool_call_id"),
        name=given.text("name"),
    )
    if older and not newer:
        places[f"chat.{given.name('reasoning')}"] = given.name("reasoning_content")
    content = given.take("content", (str, list), "a string or a list of parts")
    if isinstance(content, list):
        check_count(len(content), given.name("content"), limits.max_parts)
        for index, part in enumerate(content):
            message.parts.add(text=_text_part(Fields(part, given.name(f"content[{index}]."))))
    elif content is not None:
        message.content = content
    calls = given.entries("tool_calls", limits.max_tools)
    if content is None and not (role == "assistant" and calls):
        raise InvalidArgument(given.name("content"), "is missing")
    for index, call in enumerate(calls):
        message.tool_calls.append(_tool_call(Fields(call, given.name(f"tool_calls[{index}]."))))
    if given.take("annotations"):  # a client may send an answer back as it came, with an empty list
        raise Unimplemented(given.name("annotations"))
    given.none_left()
    return message


def _text_part(given: Fields) -> str:
    if (kind := given.take("type", str, "a string")) != "text":
        if kind is None:
            raise InvalidArgument(given.name("type"), "is missing")
        raise Unimplemented(given.name(shown(kind)))
    text: str | None = given.take("text", str, "a string")
    if text is None:
        raise InvalidArgument(given.name("text"), "is missing")
    given.none_left()
    return text


def _tool_call(given: Fields) -> chat_pb2.ToolCall:
    if given.take("type") not in (None, "function"):
        raise Unimplemented(given.name("type"))
    given.take("index")  # of a streamed call
    function = Fields(given.take("function"), given.name("function."))
    call = chat_pb2.ToolCall(id=given.text("id"), name=function.text("name"), arguments=function.text("arguments"))
    function.none_left()
    given.none_left()
    return call


# -- tools ------------------------------------------------------------------------------------------------------------


def _tools(given: Fields, chat: chat_pb2.Chat, limits: Limits) -> None:
    for index, tool in enumerate(given.entries("tools", limits.max_tools)):
        chat.tools.append(_tool(Fields(tool, f"tools[{index}].")))
    if given.take("parallel_tool_calls", bool, "true or false") is False:
        chat.tool_choice.at_most_one = True
    match given.take("tool_choice"):
        case None:
            pass
        case str() as mode:
            set_mode(chat.tool_choice, mode)
        case choice:
            fields = Fields(choice, "tool_choice.")
            if fields.take("type") != "function":
                raise InvalidArgument("tool_choice.type", "must be function")
            function = Fields(fields.take("function"), "tool_choice.function.")
            chat.tool_choice.tool = function.text("name")
            function.none_left()
            fields.none_left()


def set_mode(choice: chat_pb2.ToolChoice, mode: str) -> None:
    """Fill the choice. Raises InvalidArgument."""
    if mode not in _MODES:
        raise InvalidArgument("tool_choice", f"must be one of {', '.join(_MODES)}, or name a function")
    choice.mode = _MODES[mode]


def _tool(given: Fields) -> chat_pb2.Tool:
    if given.take("type") != "function":
        raise Unimplemented(given.name("type"))
    tool = function_tool(Fields(given.take("function"), given.name("function.")))
    given.none_left()
    return tool


def function_tool(function: Fields) -> chat_pb2.Tool:
    """A function that the model may call, of which nothing else is left in the fields."""
    parameters = function.take("parameters", dict, "an object")
    function.flag("strict")  # arguments follow their schema where a call is enforced
    tool = chat_pb2.Tool(
        name=function.text("name"),
        description=function.text("description"),
        parameters="" if parameters is None else json.dumps(parameters, ensure_ascii=False),
    )
    function.none_left()
    return tool

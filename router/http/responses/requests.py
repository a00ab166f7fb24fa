"""Requests of OpenAI's Responses API: their JSON as messages of the protocol.

A field that this server does not know, or whose value it cannot follow, is refused by its own name; what would need an
earlier response that the server kept is among them. Limits and ranges are checked afterwards, by validation.py, which
knows the protocol's names: `own_name` translates them back.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

from pagoda.v1 import chat_pb2, inference_pb2

from ...errors import InvalidArgument, Unimplemented
from ...request.fields import Limits, check_count
from ...request.json_body import Fields, Json, json_object, shown, translating
from ...request.structured_outputs import schema_text
from ..field_names import FieldNames, FieldPlaces
from ..openai.chats import function_tool, set_mode

_IGNORED = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "client_metadata")
_NEEDLESS: dict[str, tuple[object, ...]] = {  # fields that may only ask for what the server does anyway
    "store": (False,),
    "background": (False,),
    "service_tier": ("auto", "default"),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
}
_INCLUDED = ("reasoning.encrypted_content",)  # reasoning comes as text, and is taken back as text
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_VERBOSITIES = ("low", "medium", "high")
_SUMMARIES = ("auto", "concise", "detailed", "none")
_ROLES = {
    "system": chat_pb2.ROLE_SYSTEM,
    "developer": chat_pb2.ROLE_SYSTEM,
    "user": chat_pb2.ROLE_USER,
    "assistant": chat_pb2.ROLE_ASSISTANT,
}
_TEXTS = ("input_text", "output_text", "text")


@dataclass(slots=True)
class Asked:
    """What an answer has to be like.

    echoed   fields of the request that a response repeats, as the inside of a JSON object
    created  seconds since 1970
    places   which item each part of the conversation is from
    """

    is_stream: bool = False
    echoed: bytes = b""
    created: int = field(default_factory=lambda: int(time.time()))
    places: FieldPlaces = field(default_factory=dict)


def generate_request(raw: bytes, limits: Limits, asked: Asked) -> inference_pb2.GenerateRequest:
    """Translate a body, and note in `asked` what the answer has to be like. Raises InvalidArgument, Unimplemented."""
    body = json_object(raw, limits)
    given, request = Fields(body), inference_pb2.GenerateRequest()
    with translating():
        for name in _IGNORED:
            given.take(name)
        for name, harmless in _NEEDLESS.items():
            if not _is_one_of(given.take(name), harmless):
                raise Unimplemented(name)
        for index, wanted in enumerate(given.texts("include", len(_INCLUDED))):
            if wanted not in _INCLUDED:
                raise Unimplemented(f"include[{index}] {shown(wanted)}")
        request.model = given.text("model")
        _check_reasoning(given)
        _add_chat(given, request.chat, limits, asked.places)
        if (max_tokens := given.integer("max_output_tokens", 1)) is not None:
            request.stopping.max_tokens = max_tokens
        given.put_parameters(request.sampling, "temperature", "top_p")
        _format(given, request)
        asked.is_stream = given.flag("stream")
        _check_stream_options(given, asked)
        given.take("metadata", dict, "an object")
        asked.echoed = json.dumps(_echoed(body), ensure_ascii=False).encode()[1:-1]
    given.none_left()
    return request


def _is_one_of(value: Json, harmless: tuple[object, ...]) -> bool:
    return value is None or any(value == each and type(value) is type(each) for each in harmless)


def _echoed(body: dict[str, Json]) -> dict[str, Any]:
    """What a response says of its request, with the defaults of what was not given."""
    defaults: dict[str, Any] = {
        "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None}, "temperature": None, "text": {"format": {"type": "text"}},
        "tool_choice": "auto", "tools": [], "top_p": None, "user": None,
    }  # fmt: skip
    return {name: default if body.get(name) is None else body[name] for name, default in defaults.items()}


def _check_reasoning(given: Fields) -> None:
    """Wishes that need not be followed."""
    if (wanted := given.take("reasoning")) is None:
        return
    fields = Fields(wanted, "reasoning.")
    for name, known in (("effort", _EFFORTS), ("summary", _SUMMARIES), ("generate_summary", _SUMMARIES)):
        if fields.take(name) not in (None, *known):
            raise InvalidArgument(f"reasoning.{name}", f"must be one of {', '.join(known)}")
    fields.none_left()


def _check_stream_options(given: Fields, asked: Asked) -> None:
    if (options := given.take("stream_options")) is None:
        return
    if not asked.is_stream:
        raise InvalidArgument("stream_options", "needs stream to be true")
    fields = Fields(options, "stream_options.")
    if fields.flag("include_obfuscation"):
        raise Unimplemented("stream_options.include_obfuscation")
    fields.none_left()


def _format(given: Fields, request: inference_pb2.GenerateRequest) -> None:
    if (text := given.take("text")) is None:
        return
    fields = Fields(text, "text.")
    if fields.take("verbosity") not in (None, *_VERBOSITIES):
        raise InvalidArgument("text.verbosity", f"must be one of {', '.join(_VERBOSITIES)}")
    if (wanted := fields.take("format")) is not None:
        schema = Fields(wanted, "text.format.")
        match schema.take("type"):
            case "json_schema":
                for name in ("name", "description"):
                    schema.text(name)
                schema.flag("strict")  # every answer is
                request.guided.json_schema = schema_text(schema.take("schema"), "text.format.schema")
            case "json_object":
                request.guided.json_object = True
            case "text":
                pass
            case _:
                raise InvalidArgument("text.format.type", "must be text, json_object or json_schema")
        schema.none_left()
    fields.none_left()


# -- the conversation -------------------------------------------------------------------------------------------------


def _add_chat(given: Fields, chat: chat_pb2.Chat, limits: Limits, places: FieldPlaces) -> None:
    wanted = given.take("input", (str, list), "a string or a list of items")
    if not wanted:
        raise InvalidArgument("input", "is missing or empty")
    if not limits.has_chat_template:
        raise InvalidArgument("input", "the model served here has no chat template; use /v1/completions")
    if instructions := given.text("instructions"):
        chat.messages.add(role=chat_pb2.ROLE_SYSTEM, content=instructions)
        places["chat.messages[0].content"] = "instructions"
    if isinstance(wanted, str):
        chat.messages.add(role=chat_pb2.ROLE_USER, content=wanted)
    else:
        check_count(len(wanted), "input", limits.max_messages)
        items = _Items(chat, limits, places)
        for index, item in enumerate(wanted):
            items.add(Fields(item, f"input[{index}]."))
    for index, tool in enumerate(given.entries("tools", limits.max_tools)):
        chat.tools.append(_tool(Fields(tool, f"tools[{index}].")))
    chat.tool_choice.at_most_one = given.take("parallel_tool_calls", bool, "true or false") is False
    match given.take("tool_choice"):
        case None:
            pass
        case str() as mode:
            set_mode(chat.tool_choice, mode)
        case choice:
            fields = Fields(choice, "tool_choice.")
            if fields.take("type") != "function":
                raise Unimplemented("tool_choice.type")
            chat.tool_choice.tool = fields.text("name")
            fields.none_left()


class _Items:
    """Items of a conversation as its messages: what an assistant thought, said and called becomes one of them."""

    def __init__(self, chat: chat_pb2.Chat, limits: Limits, places: FieldPlaces) -> None:
        self._chat = chat
        self._places = places
        self._limits = limits
        self._answer: chat_pb2.ChatMessage | None = None  # the assistant's, while its items follow each other

    def add(self, item: Fields) -> None:
        item.text("id")
        item.text("status")
        match item.take("type", str, "a string"):
            case None | "message":
                self._add_message(item)
            case "function_call":
                calls = self._assistant().tool_calls
                call = calls.add(id=item.text("call_id"), name=item.text("name"), arguments=item.text("arguments"))
                check_count(len(calls), item.name("type"), self._limits.max_tools)
                self._note(f".tool_calls[{len(calls) - 1}]", item.path)
                if not call.arguments:
                    call.arguments = "{}"
            case "function_call_output":
                self._answer = None
                result = self._chat.messages.add(role=chat_pb2.ROLE_TOOL, tool_call_id=item.text("call_id"))
                self._note("", item.path)
                self._add_content(item, "output", result)
            case "reasoning":
                self._add_reasoning(item)
            case kind:
                raise Unimplemented(f"{item.name('type')} {shown(kind)}")
        item.none_left()

    def _note(self, part: str, name: str) -> None:
        """Note where a part of the last message is from."""
        self._places[f"chat.messages[{len(self._chat.messages) - 1}]{part}"] = name

    def _assistant(self) -> chat_pb2.ChatMessage:
        if self._answer is None:
            self._answer = self._chat.messages.add(role=chat_pb2.ROLE_ASSISTANT)
        return self._answer

    def _add_message(self, item: Fields) -> None:
        role = item.take("role", str, "a string")
        if role not in _ROLES:
            raise InvalidArgument(item.name("role"), f"must be one of {', '.join(_ROLES)}")
        item.text("phase")
        if role == "assistant":
            message = self._assistant()
        else:
            self._answer = None
            message = self._chat.messages.add(role=_ROLES[role])
            self._note("", item.path)
        self._add_content(item, "content", message)

    def _add_content(self, item: Fields, name: str, message: chat_pb2.ChatMessage) -> None:
        content = item.take(name, (str, list), "a string or a list of text parts")
        if content is None:
            raise InvalidArgument(item.name(name), "is missing")
        texts = [content] if isinstance(content, str) else self._parts(item, name, content, _TEXTS)
        check_count(len(message.parts) + len(texts), item.name(name), self._limits.max_parts)
        for part in (".content", ".parts"):
            self._note(part, item.name(name))
        if len(texts) == 1 and not message.parts and not message.content:
            message.content = texts[0]
            return
        if message.content:
            message.parts.add(text=message.content)
            message.content = ""
        for text in texts:
            message.parts.add(text=text)

    def _add_reasoning(self, item: Fields) -> None:
        item.text("encrypted_content")
        for name, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
            texts = self._parts(item, name, item.take(name, list, "a list of parts") or [], (kind,))
            if name == "content" and texts:
                self._assistant().reasoning += "".join(texts)
                self._note(".reasoning", item.name(name))

    def _parts(self, item: Fields, name: str, parts: list[Json], kinds: tuple[str, ...]) -> list[str]:
        check_count(len(parts), item.name(name), self._limits.max_parts)
        texts = []
        for index, each in enumerate(parts):
            part = Fields(each, item.name(f"{name}[{index}]."))
            kind = part.take("type", str, "a string")
            if kind not in kinds:
                if kind is None:
                    raise InvalidArgument(part.name("type"), "is missing")
                raise Unimplemented(f"{part.name('type')} {shown(kind)}")
            text = part.take("text", str, "a string")
            if text is None:
                raise InvalidArgument(part.name("text"), "is missing")
            for empty in ("annotations", "logprobs"):  # of an answer that comes back as it was sent
                if part.take(empty):
                    raise Unimplemented(part.name(empty))
            part.none_left()
            texts.append(text)
        return texts


def _tool(given: Fields) -> chat_pb2.Tool:
    if (kind := given.take("type", str, "a string")) != "function":
        raise Unimplemented(f"{given.name('type')} {shown(str(kind))}")
    return function_tool(given)


# -- names ------------------------------------------------------------------------------------------------------------

_NAMES = FieldNames(
    (r"^chat$", "input"),
    (r"^chat\.messages\b.*", "input"),
    (r"^chat\.tool_choice\.mode$", "tool_choice"),
    (r"^chat\.tool_choice\.tool$", "tool_choice.name"),
    (r"^guided\b.*", "text.format"),
    (r"^stopping\.max_tokens$", "max_output_tokens"),
    inside=((r"^(chat\.messages\b.*)\.(id|tool_call_id)$", r"\1.call_id"),),
)


def own_name(path: str, asked: Asked) -> str:
    """The API's name of a field that an error names as the protocol does."""
    return _NAMES.of(path, asked.places)

"""A model's chat template, run in jinja2's sandbox: a conversation becomes the text that the model was trained on."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal, NoReturn, TypeAlias

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagoda_server.router.errors import ConfigError, InvalidArgument

logger = logging.getLogger(__name__)

ChatRole = Literal["system", "user", "assistant", "tool"]
Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # model families name it differently


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of an earlier answer."""

    name: str
    arguments: dict[str, Json]
    id: str = ""

    def for_template(self) -> dict[str, Json]:
        named: dict[str, Json] = {"id": self.id} if self.id else {}
        return {**named, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class Message:
    role: ChatRole
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    def for_template(self) -> dict[str, Json]:
        """The message under the keys that templates of Hugging Face read; a key without a value is absent."""
        optional: dict[str, Json] = {
            **dict.fromkeys(_REASONING_KEYS, self.reasoning),
            "tool_calls": [call.for_template() for call in self.tool_calls],
            "tool_call_id": self.tool_call_id,
            "name": self.name,
        }
        return {"role": self.role, "content": self.content, **{key: value for key, value in optional.items() if value}}


@dataclass(frozen=True, slots=True)
class Chat:
    """
    messages         at least one
    continue_last    the text ends inside the last message instead of opening the assistant's next one
    tools            what the model is told of the functions that it may call: {"type": "function", "function": …}
    template_kwargs  more variables of the template
    """

    messages: tuple[Message, ...]
    continue_last: bool = False
    tools: tuple[dict[str, Json], ...] = ()
    template_kwargs: Mapping[str, Json] = field(default_factory=dict)

    def with_texts(self, change: Callable[[str], str]) -> Chat:
        """The same chat with each text that its client wrote replaced by `change` of it."""
        return Chat(
            tuple(_message_with_texts(message, change) for message in self.messages),
            self.continue_last,
            tuple(_json_with_texts(tool, change) for tool in self.tools),
            {name: _json_with_texts(value, change) for name, value in self.template_kwargs.items()},
        )


def _message_with_texts(message: Message, change: Callable[[str], str]) -> Message:
    return Message(
        message.role,
        change(message.content),
        change(message.reasoning),
        tuple(
            ToolCall(change(call.name), _json_with_texts(call.arguments, change), change(call.id))
            for call in message.tool_calls
        ),
        change(message.tool_call_id),
        change(message.name),
    )


def _json_with_texts(value: Any, change: Callable[[str], str]) -> Any:
    match value:
        case str():
            return change(value)
        case list():
            return [_json_with_texts(each, change) for each in value]
        case dict():
            return {change(key): _json_with_texts(each, change) for key, each in value.items()}
    return value


class ChatTemplate:
    """A template in the dialect of Hugging Face's `apply_chat_template`, compiled once; threads may share it.

    reads_tools  whether it tells the model of the tools that it may call
    kwargs       variables that it reads and `Chat.template_kwargs` may set; ascending
    """

    def __init__(self, source: str, variables: Mapping[str, str] | None = None, max_bytes: int = 8 << 20) -> None:
        """
        variables  what the template may name besides the conversation, such as bos_token
        max_bytes  UTF-8 bytes of a rendered conversation

        Raises ConfigError if the template does not compile.
        """
        self._variables = dict(variables or {})
        self._max_bytes = max_bytes
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            names = meta.find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise ConfigError(f"the model's chat template does not compile: {error}") from error
        self._reserved = {"messages", "tools", "add_generation_prompt", *self._variables, *environment.globals}
        self.reads_tools = "tools" in names
        self.kwargs = tuple(sorted(names - self._reserved))

    def render(self, chat: Chat) -> str:
        """Raises InvalidArgument if the template refuses or fails, or its text is too long."""
        if taken := sorted(self._reserved.intersection(chat.template_kwargs)):
            raise InvalidArgument(f"chat.template_kwargs.{taken[0]}", "is set by the server")
        if not chat.continue_last:
            return self._run(chat, chat.messages, add_generation_prompt=True)
        *earlier, last = chat.messages
        # The end of the last message is found by a mark that no client can have typed.
        mark = f"{secrets.randbits(128)} "
        marked = replace(last, content=last.content + mark)
        text, found, rest = self._run(chat, (*earlier, marked), add_generation_prompt=False).rpartition(mark.rstrip())
        if not found:
            raise InvalidArgument("chat.continue_last", "the model's chat template does not end with the last message")
        keeps_spaces = rest.startswith(" ")
        return text if keeps_spaces else text.rstrip()

    def _run(self, chat: Chat, messages: Iterable[Message], add_generation_prompt: bool) -> str:
        pieces, num_bytes = [], 0
        given = {
            "messages": [message.for_template() for message in messages],
            "tools": list(chat.tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **chat.template_kwargs,
        }
        try:
            for piece in self._template.generate(**self._variables, **given):
                pieces.append(piece)
                num_bytes += len(piece.encode())
                if num_bytes > self._max_bytes:
                    break
        except Exception as error:  # a template is a program: whatever it raises is about this conversation
            logger.info("the chat template failed with %s", type(error).__name__)
            raise InvalidArgument("chat", "the model's chat template does not accept this conversation") from error
        if num_bytes > self._max_bytes:
            raise InvalidArgument("chat", f"becomes more than {self._max_bytes} bytes of text, the limit")
        return "".join(pieces)


def _environment() -> ImmutableSandboxedEnvironment:
    """The dialect that templates are written in, as transformers defines it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it means its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own, without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)

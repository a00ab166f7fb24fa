"""A model's chat template, run in jinja2's sandbox: a conversation becomes the text that the model was trained on."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagoda_server.router.errors import ConfigError, InvalidArgument

logger = logging.getLogger(__name__)

ChatRole = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Message:
    role: ChatRole
    content: str


@dataclass(frozen=True, slots=True)
class Chat:
    """
    messages       at least one
    continue_last  the text ends inside the last message instead of opening the assistant's next one
    """

    messages: tuple[Message, ...]
    continue_last: bool = False


class ChatTemplate:
    """A template in the dialect of Hugging Face's `apply_chat_template`, compiled once; threads may share it."""

    def __init__(self, source: str, variables: Mapping[str, str] | None = None, max_bytes: int = 8 << 20) -> None:
        """
        variables  what the template may name besides the conversation, such as bos_token
        max_bytes  UTF-8 bytes of a rendered conversation

        Raises ConfigError if the template does not compile.
        """
        self._variables = dict(variables or {})
        self._max_bytes = max_bytes
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the model's chat template does not compile: {error}") from error

    def render(self, chat: Chat) -> str:
        """Raises InvalidArgument if the template refuses or fails, or its text is too long."""
        if not chat.continue_last:
            return self._run(chat.messages, add_generation_prompt=True)
        *earlier, last = chat.messages
        # The end of the last message is found by a mark that nobody can have typed.
        mark = f"{secrets.randbits(128)} "
        marked = Message(last.role, last.content + mark)
        text, found, rest = self._run((*earlier, marked), add_generation_prompt=False).rpartition(mark.rstrip())
        if not found:
            raise InvalidArgument("chat.continue_last", "the model's chat template does not end with the last message")
        keeps_spaces = rest.startswith(" ")
        return text if keeps_spaces else text.rstrip()

    def _run(self, messages: tuple[Message, ...], add_generation_prompt: bool) -> str:
        pieces, num_bytes = [], 0
        try:
            for piece in self._template.generate(
                messages=[{"role": message.role, "content": message.content} for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            ):
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

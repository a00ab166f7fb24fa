"""Render a conversation with a model's chat template, in the format of the model's training."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import secrets
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from ...checkpoints.folder import quoted
from ...settings.router import environment_without_secrets
from ..errors import ConfigError, InvalidArgument, ResourceExhausted
from . import template_process
from .template_process import FAILED, TOO_LONG, read_frame, write_frame
from .turns import turn

logger = logging.getLogger(__name__)

ChatRole = Literal["system", "user", "assistant", "tool"]
Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"

NUM_PROCESSES = 2  # one conversation that takes long leaves the others a process
WALL_S = 10.0  # for an answer, however busy the machine is; the process's own limit is CPU time
RETRY_START_S = 1.0  # a client's pause when no process can be started

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # model families name it differently


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call in an earlier answer."""

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
    """A conversation.

    messages         at least one
    continue_last    continue the last message instead of starting the assistant's next one
    tools            functions that the model may call: {"type": "function", "function": …}
    template_kwargs  additional variables of the template
    """

    messages: tuple[Message, ...]
    continue_last: bool = False
    tools: tuple[dict[str, Json], ...] = ()
    template_kwargs: Mapping[str, Json] = field(default_factory=dict)

    def with_texts(self, change: Callable[[str], str]) -> Chat:
        """A copy of the chat with `change` applied to every text that the client wrote."""
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

    It runs in processes of its own (template_process.py), so that nothing it does can hold up or fill this one.

    source       the template's text
    reads_tools  whether it shows the model the tools
    kwargs       variables that it reads and `Chat.template_kwargs` may set, in ascending order
    """

    def __init__(self, source: str, variables: Mapping[str, str] | None = None, max_bytes: int = 8 << 20) -> None:
        """
        variables  the template's variables besides the conversation, such as bos_token
        max_bytes  limit of a rendered conversation, in bytes of UTF-8

        Raises ConfigError if the template does not compile.
        """
        self.source = source
        variables = dict(variables or {})
        self._max_bytes = max_bytes
        first_request = json.dumps([source, variables, max_bytes]).encode()
        try:
            # The others start when conversations are first rendered beside each other: a start has no core for them.
            first, *others = self._processes = [_TemplateProcess(first_request) for _ in range(NUM_PROCESSES)]
            answer = first.start()
        except _LimitExceeded as error:
            raise ConfigError(f"the model's chat template does not compile: it {error}") from error
        except OSError as error:
            raise ConfigError(f"no process can be started for the model's chat template: {error.strerror}") from error
        if answer.startswith(FAILED):
            raise ConfigError(f"the model's chat template does not compile: {quoted(answer[1:].decode())}")
        self._idle: queue.LifoQueue[_TemplateProcess] = queue.LifoQueue()
        for process in (*others, first):  # the last one is taken first
            self._idle.put(process)
        names, taken = map(set, json.loads(answer[1:]))
        self._reserved = {"messages", "tools", "add_generation_prompt", *variables, *taken}
        self.reads_tools = "tools" in names
        self.kwargs = tuple(sorted(names - self._reserved))

    def render(self, chat: Chat, is_large: bool = False) -> str:
        """Render a conversation. Call it from a thread: it waits for a free process, and for its turn if it is large.

        Raises InvalidArgument if the template fails, takes too much time or memory, or if its text is too long.
        """
        if taken := sorted(self._reserved.intersection(chat.template_kwargs)):
            raise InvalidArgument(f"chat.template_kwargs.{taken[0]}", "is set by the server")
        if not chat.continue_last:
            return self._run(chat, chat.messages, is_large, add_generation_prompt=True)
        *earlier, last = chat.messages
        # A mark that no client can have typed shows where the last message ends.
        mark = f"{secrets.randbits(128)} "
        marked = replace(last, content=last.content + mark)
        rendered = self._run(chat, (*earlier, marked), is_large, add_generation_prompt=False)
        text, found, rest = rendered.rpartition(mark.rstrip())
        if not found:
            raise InvalidArgument("chat.continue_last", "the model's chat template does not end with the last message")
        keeps_spaces = rest.startswith(" ")
        return text if keeps_spaces else text.rstrip()

    def close(self) -> None:
        """End what is being rendered."""
        for process in self._processes:
            process.kill()

    def _run(self, chat: Chat, messages: Iterable[Message], is_large: bool, add_generation_prompt: bool) -> str:
        with turn(is_large):
            given = {
                "messages": [message.for_template() for message in messages],
                "tools": list(chat.tools) or None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                **chat.template_kwargs,
            }
            request = json.dumps(given).encode()
        process = self._idle.get()
        try:
            answer = process.ask(request)
        except _LimitExceeded as error:
            logger.warning("the chat template %s with a conversation; its process was ended", error)
            raise InvalidArgument("chat", f"the model's chat template {error} with this conversation") from error
        except OSError as error:  # no descriptors or memory now
            logger.warning("no process can be started for the chat template: %s", error.strerror)
            message = "the server lacks the resources to render a chat now"
            raise ResourceExhausted(message, retry_after_s=RETRY_START_S, reason="NO_PROCESS") from None
        finally:
            self._idle.put(process)
        if answer.startswith(TOO_LONG):
            raise InvalidArgument("chat", f"becomes more than {self._max_bytes} bytes of text, the limit")
        if answer.startswith(FAILED):
            logger.info("the chat template failed with %s", answer[1:].decode())
            raise InvalidArgument("chat", "the model's chat template does not accept this conversation")
        return answer[1:].decode()


class _LimitExceeded(Exception):
    """The template's process has ended, or was ended for what it took. The message is a verb, as of the template."""


class _Killed(_LimitExceeded):
    """Something else killed the template's process: the system for memory, or an administrator."""


class _TemplateProcess:
    """A process that holds the compiled template. It is started on the next request, again after it has ended."""

    def __init__(self, first_request: bytes) -> None:
        self._first_request = first_request
        self._is_closed = False
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> bytes:
        """Start the process, and return the answer to the first request. Raises _LimitExceeded, OSError."""
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(WALL_S)
        # A child of subprocess.Popen comes from vfork, which runs no fork handlers: gRPC's would fail here.
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", template_process.__name__],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=environment_without_secrets() | {"LC_ALL": "C"},  # other locales take address space
                process_group=0,  # a terminal's Ctrl-C does not reach it
            )
        self._end = weakref.finalize(self, _end, self._process, self._channel)
        if self._is_closed:
            self._process.kill()  # it was not yet there when kill() looked for it
        return self._exchange(self._first_request)

    def ask(self, request: bytes) -> bytes:
        """Raises _LimitExceeded, or OSError if the process has ended and no other can be started."""
        try:
            return self._ask(request)
        except _Killed:
            if self._is_closed:
                raise
            return self._ask(request)  # once more: that is seldom the template's fault

    def kill(self) -> None:
        self._is_closed = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()  # a program that replaces this one in its process would not

    def _ask(self, request: bytes) -> bytes:
        if self._is_closed:
            raise _Killed("has been closed")
        if self._process is None or self._process.poll() is not None:  # after the last request, or before this one
            if self._process is not None:
                self._end()
            self.start()
        return self._exchange(request)

    def _exchange(self, request: bytes) -> bytes:
        try:
            write_frame(self._channel, request)
            return read_frame(self._channel)
        except (OSError, EOFError) as error:
            exit_code: int = self._end() or 0
            was_killed = exit_code == -signal.SIGKILL and not isinstance(error, TimeoutError)
            raise (_Killed if was_killed else _LimitExceeded)(_describe(exit_code, error)) from error


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> int:
    """Return the exit code."""
    channel.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.1)  # the socket's end makes it exit, and an exit code of its own says more than a kill
    process.kill()
    return process.wait()


def _describe(exit_code: int, error: Exception) -> str:
    if isinstance(error, TimeoutError) or exit_code == -signal.SIGPROF:
        return f"takes more than {template_process.CPU_S:g} s"
    if exit_code == template_process.EXIT_MEMORY:
        return f"takes more than {template_process.MEMORY_BYTES >> 20} MB"
    return "crashes"

"""The process that runs a model's chat template, within limits of time and memory.

A template is a program that came with the model. The sandbox limits what it reaches, and this process what it takes:
an endless loop or an endless text ends this process, not the router. It imports jinja2 and the standard library alone,
so that it starts fast and stays small.

Standard input is a socket to the router (chat_template.py). Each message is a frame: four bytes of length, then the
content. The first request is the template and its variables, every later one a conversation. The process exits when the
router closes the socket. The kernel ends it when a request takes more than CPU_S, even if the router has gone.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_S = 1.0  # of one request
MEMORY_BYTES = 512 << 20  # of address space, the interpreter included
EXIT_MEMORY = 3  # exit code when memory has run out

# The first byte of an answer says what follows.
DONE, FAILED, TOO_LONG = b"d", b"f", b"l"

_LENGTH = struct.Struct("<I")


def write_frame(channel: socket.socket, content: bytes) -> None:
    channel.sendall(_LENGTH.pack(len(content)) + content)


def read_frame(channel: socket.socket) -> bytes:
    """Raises EOFError if the other end has closed the socket."""
    (length,) = _LENGTH.unpack(_read(channel, _LENGTH.size))
    return _read(channel, length)


def _read(channel: socket.socket, count: int) -> bytes:
    content = bytearray()
    while len(content) < count:
        if not (piece := channel.recv(min(count - len(content), 1 << 20))):
            raise EOFError
        content += piece
    return bytes(content)


def _serve(channel: socket.socket) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    source, variables, max_bytes = json.loads(read_frame(channel))
    compiled: list[Template] = []
    with _limited_time():
        answer = _compile(source, compiled)
    while True:
        write_frame(channel, answer)
        request = read_frame(channel)
        with _limited_time():
            answer = _render(compiled[0], {**variables, **json.loads(request)}, max_bytes)


@contextmanager
def _limited_time() -> Iterator[None]:
    """End this process if the block takes longer."""
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def _compile(source: str, compiled: list[Template]) -> bytes:
    """Answer with the variables that the template reads, and the names that the dialect has taken."""
    environment = _environment()
    try:
        compiled.append(environment.from_string(source))
        names = meta.find_undeclared_variables(environment.parse(source))
    except MemoryError:
        raise
    except TemplateError as error:
        return FAILED + str(error).encode()
    except Exception as error:  # the compiler runs what is constant in a template
        return FAILED + type(error).__name__.encode()
    return DONE + json.dumps([sorted(names), sorted(environment.globals)]).encode()


def _render(template: Template, variables: dict[str, Any], max_bytes: int) -> bytes:
    pieces, num_bytes = [DONE], 0
    try:
        for piece in template.generate(**variables):
            pieces.append(piece.encode())
            num_bytes += len(pieces[-1])
            if num_bytes > max_bytes:
                return TOO_LONG
    except MemoryError:
        raise
    except Exception as error:  # a template is a program that may raise anything
        return FAILED + type(error).__name__.encode()
    return b"".join(pieces)


def _environment() -> ImmutableSandboxedEnvironment:
    """The template dialect that transformers defines."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks text for training; here it only renders its content."""

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
    """Convert to JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


if __name__ == "__main__":
    try:
        _serve(socket.socket(fileno=0))
    except (EOFError, ConnectionError):  # the router has gone, or has closed this process's template
        os._exit(0)
    except MemoryError:
        os._exit(EXIT_MEMORY)

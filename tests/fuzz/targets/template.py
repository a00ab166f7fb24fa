"""A chat template, a zero byte, and the variables that it is rendered with, in JSON."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jinja2 import Template

from pagoda_server.router.text import template_process
from pagoda_server.router.text.template_process import DONE, FAILED, TOO_LONG

MAX_BYTES = 10_000
LIMIT_S = 0.2
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "tools": None, "add_generation_prompt": True, "bos": "<s>"}


class _Escape(BaseException):
    """The template has reached out of its sandbox."""


class _TookLong(BaseException):
    """The product ends a process that takes so long."""


_FORBIDDEN = ("open", "import", "os", "subprocess", "socket", "ctypes")  # audit events, by the part before a dot
_is_rendering = False


def check(data: bytes) -> bool:
    source, _, given = data.partition(b"\0")
    variables: dict[str, Any] = dict(CHAT)
    try:
        variables |= json.loads(given or b"{}")
        text = source.decode()
    except (ValueError, TypeError, RecursionError):
        return False
    compiled: list[Template] = []
    try:
        with _limited_time():
            answer = template_process._compile(text, compiled)
        if answer.startswith(FAILED):
            answer[1:].decode()
            return False
        names, taken = json.loads(answer[1:])
        assert all(isinstance(name, str) for name in (*names, *taken))
        with _limited_time(), _watched():
            answer = template_process._render(compiled[0], variables, MAX_BYTES)
    except (MemoryError, _TookLong):  # its process ends
        return False
    assert answer[:1] in (DONE, FAILED, TOO_LONG)
    answer[1:].decode()
    return answer.startswith(DONE)


@contextmanager
def _limited_time() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise _TookLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def _watched() -> Iterator[None]:
    global _is_rendering
    _is_rendering = True
    try:
        yield
    finally:
        _is_rendering = False


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if _is_rendering and event.split(".")[0] in _FORBIDDEN:
        raise _Escape(f"a template causes {event}{arguments}"[:500])


sys.addaudithook(_refuse)  # it stays for the life of the process

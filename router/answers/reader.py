"""Read an answer whose text arrives in pieces: what formats are written with.

A format is a generator that reads the answer and yields whenever it needs more of it. Everything follows from the
characters alone, never from how they were cut into pieces.

What may become a call is held back. Once its name and the first character of its arguments are there, it is one, and
the rest streams. Text that turns out to be no call is text again, from its first character on: `NotACall`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Sequence
from typing import TypeAlias, TypeVar

from pagoda_server.router.answers.events import CallPart, Event, Text
from pagoda_server.router.answers.json_object import JsonObject

MAX_SPACE = 64  # characters of white space that belong to a marker beside it, or that a call may have in one place
MAX_HELD = 16 << 10  # characters of arguments that come before their tool's name

_NAME = re.compile(r"[A-Za-z0-9_.-]")
MAX_NAME = 64
_ARGUMENTS = ("arguments", "parameters")
_IGNORED_KEYS = ("id", "type")

Result = TypeVar("Result")
Steps: TypeAlias = Generator[None, None, Result]
Kind: TypeAlias = Callable[[str], Event]


class NotACall(Exception):
    """What was held back since the last `accept` is text."""


class AnswerReader:
    """The answer so far, and the place in it.

    tools       names of the tools that may be called
    call_id     gives the id of the answer's nth call

    events      what was found since it was last taken away
    num_calls   calls whose arguments are complete
    has_ended   no more text will come
    is_thinking whether the reasoning has begun and not ended
    """

    def __init__(self, tools: Collection[str], call_id: Callable[[int], str]) -> None:
        self.events: list[Event] = []
        self.num_calls = 0
        self.has_ended = False
        self.is_thinking = False
        self.tools = tools
        self._call_id = call_id
        self._num_begun = 0
        self._buffer = ""
        self._at = 0
        self._mark = 0  # everything before is told
        self._opening_len = 0  # characters after the mark that are text if no call follows
        self._is_after_marker = False

    def feed(self, text: str) -> None:
        self._buffer += text

    # Text

    def until(self, markers: Sequence[str], kind: Kind = Text) -> Steps[str]:
        """Tell text up to a marker, and stop before it. Returns the marker; empty: the answer has ended.

        White space before a marker belongs to it, as does white space behind the last one.
        """
        while True:
            rest = self._buffer[self._at :]
            places = ((rest.find(marker), marker) for marker in markers)
            found = min((place for place in places if place[0] >= 0), default=None)
            if found is not None:
                at, marker = found
                num_spaces = _space_at_end(rest[:at])
                self._tell(rest[: at - num_spaces], kind)
                self._at += at - num_spaces
                self._drop()
                self._at = num_spaces
                self._opening_len = num_spaces + len(marker)
                return marker
            if self.has_ended:
                if not (self._is_after_marker and rest.isspace() and len(rest) <= MAX_SPACE):
                    self._tell(rest, kind)
                self._at = len(self._buffer)
                return ""
            certain = len(rest) - max((_beginning_at_end(rest, marker) for marker in markers), default=0)
            if markers:
                certain -= _space_at_end(rest[:certain])
            self._tell(rest[:certain], kind)
            self._at += certain
            self._drop()
            yield

    def at_start(self, markers: Sequence[str]) -> Steps[str]:
        """The marker that comes next, after white space; empty: none does. Stops before it."""
        while True:
            rest = self._buffer[self._at :].lstrip()
            num_spaces = len(self._buffer) - self._at - len(rest)
            if num_spaces > MAX_SPACE:
                return ""
            for marker in markers:
                if rest.startswith(marker):
                    self._mark = self._at
                    self._opening_len = num_spaces + len(marker)
                    self._at += num_spaces
                    return marker
            if self.has_ended or not any(marker.startswith(rest) for marker in markers):
                return ""
            yield

    def accept(self) -> None:
        """What was read is a marker or a part of a call, not text."""
        self._is_after_marker = True
        self._drop()

    def reject(self, whole: bool = False) -> None:
        """What was read since `accept` is text. Tell the whole, or its opening marker alone and read the rest again."""
        if not whole:
            self._at = self._mark + self._opening_len
        self._tell(self._buffer[self._mark : self._at], Text)
        self._drop()

    def skip_space(self) -> Steps[None]:
        """Skip white space behind a marker."""
        while (yield from self.peek()).isspace():
            self._at += 1
        self._drop()

    def _tell(self, text: str, kind: Kind) -> None:
        if text:
            self.events.append(kind(text))
            self._is_after_marker = False

    def _drop(self) -> None:
        self._buffer = self._buffer[self._at :]
        self._at = self._mark = self._opening_len = 0

    # Parts of calls. All of these raise NotACall.

    def peek(self) -> Steps[str]:
        """The next character; empty: the answer has ended."""
        while self._at == len(self._buffer) and not self.has_ended:
            yield
        return self._buffer[self._at : self._at + 1]

    def expect(self, text: str) -> Steps[None]:
        for char in text:
            if (yield from self.peek()) != char:
                raise NotACall
            self._at += 1

    def has(self, text: str) -> Steps[bool]:
        """Read this text if it comes next."""
        start = self._at
        try:
            yield from self.expect(text)
        except NotACall:
            self._at = start
            return False
        return True

    def space(self) -> Steps[None]:
        for _ in range(MAX_SPACE + 1):
            if not (yield from self.peek()).isspace():
                return
            self._at += 1
        raise NotACall

    def name(self, most: int = MAX_NAME) -> Steps[str]:
        """A name, of a tool or of something else."""
        start = self._at
        while _NAME.match((yield from self.peek())):
            self._at += 1
            if self._at - start > most:
                raise NotACall
        if self._at == start:
            raise NotACall
        return self._buffer[start : self._at]

    def arguments(self, tool: str) -> Steps[None]:
        """The arguments of a call: a JSON object, told as it comes."""
        if tool not in self.tools or (yield from self.peek()) != "{":
            raise NotACall
        index, id, name = *self._new_call(), tool
        found = JsonObject()
        while not found.is_complete:
            if not (yield from self.peek()):
                raise NotACall
            end = found.feed(self._buffer, self._at)
            if end > self._at:
                self.events.append(CallPart(index, self._buffer[self._at : end], id, name))
                id = name = ""
            self._at = end
            self._drop()
            if found.is_broken:
                raise NotACall
        self.num_calls += 1

    def call_object(self) -> Steps[None]:
        """A call as one JSON object of a name and arguments."""
        tool, held, is_told = "", "", False
        yield from self.expect("{")
        while True:
            yield from self.space()
            key = yield from self._string()
            yield from self.space()
            yield from self.expect(":")
            yield from self.space()
            if key in _IGNORED_KEYS:
                yield from self._string()
            elif key == "name" and not tool:
                tool = yield from self._string()
                if held:
                    self._tell_whole(tool, held)
                    is_told = True
            elif key in _ARGUMENTS and not (held or is_told) and tool:
                yield from self.arguments(tool)
                is_told = True
            elif key in _ARGUMENTS and not (held or is_told):
                held = yield from self._held_object()
            else:
                raise NotACall
            yield from self.space()
            if not (yield from self.has(",")):
                break
        yield from self.expect("}")
        if not is_told:
            raise NotACall
        self.accept()

    def call_list(self) -> Steps[None]:
        """Calls as a JSON list of such objects."""
        yield from self.expect("[")
        while True:
            yield from self.space()
            yield from self.call_object()
            yield from self.space()
            if not (yield from self.has(",")):
                break
        yield from self.expect("]")
        self.accept()

    def _new_call(self) -> tuple[int, str]:
        """What was read begins a call. Returns its index and its id."""
        self.accept()
        index, self._num_begun = self._num_begun, self._num_begun + 1
        return index, self._call_id(index)

    def _tell_whole(self, tool: str, arguments: str) -> None:
        if tool not in self.tools:
            raise NotACall
        index, id = self._new_call()
        self.events.append(CallPart(index, arguments, id, tool))
        self.num_calls += 1

    def _held_object(self) -> Steps[str]:
        start, found = self._at, JsonObject()
        while not found.is_complete:
            if not (yield from self.peek()) or found.is_broken or self._at - start > MAX_HELD:
                raise NotACall
            self._at = found.feed(self._buffer[: start + MAX_HELD + 1], self._at)
        return self._buffer[start : self._at]

    def _string(self) -> Steps[str]:
        """A short JSON string, such as a key or a name."""
        yield from self.expect('"')
        start = self._at
        while (char := (yield from self.peek())) != '"':
            if not char or char in "\\\n" or self._at - start >= MAX_NAME:
                raise NotACall
            self._at += 1
        self._at += 1
        return self._buffer[start : self._at - 1]


def _space_at_end(text: str) -> int:
    """How much white space at the end belongs to a marker that follows."""
    return min(len(text) - len(text.rstrip()), MAX_SPACE)


def _beginning_at_end(text: str, marker: str) -> int:
    """How many characters at the end may begin a marker."""
    if marker[0] not in text[-len(marker) :]:
        return 0
    return next((size for size in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:size])), 0)

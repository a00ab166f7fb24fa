"""Read an answer whose text arrives in pieces: what formats are written with.

A format is a generator that reads the answer and yields whenever it needs more of it. Everything follows from the
characters alone, never from how they were cut into pieces.

What may become a call is held back. Once its name and the first character of its arguments are there, it is one, and
the rest streams. Text that turns out to be no call is text again, from its first character on: `NotACall`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeAlias, TypeVar

from ..text.chat_template import Json
from .events import CallPart, Event, Text
from .json_object import JsonObject
from .json_writer import JsonWriter

MAX_SPACE = 64  # characters of white space that belong to a marker beside it, or that a call may have in one place

_NAME = re.compile(r"[A-Za-z0-9_.-]")
MAX_NAME = 64
MAX_KEY = 256  # characters of an argument's name

Result = TypeVar("Result")
Steps: TypeAlias = Generator[None, None, Result]
Kind: TypeAlias = Callable[[str], Event]


class NotACall(Exception):
    """What was held back since the last `accept` is text."""


class AnswerReader:
    """The answer so far, and the place in it.

    tools       schemas of the arguments of the tools that may be called, by the tools' names
    call_id     gives the id of the answer's nth call
    is_due      the answer has to consist of calls: what is left as text at its end is half a marker, and is dropped

    events      what was found since it was last taken away
    num_calls   calls whose arguments are complete
    has_ended   no more text will come
    is_thinking whether the reasoning has begun and not ended
    """

    def __init__(
        self, tools: Mapping[str, Mapping[str, Json]], call_id: Callable[[int], str], is_due: bool = False
    ) -> None:
        self.events: list[Event] = []
        self.num_calls = 0
        self.has_ended = False
        self.is_thinking = False
        self.tools = tools
        self._call_id = call_id
        self._is_due = is_due
        self._num_begun = 0
        self._buffer = ""
        self._at = 0
        self._mark = 0  # everything before is emitted
        self._opening_len = 0  # characters after the mark that are text if no call follows
        self._is_after_marker = False
        self._is_in_call = False  # a call has begun behind the last opening
        self._has_met_end = False  # the answer ended where more was looked for, since the mark

    def feed(self, text: str) -> None:
        self._buffer += text

    # Text

    def until(self, markers: Sequence[str], kind: Kind = Text) -> Steps[str]:
        """Tell text up to a marker, and stop before it. Returns the marker; empty: the answer has ended.

        White space before a marker belongs to it, as does white space behind the last one.
        """
        while True:
            rest = self._buffer[self._at :]
            if (found := _first(rest, markers)) is not None:
                start, marker = found
                num_spaces = _space_at_end(rest[:start])
                self._emit(rest[: start - num_spaces], kind)
                self._at += start - num_spaces
                self._drop()
                self._at = num_spaces
                self._opening_len = num_spaces + len(marker)
                self._is_in_call = False
                return marker
            if self.has_ended:
                if not (self._is_after_marker and rest.isspace() and len(rest) <= MAX_SPACE):
                    self._emit(rest, kind)
                self._at = len(self._buffer)
                return ""
            certain = len(rest) - _beginning_at_end(rest, markers)
            if markers:
                certain -= _space_at_end(rest[:certain])
            self._emit(rest[:certain], kind)
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
        """What was read since `accept` is text. Tell the whole, or its opening marker alone and read the rest again.

        A rest that breaks off because the answer has ended inside a call is a part of that call, and is dropped.
        """
        if self._is_in_call and self._has_met_end and not whole:
            self._at = len(self._buffer)
            self._drop()
            return
        if not whole:
            self._at = self._mark + self._opening_len
        self._emit(self._buffer[self._mark : self._at], Text)
        self._drop()

    def skip_space(self) -> Steps[None]:
        """Skip white space behind a marker."""
        while (yield from self.peek()).isspace():
            self._at += 1
        self._drop()

    def _emit(self, text: str, kind: Kind) -> None:
        if text and not (self._is_due and self.has_ended and kind is Text):
            self.events.append(kind(text))
            self._is_after_marker = False

    def _drop(self) -> None:
        self._buffer = self._buffer[self._at :]
        self._at = self._mark = self._opening_len = 0
        self._has_met_end = False

    # Parts of calls. All of these raise NotACall.

    def peek(self) -> Steps[str]:
        """The next character; empty: the answer has ended."""
        while self._at == len(self._buffer) and not self.has_ended:
            yield
        self._has_met_end |= self._at == len(self._buffer)
        return self._buffer[self._at : self._at + 1]

    def expect(self, text: str) -> Steps[None]:
        for char in text:
            if (yield from self.peek()) != char:
                raise NotACall
            self._at += 1

    def has(self, text: str) -> Steps[bool]:
        """Read this text if it comes next. Raises NotACall only where the answer ends inside it."""
        start = self._at
        try:
            yield from self.expect(text)
        except NotACall:
            if start < self._at == len(self._buffer):
                raise
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

    def key(self, end: str, never: str = "\n") -> Steps[str]:
        """A short text up to `end`, which is read, too. It has none of the characters of `never`."""
        start = self._at
        while not (yield from self.has(end)):
            char = yield from self.peek()
            if not char or char in never or self._at - start >= MAX_KEY:
                raise NotACall
            self._at += 1
        return self._buffer[start : self._at - len(end)]

    def text(self, ends: Sequence[str], take: Callable[[str], None]) -> Steps[str]:
        """Hand out a text of a call up to the first of these markers, which is read, too. Returns the marker."""
        while True:
            rest = self._buffer[self._at :]
            if (found := _first(rest, ends)) is not None:
                start, marker = found
                self._at += start + len(marker)
                take(rest[:start])
                return marker
            certain = len(rest) - _beginning_at_end(rest, ends)
            self._at += certain
            take(rest[:certain])
            if self.has_ended:
                self._has_met_end = True
                raise NotACall
            yield

    def arguments(self, tool: str) -> Steps[None]:
        """The arguments of a call: a JSON object, emitted as it comes."""
        if (yield from self.peek()) != "{":
            raise NotACall
        yield from self.json(self.begin(tool), JsonObject())
        self.num_calls += 1

    def begin(self, tool: str) -> JsonWriter:
        """What was read begins a call. Returns the writer of its arguments; count the call when they are complete."""
        if tool not in self.tools:
            raise NotACall
        index, id = self._new_call()
        self.events.append(CallPart(index, "", id, tool))

        def write(text: str) -> None:
            self.events.append(CallPart(index, text))
            self.accept()

        return JsonWriter(write)

    def json(self, writer: JsonWriter, found: JsonObject) -> Steps[None]:
        """A value as JSON, emitted as it comes."""
        writer.begin()
        while not found.is_complete:
            if not (yield from self.peek()):
                raise NotACall
            text = self._buffer[self._at : (end := found.feed(self._buffer, self._at))]
            self._at = end
            writer.part(text)
            if found.is_broken:
                raise NotACall
        writer.end()

    def _new_call(self) -> tuple[int, str]:
        """What was read begins a call. Returns its index and its id."""
        self.accept()
        self._is_in_call = True
        index, self._num_begun = self._num_begun, self._num_begun + 1
        return index, self._call_id(index)


def _space_at_end(text: str) -> int:
    """How much white space at the end belongs to a marker that follows."""
    return min(len(text) - len(text.rstrip()), MAX_SPACE)


def _first(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """The first marker in a text, and its place."""
    places = ((text.find(marker), marker) for marker in markers)
    return min((place for place in places if place[0] >= 0), default=None)


def _beginning_at_end(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end may begin a marker."""
    return max((_beginning(text, marker) for marker in markers), default=0)


def _beginning(text: str, marker: str) -> int:
    if marker[0] not in text[-len(marker) :]:
        return 0
    return next((size for size in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:size])), 0)

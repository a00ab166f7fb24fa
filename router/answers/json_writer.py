"""Write JSON from keys and values that come one after the other, and the text of a value as its schema means it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Set

MAX_HELD = 16 << 10  # characters of a value that may be no string; a longer one is a string

_ENDS = {"{": "}", "[": "]"}
_WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's
_STARTS = {"n": "null", "t": "boolean", "f": "boolean", "{": "object", "[": "array", '"': "string"}
_SURROGATE = re.compile("[\\ud800-\\udfff]")


class JsonWriter:
    """Tells each next part of a JSON text as soon as it is certain.

    write  takes the parts
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._ends: list[str] = []  # of the objects and lists around this place, innermost last
        self._separator = ""

    def open(self, bracket: str) -> None:
        """An object or a list begins."""
        self.begin()
        self._write(bracket)
        self._ends.append(_ENDS[bracket])

    def close(self) -> None:
        self._write(self._ends.pop())
        self._separator = ", "

    def key(self, name: str) -> None:
        self.begin()
        self._write(f"{quoted(name)}: ")

    def value(self, text: str) -> None:
        """A whole value, which is JSON."""
        self.begin()
        self._write(text)
        self.end()

    def begin(self) -> None:
        """A value begins, whose JSON `part` takes in pieces."""
        if self._separator:
            self._write(self._separator)
        self._separator = ""

    def part(self, text: str) -> None:
        if text:
            self._write(text)

    def end(self) -> None:
        self._separator = ", "


class TypedText:
    """A value whose text comes in pieces: a string is written as it comes, anything else once it is whole.

    types  those that the schema allows; none: it does not say. Then the text is JSON if it parses.
    """

    def __init__(self, writer: JsonWriter, types: Set[str]) -> None:
        self._writer = writer
        self._types = types
        self._held = ""
        self._is_string = False
        if types == {"string"}:
            self._begin_string()

    def take(self, text: str) -> None:
        if self._is_string:
            self._writer.part(_escaped(text))
            return
        self._held += text
        start = self._held.lstrip()[:1].lower()
        is_too_long = len(self._held) > MAX_HELD
        if is_too_long or (start and "string" in self._types and _type_at(start) not in self._types - {"string"}):
            self._begin_string()

    def end(self) -> None:
        if self._is_string:
            self._writer.part('"')
            self._writer.end()
        else:
            self._writer.value(as_json(self._held, self._types))

    def _begin_string(self) -> None:
        self._is_string = True
        self._writer.begin()
        self._writer.part('"' + _escaped(self._held))


def as_json(text: str, types: Set[str] = frozenset()) -> str:
    """A value's text as JSON: itself where it parses and the types do not prefer a string, else a string.

    Python's words for true, false and null count as JSON where the types have such a value.
    """
    found = text.strip()
    if _type_at(found[:1].lower()) in types:
        found = _WORDS.get(found, found)
    if not is_json(found) or ("string" in types and _type_at(found[:1]) not in types - {"string"}):
        return quoted(text)
    return found


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse, parse_int=len)  # not int: Python bounds its digits
    except (ValueError, RecursionError):
        return False
    return True


def quoted(text: str) -> str:
    """A JSON string, which UTF-8 can express: a lone surrogate stays an escape."""
    return json.dumps(text, ensure_ascii=_SURROGATE.search(text) is not None)


def _escaped(text: str) -> str:
    return quoted(text)[1:-1]


def _type_at(start: str) -> str:
    """The type of a value by its first character."""
    return _STARTS.get(start, "number" if start and start in "-0123456789" else "")


def _refuse(constant: str) -> None:
    raise ValueError(constant)

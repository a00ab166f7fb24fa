"""Calls whose arguments are literals of a language that is not JSON."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from .json_calls import ToolFormat
from .json_writer import JsonWriter, TypedText
from .reader import AnswerReader, NotACall, Steps
from .schema import Schema

_MAX_DEPTH = 64


class Literals(ToolFormat):
    """A language of literals that nest. Subclasses say how strings, keys and words are written in it."""

    def _value(self, reader: AnswerReader, writer: JsonWriter, schema: Schema, depth: int = 0) -> Steps[None]:
        if depth > _MAX_DEPTH:
            raise NotACall
        yield from reader.space()
        if (yield from self._string(reader, writer, schema)):
            return
        if (yield from reader.has("{")):
            writer.open("{")

            def member() -> Steps[None]:
                key = yield from self._key(reader)
                writer.key(key)
                yield from self._value(reader, writer, schema.member(key), depth + 1)

            yield from self._members(reader, "}", member)
            writer.close()
        elif (yield from reader.has("[")):
            writer.open("[")
            yield from self._members(reader, "]", lambda: self._value(reader, writer, schema.item, depth + 1))
            writer.close()
        else:
            writer.value((yield from self._word(reader, schema)))

    def _members(self, reader: AnswerReader, close: str, member: Callable[[], Steps[None]]) -> Steps[None]:
        """Members with commas between, up to the bracket that closes them."""
        yield from reader.space()
        while not (yield from reader.has(close)):
            yield from member()
            yield from reader.space()
            if not (yield from reader.has(",")):
                yield from reader.expect(close)
                return
            yield from reader.space()

    @abstractmethod
    def _string(self, reader: AnswerReader, writer: JsonWriter, schema: Schema) -> Steps[bool]:
        """Read a string, if one comes next."""

    @abstractmethod
    def _key(self, reader: AnswerReader) -> Steps[str]:
        """The name of an object's member, and the sign behind it."""

    @abstractmethod
    def _word(self, reader: AnswerReader, schema: Schema) -> Steps[str]:
        """A value without quotes or brackets, as JSON."""


def quoted_value(writer: JsonWriter, schema: Schema) -> TypedText:
    """A value that is written as a string: it is one, unless its schema has other types alone."""
    types = schema.types
    return TypedText(writer, types if types and "string" not in types else frozenset({"string"}))

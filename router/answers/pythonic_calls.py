"""Calls as Python writes them."""

from __future__ import annotations

from collections.abc import Callable

from .json_writer import JsonWriter, is_json, quoted
from .lark import Calls, Lark, Rule
from .literals import Literals, quoted_value
from .reader import MAX_KEY, AnswerReader, NotACall, Steps
from .schema import Schema

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", "0": "\0"}
_HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}


class Pythonic(Literals):
    """[name(key=value), name()]: Llama 3.2 and Llama 4, where their template asks for Python.

    The list is the whole answer. Llama 4 puts markers around it at times.
    """

    markers = ("<|python_start|>", "<|python_end|>")
    openings = ("<|python_start|>",)
    starts = ("[",)

    def calls(self, reader: AnswerReader, opening: str) -> Steps[None]:
        begin, end = self.markers
        yield from reader.has(begin)
        yield from reader.space()
        yield from reader.expect("[")
        yield from reader.space()
        if (yield from reader.peek()) == "]":
            raise NotACall
        yield from self._members(reader, "]", lambda: self._call(reader))
        reader.accept()
        yield from reader.space()
        yield from reader.has(end)
        reader.accept()

    def _call(self, reader: AnswerReader) -> Steps[None]:
        tool = yield from reader.name()
        yield from reader.expect("(")
        name = yield from self._argument(reader)
        writer, schema = reader.begin(tool), Schema.of(reader.tools[tool])
        writer.open("{")
        while name:
            writer.key(name)
            yield from self._value(reader, writer, schema.member(name))
            yield from reader.space()
            if not (yield from reader.has(",")) and (yield from reader.peek()) != ")":
                raise NotACall
            name = yield from self._argument(reader)
        writer.close()
        reader.num_calls += 1

    def _argument(self, reader: AnswerReader) -> Steps[str]:
        """The name of the next argument; empty: there is none, and the call is closed."""
        yield from reader.space()
        if (yield from reader.has(")")):
            return ""
        name = (yield from reader.key("=", "\n,()[]{}\"'")).strip()
        if not name:
            raise NotACall
        return name

    def _string(self, reader: AnswerReader, writer: JsonWriter, schema: Schema) -> Steps[bool]:
        if (yield from reader.peek()) not in ("'", '"'):
            return False
        value = quoted_value(writer, schema)
        yield from self._text(reader, value.take)
        value.end()
        return True

    def _key(self, reader: AnswerReader) -> Steps[str]:
        key = ""

        def hold(text: str) -> None:
            nonlocal key
            key += text
            if len(key) > MAX_KEY:
                raise NotACall

        if (yield from reader.peek()) not in ("'", '"'):
            raise NotACall
        yield from self._text(reader, hold)
        yield from reader.space()
        yield from reader.expect(":")
        return key

    def _text(self, reader: AnswerReader, take: Callable[[str], None]) -> Steps[None]:
        """Hand out what stands between quotes."""
        quote = yield from reader.peek()
        yield from reader.expect(quote)
        end = 3 * quote if (yield from reader.has(2 * quote)) else quote
        while (yield from reader.text((end, "\\"), take)) != end:
            take((yield from self._escaped(reader)))

    def _escaped(self, reader: AnswerReader) -> Steps[str]:
        """The character that an escape behind its backslash stands for."""
        char = yield from reader.peek()
        if not char:
            raise NotACall
        yield from reader.expect(char)
        if char not in _HEX_LENGTHS:
            return _ESCAPES.get(char, char if char in "\\'\"" else "\\" + char)
        digits = ""
        for _ in range(_HEX_LENGTHS[char]):
            digit = yield from reader.peek()
            if not digit or digit not in "0123456789abcdefABCDEF":
                raise NotACall
            digits += digit
            yield from reader.expect(digit)
        if int(digits, 16) > 0x10FFFF:
            raise NotACall
        return chr(int(digits, 16))

    def _word(self, reader: AnswerReader, schema: Schema) -> Steps[str]:
        word = ""
        while (char := (yield from reader.peek())) and (char.isalnum() or char in "_+-."):
            if len(word) >= MAX_KEY:
                raise NotACall
            word += char
            yield from reader.expect(char)
        word = _WORDS.get(word, word)
        if not word or not is_json(word):
            raise NotACall
        return quoted(word) if schema.types == {"string"} else word

    def grammar(self, lark: Lark, calls: Calls) -> Rule:
        one = lark.one_of(
            lark.sequence(
                f"{tool.name}(", lark.arguments_of(Schema.of(tool.parameters), self._argument_rule(lark), ", "), ")"
            )
            for tool in calls.tools
        )
        return lark.sequence("[", lark.repeated(one, ", ") if calls.may_repeat else one, "]")

    def _argument_rule(self, lark: Lark) -> Callable[[Rule | str, Schema], Rule]:
        """Python reads JSON but for its words, which stand in their own spelling where an argument is one."""
        true_or_false = lark.one_of((lark.sequence("True"), lark.sequence("False")))

        def argument(key: Rule | str, schema: Schema) -> Rule:
            is_boolean = schema.types == {"boolean"} and schema.options is None
            return lark.sequence(key, "=", true_or_false if is_boolean else lark.json(schema.alone))

        return argument

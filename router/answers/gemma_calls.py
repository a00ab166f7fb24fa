"""Calls in the language that FunctionGemma and Gemma 4 have of their own."""

from __future__ import annotations

from ..text.chat_template import Json
from .json_writer import JsonWriter, as_json
from .lark import Calls, Lark, Rule
from .literals import Literals, quoted_value
from .reader import MAX_KEY, AnswerReader, NotACall, Steps
from .schema import Schema

_NUMBER_KEYS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


class GemmaCalls(Literals):
    """call:name{key:value}, strings between quotes that are a token: FunctionGemma, Gemma 4.

    begin, end  the markers around a call
    quote       stands on both sides of a string
    """

    def __init__(self, begin: str, end: str, quote: str) -> None:
        self.markers = (begin, end, quote)
        self.openings = (begin,)

    def calls(self, reader: AnswerReader, opening: str) -> Steps[None]:
        begin, end, _ = self.markers
        yield from reader.expect(begin)
        yield from reader.space()
        yield from reader.expect("call:")
        tool = yield from reader.name()
        if (yield from reader.peek()) != "{":
            raise NotACall
        yield from self._value(reader, reader.begin(tool), Schema.of(reader.tools[tool]))
        reader.num_calls += 1
        yield from reader.space()
        yield from reader.expect(end)
        reader.accept()

    def _string(self, reader: AnswerReader, writer: JsonWriter, schema: Schema) -> Steps[bool]:
        quote = self.markers[2]
        if not (yield from reader.has(quote)):
            return False
        value = quoted_value(writer, schema)
        yield from reader.text((quote,), value.take)
        value.end()
        return True

    def _key(self, reader: AnswerReader) -> Steps[str]:
        if not (yield from reader.has(self.markers[2])):
            return (yield from reader.key(":", "\n,{}[]")).strip()
        key = yield from reader.key(self.markers[2])
        yield from reader.space()
        yield from reader.expect(":")
        return key

    def _word(self, reader: AnswerReader, schema: Schema) -> Steps[str]:
        word = ""
        while (char := (yield from reader.peek())) not in (",", "}", "]"):
            if not char or char in "{[<\n" or len(word) >= MAX_KEY:
                raise NotACall
            word += char
            yield from reader.expect(char)
        return as_json(word.strip(), schema.types)

    def grammar(self, lark: Lark, calls: Calls) -> Rule:
        begin, end, _ = self.markers
        one = lark.one_of(
            lark.sequence(f"{begin}call:{tool.name}", self._object_rule(lark, Schema.of(tool.parameters)), end)
            for tool in calls.tools
        )
        return lark.repeated(one) if calls.may_repeat else one

    def _object_rule(self, lark: Lark, schema: Schema) -> Rule:
        def member(key: Rule | str, each: Schema) -> Rule:
            if isinstance(key, str) and set(key) & set(" :,{}[]<"):
                key = f"{self.markers[2]}{key}{self.markers[2]}"
            return lark.sequence(key, ":", self._value_rule(lark, each))

        return lark.sequence("{", lark.arguments_of(schema, member, ","), "}")

    def _value_rule(self, lark: Lark, schema: Schema) -> Rule:
        def built() -> Rule:
            if (options := schema.options) is not None:
                return lark.one_of(lark.sequence(self._written(option)) for option in options)
            if alternatives := schema.alternatives:
                return lark.one_of(self._value_rule(lark, each) for each in alternatives)
            types = schema.types or {"string", "number", "boolean", "null", "array", "object"}
            return lark.one_of(self._rule_of_type(lark, schema, type) for type in sorted(types))

        return lark.named((id(schema.value), self.markers), built)

    def _rule_of_type(self, lark: Lark, schema: Schema, type: str) -> Rule:
        quote = self.markers[2]
        match type:
            case "string":
                return lark.sequence(quote, lark.text(quote, schema.patterns))
            case "array":
                least, most = schema.value.get("minItems"), schema.value.get("maxItems")
                items = lark.repeated(
                    self._value_rule(lark, schema.item),
                    ",",
                    least if isinstance(least, int) else 0,
                    most if isinstance(most, int) else None,
                )
                return lark.sequence("[", items, "]")
            case "object":
                return self._object_rule(lark, schema)
            case "number":
                bounds = {key: schema.value[key] for key in _NUMBER_KEYS if key in schema.value}
                given = schema.value.get("type")
                is_integer = given == "integer" or (isinstance(given, list) and "number" not in given)
                return lark.json({"type": "integer" if is_integer else "number", **bounds})
            case _:
                return lark.json({"type": type})

    def _written(self, value: Json) -> str:
        """A literal of this language."""
        quote = self.markers[2]
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, list):
            return f"[{','.join(map(self._written, value))}]"
        if isinstance(value, dict):
            return f"{{{','.join(f'{quote}{key}{quote}:{self._written(each)}' for key, each in value.items())}}}"
        return as_json(str(value), {"boolean", "null", "number"})

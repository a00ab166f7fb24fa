"""Calls whose arguments stand between tags, each as it is: a string without quotes, anything else as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from .json_calls import ToolFormat
from .json_object import JsonObject
from .json_writer import JsonWriter, TypedText
from .lark import Calls, Lark, Rule
from .reader import AnswerReader, NotACall, Steps
from .schema import Schema


class QwenCoder(ToolFormat):
    """<tool_call><function=name><parameter=key>value</parameter></function></tool_call>: Qwen 3 Coder, Qwen 3.5.

    Models leave out the outer tag at times. A line break on each side of a value is not a part of it.
    """

    markers = ("<tool_call>", "</tool_call>")
    openings = ("<tool_call>", "<function=")

    def calls(self, reader: AnswerReader, opening: str) -> Steps[None]:
        yield from reader.has("<tool_call>")
        yield from reader.space()
        yield from reader.expect("<function=")
        tool = yield from reader.name()
        yield from reader.expect(">")
        writer = yield from _begun(reader, tool)
        schema = Schema.of(reader.tools[tool])
        while not (yield from reader.has("</function>")):
            yield from reader.expect("<parameter=")
            key = yield from reader.key(">")
            writer.key(key)
            yield from reader.has("\n")
            yield from _value(reader, writer, schema.member(key), ("\n</parameter>", "</parameter>"))
            yield from reader.space()
        _end(reader, writer)
        yield from reader.space()
        yield from reader.has("</tool_call>")
        reader.accept()

    def grammar(self, lark: Lark, calls: Calls) -> Rule:
        def parameter(key: Rule | str, schema: Schema) -> Rule:
            return lark.sequence("<parameter=", key, ">\n", _value_rule(lark, schema, "</parameter>", "\n"), "\n")

        one = lark.one_of(
            lark.sequence(
                f"<tool_call>\n<function={tool.name}>\n",
                lark.arguments_of(Schema.of(tool.parameters), parameter),
                "</function>\n</tool_call>",
            )
            for tool in calls.tools
        )
        return lark.repeated(one, "\n") if calls.may_repeat else one


class Glm(ToolFormat):
    """<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>: GLM 4.5 and later.

    Up to GLM 4.6, a line break follows the name and each of the inner tags that close.
    """

    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    openings = ("<tool_call>",)

    def calls(self, reader: AnswerReader, opening: str) -> Steps[None]:
        yield from reader.expect("<tool_call>")
        yield from reader.space()
        tool = yield from reader.name()
        writer = yield from _begun(reader, tool)
        schema = Schema.of(reader.tools[tool])
        while not (yield from reader.has("</tool_call>")):
            yield from reader.expect("<arg_key>")
            key = (yield from reader.key("</arg_key>")).strip()
            writer.key(key)
            yield from reader.space()
            yield from reader.expect("<arg_value>")
            yield from _value(reader, writer, schema.member(key), ("</arg_value>",))
            yield from reader.space()
        _end(reader, writer)

    def grammar(self, lark: Lark, calls: Calls) -> Rule:
        line = lark.regex("\\n?")

        def argument(key: Rule | str, schema: Schema) -> Rule:
            value = _value_rule(lark, schema, "</arg_value>")
            return lark.sequence("<arg_key>", key, "</arg_key>", line, "<arg_value>", value, line)

        one = lark.one_of(
            lark.sequence(
                f"<tool_call>{tool.name}",
                line,
                lark.arguments_of(Schema.of(tool.parameters), argument),
                "</tool_call>",
            )
            for tool in calls.tools
        )
        return lark.repeated(one, "\n") if calls.may_repeat else one


def _begun(reader: AnswerReader, tool: str) -> Steps[JsonWriter]:
    """A call of this tool, if a tag follows its name."""
    yield from reader.space()
    if (yield from reader.peek()) != "<":
        raise NotACall
    writer = reader.begin(tool)
    writer.open("{")
    return writer


def _end(reader: AnswerReader, writer: JsonWriter) -> None:
    writer.close()
    reader.num_calls += 1


def _value(reader: AnswerReader, writer: JsonWriter, schema: Schema, ends: Sequence[str]) -> Steps[None]:
    """A value up to one of its closing markers, which may stand in the strings of an object or a list."""
    types = schema.types
    if types and "string" not in types:
        yield from reader.space()
    if "string" not in types and (yield from reader.peek()) in ("{", "["):
        yield from reader.json(writer, JsonObject(may_be_list=True))
        yield from reader.space()
        yield from reader.expect(ends[-1])
        reader.accept()
        return
    value = TypedText(writer, types)
    yield from reader.text(ends, value.take)
    value.end()


def _value_rule(lark: Lark, schema: Schema, end: str, before: str = "") -> Rule:
    """What a value may be, with its closing marker and a line break that may belong before it."""

    def built() -> Rule:
        if (options := schema.options) is not None:
            return lark.one_of(
                lark.sequence(option if isinstance(option, str) else lark.json({"const": option}), before + end)
                for option in options
            )
        if alternatives := schema.alternatives:
            return lark.one_of(_value_rule(lark, each, end, before) for each in alternatives)
        types = schema.types
        if "string" in types:
            return lark.text(end, schema.patterns, before)
        if types:
            return lark.sequence(lark.json(schema.alone), before + end)
        containers = lark.sequence(lark.json({"type": ["object", "array"]}), before + end)
        return lark.one_of((containers, lark.text(end, [r"(?s:[^\s{\[].*)"], before)))

    return lark.named((id(schema.value), end), built)

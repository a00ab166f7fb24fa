"""Formats whose arguments are not JSON: their values become JSON of the types that the tool's schema gives them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda_server.router.answers.events import CallPart, Event, Text
from pagoda_server.router.answers.formats import Marked
from pagoda_server.router.answers.json_writer import MAX_HELD, as_json
from pagoda_server.router.answers.parser import AnswerParser
from pagoda_server.router.answers.schema import Schema
from tests.router.answers.reading import call, cut, events_of

STRING, INTEGER, BOOLEAN = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
QUOTES = {"functiongemma": "<escape>", "gemma4": '<|"|>'}
FORMATS = {name: Marked(name, "") for name in ("qwen3-coder", "glm", "pythonic", *QUOTES)}
TAGGED = ("qwen3-coder", "glm")


def tools(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"f": {"type": "object", "properties": properties}}


def written(name: str, arguments: Sequence[tuple[str, str]]) -> str:
    """A call of f in a format, with arguments that are in the format already."""
    if name == "qwen3-coder":
        inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
        return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"
    if name == "glm":
        inner = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments)
        return f"<tool_call>f\n{inner}</tool_call>"
    if name == "pythonic":
        return f"[f({', '.join(f'{key}={value}' for key, value in arguments)})]"
    begin, end, _ = FORMATS[name].markers
    return f"{begin}call:f{{{','.join(f'{key}:{value}' for key, value in arguments)}}}{end}"


def literal(name: str, value: Any, is_inner: bool = False) -> str:
    """A value as a model of this format writes it."""
    if name == "pythonic":
        return repr(value)
    if name in TAGGED:
        return value if isinstance(value, str) else json.dumps(value)
    quote = QUOTES[name]
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case list():
            return f"[{','.join(literal(name, each) for each in value)}]"
        case dict():
            return f"{{{','.join(f'{key}:{literal(name, each)}' for key, each in value.items())}}}"
    return json.dumps(value)


def arguments_of(events: Sequence[Event]) -> str:
    (found,) = events
    assert isinstance(found, CallPart)
    assert found.name == "f"
    return found.arguments


def parse(name: str, answer: str, properties: Mapping[str, Any], *, is_due: bool = False) -> list[Event]:
    whole = events_of(FORMATS[name], [answer], tools=tools(properties), is_due=is_due)
    assert events_of(FORMATS[name], answer, tools=tools(properties), is_due=is_due) == whole
    return whole


OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        (STRING, "5", '"5"'),
        (STRING, "null", '"null"'),
        (STRING, ' "a"\n\n b ', '" \\"a\\"\\n\\n b "'),
        (STRING, "</para\\\t\x01", '"</para\\\\\\t\\u0001"'),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"const": "x"}, "x", '"x"'),
        (INTEGER, "5", "5"),
        (INTEGER, " 5\n", "5"),
        (INTEGER, "1" * 5000, "1" * 5000),
        (INTEGER, "five", '"five"'),
        ({"type": "number"}, "1e400", "1e400"),
        ({"type": "number"}, "NaN", '"NaN"'),
        (BOOLEAN, "True", "true"),
        (BOOLEAN, "false", "false"),
        ({"type": "array"}, "[1,\n 2]", "[1,\n 2]"),
        ({"type": "object"}, '{"a": "</parameter></arg_value>"}', '{"a": "</parameter></arg_value>"}'),
        (OPTIONAL, "null", "null"),
        (OPTIONAL, "None", "null"),
        (OPTIONAL, "none of it", '"none of it"'),
        (OPTIONAL, "5", '"5"'),
        ({"type": ["string", "integer"]}, "5", "5"),
        ({"type": ["string", "integer"]}, "5a", '"5a"'),
        ({"type": ["string", "object"]}, '{"a": 1}', '{"a": 1}'),
        ({"type": ["string", "object"]}, "{a", '"{a"'),
        ({}, "5", "5"),
        ({}, "text", '"text"'),
        ({}, "None", '"None"'),
        ({}, "", '""'),
        ({"$ref": "#/nowhere"}, "x", '"x"'),
        ({"$ref": "#/properties/b"}, "5", '"5"'),
        ({"allOf": [{"$ref": "#/properties/b"}]}, "5", '"5"'),
    ],
)
@pytest.mark.parametrize("name", TAGGED)
def test_a_text_between_tags_has_the_type_of_its_schema(name: str, schema: Any, text: str, expected: str) -> None:
    answer = written(name, [("a", text)])
    assert arguments_of(parse(name, answer, {"a": schema, "b": STRING})) == f'{{"a": {expected}}}'


@pytest.mark.parametrize("name", QUOTES)
def test_gemma_may_leave_out_quotes_or_set_too_many(name: str) -> None:
    properties = {"a": INTEGER, "b": STRING, "c": OPTIONAL, "d": {}}
    q = QUOTES[name]
    for text in (f"a:{q}5{q},b:5,c:null,d:x y", f"a:5, b:{q}5{q},c:None, {q}d{q}: {q}x y{q},"):
        answer = written(name, [("_", "_")]).replace("_:_", text)
        assert arguments_of(parse(name, answer, properties)) == '{"a": 5, "b": "5", "c": null, "d": "x y"}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a='1', b=2", '{"a": 1, "b": "2"}'),
        ("a=-1.5e3,\n  b='it\\'s \"so\"',)", None),
        ("a=None, b='it\\'s \"so\"',\n", '{"a": null, "b": "it\'s \\"so\\""}'),
        ("b='''a\n'b''''", None),
        ("b='''a\n'b'''", '{"b": "a\\n\'b"}'),
        ("b=''", '{"b": ""}'),
        (r"b='\ud83d\ude00\x41\t\q\ud800'", '{"b": "\\ud83d\\ude00A\\t\\\\q\\ud800"}'),
        ("c={'x': [True, {}], \"y\": (1)}", None),
        ("c={'x': [True, {}], \"y\": []}", '{"c": {"x": [true, {}], "y": []}}'),
    ],
)
def test_literals_of_python(text: str, expected: str | None) -> None:
    events = parse("pythonic", f"[f({text})]", {"a": INTEGER, "b": STRING})
    if expected is None:
        assert isinstance(events[-1], Text), "the rest behind what cannot be read"
    else:
        assert arguments_of(events) == expected
        json.loads(expected)


def test_llama_4_may_put_markers_around_a_list() -> None:
    answer = "<|python_start|>[f(), f(a=1)]<|python_end|>"
    assert parse("pythonic", answer, {}) == [call(0, "f", "{}"), call(1, "f", '{"a": 1}')]


@pytest.mark.parametrize(
    "answer",
    ["[]", "[1, 2]", "[f]", "[g()]", "[f(1)]", "[f(x)]", "[f(x, y)] is how it is called", "[", "f()", "['f()']"],
)
def test_a_list_that_holds_no_calls_is_text(answer: str) -> None:
    assert parse("pythonic", answer, {}) == [Text(answer)]


def test_qwen_3_coder_may_leave_out_the_outer_tag_and_line_breaks() -> None:
    answer = "I call.\n<function=f><parameter=a>x</parameter></function>\n</tool_call>"
    assert parse("qwen3-coder", answer, {"a": STRING}) == [Text("I call."), call(0, "f", '{"a": "x"}')]


@pytest.mark.parametrize("name", FORMATS)
def test_a_string_streams_and_what_may_close_it_is_held(name: str) -> None:
    answer = written(name, [("a", literal(name, "some text"))])
    begin = answer.index("some") + len("some")
    parser = AnswerParser(FORMATS[name], tools({"a": STRING}), "", str)
    assert parser.push(answer[:begin]) == [CallPart(0, '{"a": "some', "0", "f")]
    assert parser.push(" ") == [CallPart(0, " ")]
    assert parser.push("text") == [CallPart(0, "text")]
    assert parser.push(answer[begin + 5 :])[-1] == CallPart(0, '"}')
    assert parser.num_calls == 1


@pytest.mark.parametrize("name", TAGGED)
def test_an_object_between_tags_streams(name: str) -> None:
    parser = AnswerParser(FORMATS[name], tools({"a": {"type": "object"}}), "", str)
    answer = written(name, [("a", '{"b": 1}')])
    at = answer.index('{"b"') + 5
    assert parser.push(answer[:at]) == [CallPart(0, '{"a": {"b":', "0", "f")]


@pytest.mark.parametrize("name", TAGGED)
def test_little_of_a_text_of_unknown_type_is_held(name: str) -> None:
    parser = AnswerParser(FORMATS[name], tools({}), "", str)
    begin = written(name, [("a", "#")]).partition("#")[0]
    told = sum(len(part.arguments) for part in parser.push(begin + "x" * (MAX_HELD + 2)) if isinstance(part, CallPart))
    assert told > MAX_HELD


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
INNER = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


def schema_of(value: Any) -> dict[str, Any]:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return {"type": names.get(type(value), "null")}


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    arguments=st.dictionaries(st.sampled_from(["a", "b", "key_3"]), INNER, max_size=3),
    places=st.lists(st.integers(0, 400), max_size=30),
)
def test_any_arguments_become_the_same_json(name: str, arguments: dict[str, Any], places: list[int]) -> None:
    answer = written(name, [(key, literal(name, value)) for key, value in arguments.items()])
    known = tools({key: schema_of(value) for key, value in arguments.items()})
    whole = events_of(FORMATS[name], [answer], tools=known)
    assert json.loads(arguments_of(whole)) == arguments
    assert events_of(FORMATS[name], cut(answer, places), tools=known) == whole


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_cut_anywhere_ends_with_a_part_of_its_call(name: str) -> None:
    answer = written(name, [("a", literal(name, "x</b")), ("b", literal(name, [1, {"c": True}]))])
    properties = {"a": STRING, "b": {"type": "array"}}
    complete = arguments_of(parse(name, answer, properties))
    for end in range(len(answer)):
        due = parse(name, answer[:end], properties, is_due=True)
        assert len(due) <= 1, "never text"
        if due:
            assert complete.startswith(arguments_of(due).rstrip("}") or "{")
        free = parse(name, answer[:end], properties)
        assert [event for event in free if isinstance(event, CallPart)] or free in ([], [Text(answer[:end])])
        assert len(free) <= 1, "half a call is no text once it has begun"


@pytest.mark.parametrize("name", FORMATS)
def test_nesting_is_bounded(name: str) -> None:
    deep = "[" * sys.getrecursionlimit()
    assert parse(name, written(name, [("a", deep)]), {"a": {"type": "array"}})[0]


def test_json_keeps_what_utf_8_cannot_express_as_an_escape() -> None:
    assert as_json("\ud800é") == '"\\ud800\\u00e9"'


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, {"number"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": ["a", 1, True, None, [], {}]}, {"string", "number", "boolean", "null", "array", "object"}),
        ({"anyOf": [{"type": "string"}, {}]}, set()),
        ({"anyOf": [{"$ref": "#"}]}, set()),
        ({"$ref": "#"}, set()),
        ({"oneOf": [{"const": 1}, {"type": "null"}]}, {"number", "null"}),
        ({"type": 5, "enum": "x", "properties": [], "items": 3}, set()),
    ],
)
def test_a_schema_tells_its_types(schema: Any, types: set[str]) -> None:
    place = Schema.of(schema)
    assert place.types == types
    assert place.member("a").types == place.item.types == set()


@pytest.mark.parametrize(
    ("pattern", "whole"),
    [
        ("a", "(?s:.*)(?:a)(?s:.*)"),
        ("^a$", "(?:a)"),
        (r"^a\$", r"(?:a\$)(?s:.*)"),
        ("^(a|b)$", "(?:(a|b))"),
        ("^[|]$", "(?:[|])"),
        ("a|b", "(?s:.*)(?:a|b)(?s:.*)"),
        ("^a|b$", None),
    ],
)
def test_a_pattern_is_made_one_for_the_whole_text(pattern: str, whole: str | None) -> None:
    assert Schema.of({"pattern": pattern}).patterns == ([whole] if whole else [])

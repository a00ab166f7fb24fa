"""Grammars of answers that must call: llguidance takes them, and what matches them parses into the calls due."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from pagoda.v1.inference_pb2 import Guided
from pagoda_server.router.answers.events import CallPart, Event, Reasoning
from pagoda_server.router.answers.formats import TOOL_FORMATS, AnswerFormat, Harmony, Marked
from pagoda_server.router.answers.lark import Calls, Lark, Rule, Tool
from pagoda_server.router.request.parsing import rule_of
from tests.engine.random_schemas import random_schema
from tests.router.answers.reading import call, events_of
from tests.router.answers.test_parsing import HEADER

INTEGER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS = (Tool("add", INTEGER), Tool("get_weather.v2", {"type": "object", "properties": {}}))
FORMATS: dict[str, AnswerFormat] = {
    **{name: Marked(name, "think") for name in TOOL_FORMATS}, "harmony": Harmony(True, True)
}  # fmt: skip
SPECIAL_FIRST = 300  # ids of markers where they are special tokens; below, a byte's token is the byte
END = 299
CLOSING = ("\n</parameter>", "</arg_value>", "<escape>", '<|"|>')  # what no dice would spell


class Bytes:
    """A vocabulary of bytes and special tokens, in the form that llguidance takes."""

    eos_token_id, bos_token_id = END, None

    def __init__(self, special: Sequence[str]) -> None:
        self.special = {text: SPECIAL_FIRST + at for at, text in enumerate(special)}
        self.tokens = [bytes([byte]) for byte in range(256)] + [b""] * 43 + [b"<end>"]
        self.tokens += [text.encode() for text in special]
        self.special_token_ids = [END, *self.special.values()]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())

    def ids(self, text: str) -> list[int]:
        ids = []
        while text:
            marker = next((marker for marker in self.special if text.startswith(marker)), None)
            ids += [self.special[marker]] if marker else text[0].encode()
            text = text[len(marker or "x") :]
        return ids

    def text(self, ids: Sequence[int]) -> str:
        return b"".join(self.tokens[id] for id in ids).decode(errors="replace")


class Grammar:
    """A grammar as an engine follows it."""

    def __init__(self, rule: Rule, lark: Lark, vocabulary: Bytes) -> None:
        self.vocabulary = vocabulary
        grammar = LLMatcher.grammar_from_lark(lark.grammar(rule))
        tokenizer = LLTokenizer(TokenizerWrapper(vocabulary))
        assert not (fault := LLMatcher.validate_grammar(grammar, tokenizer)), fault
        self._matcher = LLMatcher(tokenizer, grammar, log_level=0)

    def takes(self, text: str) -> bool:
        """Whether a text matches."""
        matcher, ids = self._matcher.deep_copy(), self.vocabulary.ids(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def random_text(self, dice: random.Random, most: int = 3000) -> str:
        """A text that matches; markers and ends are likely."""
        matcher, ids = self._matcher.deep_copy(), []
        while not matcher.is_stopped() and len(ids) < most:
            close = self.vocabulary.ids(dice.choice(CLOSING))
            if dice.random() < 0.2 and matcher.validate_tokens(close) == len(close):
                matcher.consume_tokens(close)
                ids += close
                continue
            allowed = [id for id, bias in enumerate(matcher.compute_logit_bias()) if bias]
            liked = [id for id in allowed if id >= END or chr(id) in '"}]<']
            id = dice.choice(liked if liked and dice.random() < 0.7 else allowed)
            if id == END:
                break
            matcher.consume_token(id)
            ids.append(id)
        assert len(ids) < most
        return self.vocabulary.text(ids)


def grammar(name: str, calls: Calls, prompt_end: str = "", are_special: bool = True) -> Grammar:
    format = FORMATS[name]
    vocabulary = Bytes(format.markers if are_special or name == "harmony" else ())
    lark = Lark(vocabulary.special)
    return Grammar(format.calls(lark, calls, prompt_end), lark, vocabulary)


def parsed(name: str, answer: str, prompt_end: str = "") -> list[Event]:
    return events_of(FORMATS[name], [answer], prompt_end, {tool.name: tool.parameters for tool in TOOLS})


def calls_of(events: Sequence[Event]) -> list[CallPart]:
    return [event for event in events if isinstance(event, CallPart)]


ONE = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "llama3": '{"name": "add", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS]add[ARGS]{"a": 1}',
    "mistral-v3": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]',
    "gemma": '{"name": "add", "parameters": {"a": 1}}',
    "deepseek": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek-v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "qwen3-coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "pythonic": "[add(a=1)]",
    "functiongemma": "<start_function_call>call:add{a:1}<end_function_call>",
    "gemma4": "<|tool_call>call:add{a:1}<tool_call|>",
    "harmony": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}',
}


@pytest.mark.parametrize("are_special", [True, False])
@pytest.mark.parametrize("name", ONE)
def test_the_model_may_reason_and_must_call(name: str, are_special: bool) -> None:
    due = grammar(name, Calls(TOOLS, may_repeat=True), are_special=are_special)
    answer = ONE[name]
    reasoned = f"<think>\nI <b>.\n</think>\n\n{answer}"
    if name == "harmony":
        reasoned = f"<|channel|>analysis<|message|>I <b>.<|end|>{HEADER}{answer}"
    for text in (answer, reasoned):
        assert due.takes(text)
        assert calls_of(parsed(name, text)) == [call(0, "add", '{"a": 1}')]
    assert not due.takes(f"Hello {answer}")
    assert not due.takes("")
    assert not due.takes(reasoned.removesuffix(answer))
    assert not due.takes(answer.replace("1", "x")), "the schema holds"
    assert not due.takes(answer.replace("1", "1.5"))


@pytest.mark.parametrize("name", ONE)
def test_a_named_tool_is_called_once(name: str) -> None:
    due = grammar(name, Calls(TOOLS[1:], may_repeat=False))
    answer = ONE[name].replace("add", TOOLS[1].name).replace('{"a": 1}', "{}")
    assert due.takes(answer)
    assert not due.takes(ONE[name])
    for between in ("", "\n", ", ", "; "):
        assert not due.takes(answer + between + answer)


@pytest.mark.parametrize(("name", "marker"), [("hermes", "<think>"), ("harmony", "<|channel|>analysis<|message|>")])
def test_reasoning_that_the_prompt_has_begun_comes_first(name: str, marker: str) -> None:
    prompt_end = f"{HEADER}{marker}\n" if name == "hermes" else HEADER + marker
    due = grammar(name, Calls(TOOLS, may_repeat=True), prompt_end)
    end = "</think>\n\n" if name == "hermes" else "<|end|>" + HEADER
    assert due.takes(f"I add.{end}{ONE[name]}")
    assert not due.takes(ONE[name])


@pytest.mark.parametrize("are_special", [True, False])
def test_gemma_4_reasons_in_a_channel_of_its_own(are_special: bool) -> None:
    format = Marked("gemma4", "gemma4")
    thought = "<|channel>thought\n"
    for prompt_end, before in (("", thought), ("", ""), (f"<|turn>model\n{thought}", "")):
        lark = Lark((vocabulary := Bytes(format.markers if are_special else ())).special)
        due = Grammar(format.calls(lark, Calls(TOOLS, may_repeat=True), prompt_end), lark, vocabulary)
        answer = f"{before}I add.<channel|>{ONE['gemma4']}" if before or prompt_end else ONE["gemma4"]
        assert due.takes(answer)
        events = events_of(format, [answer], prompt_end, {tool.name: tool.parameters for tool in TOOLS})
        assert events[:-1] == ([Reasoning("I add.")] if answer != ONE["gemma4"] else [])
        assert events[-1] == call(0, "add", '{"a": 1}')


@pytest.mark.parametrize("name", ONE)
def test_whatever_matches_parses_into_calls_of_the_schema(name: str) -> None:
    due = grammar(name, Calls(TOOLS, may_repeat=True))
    dice = random.Random(name)
    for _ in range(4):
        answer = due.random_text(dice)
        events = parsed(name, answer)
        calls = calls_of(events)
        assert calls, answer
        assert events[-len(calls) :] == calls, "nothing but reasoning beside them"
        for each in calls:
            arguments = json.loads(each.arguments)
            assert each.name != "add" or isinstance(arguments["a"], int)


# What tools ask for in practice; each property has its name from what is special about it.
RICH = {
    "type": "object",
    "$defs": {
        "Node": {"properties": {"label": {"type": "string", "maxLength": 3}, "next": {"$ref": "#/$defs/Node"}}},
        "Unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "properties": {
        "text": {"type": "string", "maxLength": 6},
        "pattern": {"type": "string", "pattern": "^[a-f]{2,4}$"},
        "unit": {"$ref": "#/$defs/Unit"},
        "maybe": {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 4}, {"type": "null"}]},
        "number": {"type": "number", "minimum": 0, "maximum": 9},
        "flag": {"type": "boolean"},
        "mixed": {"enum": ["a", 1, None, False]},
        "list": {"type": "array", "items": {"type": ["integer", "boolean"]}, "minItems": 1, "maxItems": 3},
        "nodes": {"type": "array", "items": {"$ref": "#/$defs/Node"}, "maxItems": 2},
        "inner": {"type": "object", "properties": {"key one": {"type": "string", "maxLength": 2}, "b": {}},
                  "required": ["key one"], "additionalProperties": False},
        "any": {},
    },
    "required": ["pattern", "list", "flag"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.mark.parametrize("are_special", [True, False])
@pytest.mark.parametrize("name", sorted(ONE.keys() - {"harmony"}))
def test_arguments_that_match_are_those_of_the_schema(name: str, are_special: bool) -> None:
    assert_answers_match(name, RICH, random.Random(name), 12, are_special=are_special)


@pytest.mark.parametrize("name", ["qwen3-coder", "glm", "pythonic", "functiongemma", "gemma4"])
def test_arguments_of_any_schema_match(name: str) -> None:
    dice = random.Random(name)
    for _ in range(30):
        properties: dict[str, Any] = {f"p{at}": random_schema(dice) for at in range(dice.randint(1, 4))}
        required = [key for key in properties if dice.random() < 0.6]
        schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        assert_answers_match(name, schema, dice, 2, are_special=dice.random() < 0.5)


def assert_answers_match(
    name: str, schema: dict[str, Any], dice: random.Random, num_answers: int, *, are_special: bool
) -> None:
    format = Marked(name, "")
    lark = Lark((vocabulary := Bytes(format.markers if are_special else ())).special)
    due = Grammar(format.calls(lark, Calls((Tool("f", schema),), may_repeat=True), ""), lark, vocabulary)
    for _ in range(num_answers):
        answer = due.random_text(dice)
        calls = events_of(format, [answer], tools={"f": schema})
        assert calls, answer
        for each in calls:
            assert isinstance(each, CallPart), answer
            Draft202012Validator(schema).validate(json.loads(each.arguments))


@pytest.mark.parametrize("name", ["qwen3-coder", "glm", "pythonic", "functiongemma", "gemma4"])
@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"$ref": "#"},
        {"properties": {"a": {"$ref": "#/properties/a"}}},
        {
            "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}},
            "properties": {"a": {"$ref": "#/$defs/a"}},
        },
        {"properties": {"a": {"type": "array", "items": {"type": "array"}}}},
        {"required": ["a"]},
        {"properties": {"a b": {"type": "string", "minLength": 2}}},
        {"allOf": [{"properties": {"a": {"type": "integer"}}}]},
        {"additionalProperties": {"type": "integer"}},
    ],
)
def test_unusual_schemas_have_grammars(name: str, schema: Any) -> None:
    lark, vocabulary = Lark({}), Bytes(())
    Grammar(TOOL_FORMATS[name].grammar(lark, Calls((Tool("f", schema),), may_repeat=False)), lark, vocabulary)


BEFORE = {
    "hermes": ("<think>so</think>\n", ""),
    "harmony": (f"<|channel|>analysis<|message|>so<|end|>{HEADER}", "<|channel|>final<|message|>"),
}


@pytest.mark.parametrize(
    ("guided", "good", "bad"),
    [
        ({"regex": r"/+\/b"}, "//b", "/b"),
        ({"regex": "a\\\n/\n"}, "a\n/\n", "a/\n"),
        ({"choice": {"options": ["a", "b c"]}}, "b c", "b"),
        ({"json_object": True}, '{"a": 1}', "[]"),
        ({"json_schema": json.dumps(INTEGER)}, '{"a": 1}', "{}"),
        ({"ebnf_grammar": 'start: one "\\n"\none: "/"'}, "/\n", "/"),
    ],
)
@pytest.mark.parametrize("name", BEFORE)
def test_a_format_that_the_client_asks_for_concerns_the_answer_after_the_reasoning(
    name: str, guided: dict[str, object], good: str, bad: str
) -> None:
    vocabulary = Bytes(FORMATS[name].markers)
    reasoning, begin = BEFORE[name]
    lark = Lark(vocabulary.special)
    rule = FORMATS[name].answer(lark, rule_of(ParseDict(guided, Guided()), lark), "")
    asked = Grammar(rule, lark, vocabulary)
    for before in ("", reasoning):
        assert asked.takes(before + begin + good)
        assert not asked.takes(before + begin + bad)


@pytest.mark.parametrize(
    ("schema", "is_closed"),
    [
        ({"properties": {"a": {}}}, True),
        ({"properties": {"a": {}}, "required": ["a"]}, True),
        ({"properties": {"a": {}}, "required": ["b"]}, False),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "string"}}, False),
        ({"properties": {"a": {}}, "allOf": [{"properties": {"b": {}}}]}, False),
        ({}, False),
    ],
)
def test_arguments_have_no_properties_that_their_schema_does_not_mean(schema: Any, is_closed: bool) -> None:
    lark = Lark({})
    written = lark.grammar(lark.arguments(Tool("f", schema)))
    assert ('"additionalProperties": false' in written) == is_closed
    assert '"whitespace_flexible": false' in written


@pytest.mark.parametrize("guided", [Guided(json_schema='{"type": "object"}'), Guided(json_object=True)])
def test_json_behind_reasoning_is_written_like_json_alone(guided: Guided) -> None:
    lark = Lark({})
    assert '"whitespace_flexible": false' in lark.grammar(rule_of(guided, lark))
    own = Guided(json_schema='{"x-guidance": {"whitespace_flexible": true}}')
    assert '"whitespace_flexible": true' in lark.grammar(rule_of(own, lark))
    assert "%json true" in lark.grammar(rule_of(Guided(json_schema="true"), lark))

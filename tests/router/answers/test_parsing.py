"""Answers in all formats: their parts, however the text is cut, and what is no call stays text."""

from __future__ import annotations

import json
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda_server.router.answers.events import CallPart, Event, Reasoning, Text
from pagoda_server.router.answers.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    AnswerFormat,
    Harmony,
    Marked,
    format_of,
)
from pagoda_server.router.answers.parser import AnswerParser
from pagoda_server.router.answers.reader import MAX_KEY
from pagoda_server.settings import SettingError
from pagoda_server.settings.router import ReasoningFormatName, ToolFormatName
from tests.router.answers.reading import TOOLS, call, cut, events_of, told

HERMES = Marked("hermes", "think")
HARMONY = Harmony(has_tools=True, has_reasoning=True)
HEADER = "<|start|>assistant"
FORMATS: dict[str, AnswerFormat] = {**{name: Marked(name, "think") for name in TOOL_FORMATS}, "harmony": HARMONY}
A, W = '{"a": [1, -2.5e3, "ü\\n}"], "b": {}}', "{}"

# Each format's way to call add with A and get_weather.v2 with W.
ANSWERS = {
    "hermes": f'<tool_call>\n{{"name": "add", "arguments": {A}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "get_weather.v2", "arguments": {W}}}\n</tool_call>',
    "llama3": f'{{"name": "add", "parameters": {A}}}; '
    f'{{"type": "function", "name": "get_weather.v2", "parameters": {W}}}',
    "mistral": f"[TOOL_CALLS]add[ARGS]{A}[TOOL_CALLS]get_weather.v2[CALL_ID]abc123def[ARGS]{W}",
    "mistral-v3": f'[TOOL_CALLS] [{{"name": "add", "arguments": {A}}}, '
    f'{{"arguments": {W}, "name": "get_weather.v2", "id": "abc123def"}}]',
    "gemma": f'```tool_code\n[{{"name": "add", "parameters": {A}}}, '
    f'{{"name": "get_weather.v2", "parameters": {W}}}]\n```',
    "deepseek": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{A}<｜tool▁call▁end｜>"
    f"<｜tool▁call▁begin｜>get_weather.v2<｜tool▁sep｜>{W}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek-v3": "<｜tool▁calls▁begin｜>"
    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{A}\n```<｜tool▁call▁end｜>\n"
    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather.v2\n```json\n{W}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "qwen3-coder": '<tool_call>\n<function=add>\n<parameter=a>\n[1, -2.5e3, "ü\\n}"]\n</parameter>\n'
    "<parameter=b>\n{}\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=get_weather.v2>\n</function>\n</tool_call>",
    "glm": '<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>[1, -2.5e3, "ü\\n}"]</arg_value>\n'
    "<arg_key>b</arg_key>\n<arg_value>{}</arg_value>\n</tool_call><tool_call>get_weather.v2</tool_call>",
    "pythonic": "[add(a=[1, -2.5e3, 'ü\\n}'], b={}), get_weather.v2()]",
    "functiongemma": "<start_function_call>call:add{a:[1,-2.5e3,<escape>ü\n}<escape>],b:{}}<end_function_call>"
    "<start_function_call>call:get_weather.v2{}<end_function_call>",
    "gemma4": '<|tool_call>call:add{a:[1,-2.5e3,<|"|>ü\n}<|"|>],b:{}}<tool_call|>'
    "<|tool_call>call:get_weather.v2{}<tool_call|>",
    "harmony": f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{A}<|call|>"
    f"<|start|>assistant to=functions.get_weather.v2<|channel|>commentary json<|message|>{W}<|call|>",
}


IN_JSON = sorted(name for name, answer in ANSWERS.items() if A in answer)


def parse(format: AnswerFormat, answer: str, prompt_end: str = "") -> list[Event]:
    """The answer's parts, which are the same if it comes character by character."""
    found = events_of(format, [answer], prompt_end)
    assert events_of(format, answer, prompt_end) == found
    return found


@pytest.mark.parametrize("name", ANSWERS)
def test_every_format_tells_calls(name: str) -> None:
    assert parse(FORMATS[name], ANSWERS[name]) == [call(0, "add", A), call(1, "get_weather.v2", W)]
    assert parse(FORMATS[name], ANSWERS[name] + "\n ")[-1] == call(1, "get_weather.v2", W), "white space behind a call"


@pytest.mark.parametrize("name", sorted(ANSWERS.keys() - {"llama3", "pythonic", "harmony"}))
def test_text_around_calls_is_text(name: str) -> None:
    events = parse(FORMATS[name], f"Let me see.\n\n{ANSWERS[name]}\nAnd so\n")
    assert (events[0], events[-1], len(events)) == (Text("Let me see."), Text("\nAnd so\n"), 4)


@pytest.mark.parametrize("name", IN_JSON)
def test_arguments_stream_as_they_come(name: str) -> None:
    parser = AnswerParser(FORMATS[name], TOOLS, "", str)
    answer = ANSWERS[name]
    begin = answer.index(A)
    assert not parser.push(answer[:begin])
    assert parser.push(answer[begin : begin + 7]) == [CallPart(0, A[:7], "0", "add")]
    assert parser.push(answer[begin + 7 : begin + 9]) == [CallPart(0, A[7:9])]


@pytest.mark.parametrize("name", ANSWERS)
def test_a_call_that_is_due_and_cut_is_never_text(name: str) -> None:
    answer = ANSWERS[name]
    for end in range(len(answer)):
        due = events_of(FORMATS[name], [answer[:end]], is_due=True)
        assert all(isinstance(event, CallPart) for event in due), "half a marker is dropped where a call is due"


def test_a_cut_drops_no_text_where_no_call_is_due() -> None:
    complete = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    for end in range(complete.index("}}") + 1, len(complete)):
        assert parse(HERMES, complete[:end]) == [call(0, "add", "{}")], "its closing marker is none"
    assert parse(HERMES, complete + "<tool_") == [call(0, "add", "{}"), Text("<tool_")]
    assert parse(HERMES, "Sure <tool_ca") == [Text("Sure <tool_ca")]
    assert events_of(HERMES, ["<think>Hm</thi"], is_due=True) == [Reasoning("Hm</thi")]
    assert events_of(HERMES, ["<think>Hm</think><tool_"], is_due=True) == [Reasoning("Hm")]


@pytest.mark.parametrize("name", ANSWERS)
def test_a_call_of_no_offered_tool_is_text_from_its_first_character_on(name: str) -> None:
    wrong = ANSWERS[name].replace("add", "unknown")
    first, *_ = parse(FORMATS[name], wrong)
    assert isinstance(first, Text)
    assert wrong.startswith(first.text)
    assert "-2.5e3" in first.text


def test_a_call_whose_arguments_break_off_stays_incomplete() -> None:
    parser = AnswerParser(HERMES, TOOLS, "", str)
    events = parser.push('<tool_call>{"name": "add", "arguments": {"a": \'x\'}}</tool_call>')
    assert events == [CallPart(0, '{"a": ', "0", "add"), Text("'x'}}</tool_call>")]
    assert parser.num_calls == 0


@pytest.mark.parametrize(
    "answer",
    [
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "add", "other": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}, "name": "unknown"}</tool_call>',
        "a <tool_call> <tool_cal",
        f'<tool_call>{" " * 100}{{"name": "add", "arguments": {{}}}}',
        f'<tool_call>{{"name": "{"a" * 100}", "arguments": {{}}}}',
        f'<tool_call>{{"arguments": {{"a": "{"x" * 20_000}"}}, "name": "add"}}',
        "a <think>b</think>",
    ],
)
def test_what_is_no_call_of_an_offered_tool_is_text_as_it_was_written(answer: str) -> None:
    assert parse(HERMES, answer) == [Text(answer)]


def test_a_call_follows_one_that_was_none() -> None:
    answer = '<tool_call><tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert parse(HERMES, answer) == [Text("<tool_call>"), call(0, "add", "{}")]


def test_calls_stay_text_where_the_chat_offers_no_tools() -> None:
    for name, answer in ANSWERS.items():
        assert events_of(FORMATS[name], [answer], tools={}) == [Text(answer)]


def test_a_json_answer_is_no_call() -> None:
    for name in ("llama3", "gemma"):
        assert parse(FORMATS[name], ' {"name": "Ada", "born": 1815}') == [Text(' {"name": "Ada", "born": 1815}')]
        assert parse(FORMATS[name], '[1, {"a": 2}]') == [Text('[1, {"a": 2}]')]
    assert parse(FORMATS["llama3"], "<|python_tag|>print(1)") == [Text("<|python_tag|>print(1)")]


@pytest.mark.parametrize(
    ("name", "begin", "end"), [(name, begin + word, end) for name, (begin, word, end) in REASONING_FORMATS.items()]
)
def test_reasoning_comes_before_the_answer(name: str, begin: str, end: str) -> None:
    format = Marked("", name)
    whole = [Reasoning("I add.\n\nSo"), Text("It is 5.\n")]
    assert parse(format, f"{begin}\nI add.\n\nSo\n{end}\n\nIt is 5.\n") == whole
    assert parse(format, f"I add.\n\nSo\n{end}\n\nIt is 5.\n", f"user\n{begin}\n") == whole, "the prompt has begun it"
    assert parse(format, f"{begin}\n\n{end}\n\nIt is 5.\n") == whole[1:], "empty"
    assert parse(format, f"{begin}cut off \n") == [Reasoning("cut off \n")]
    assert parse(format, f"It is 5.\n{begin}", f"{begin}\n\n{end}\n\n") == [Text(f"It is 5.\n{begin}")], "turned off"


def test_messages_of_harmony() -> None:
    analysis, rest = "<|channel|>analysis<|message|>Hm. <|end|>", HEADER
    final = "<|channel|>final<|message|>Hello.<|return|>"
    preamble = "<|channel|>commentary<|message|>Wait.<|end|>"
    assert parse(HARMONY, analysis + rest + final, HEADER) == [Reasoning("Hm."), Text("Hello.")]
    assert parse(HARMONY, analysis + rest + preamble + rest + ANSWERS["harmony"]) == [
        Reasoning("Hm."), Text("Wait."), call(0, "add", A), call(1, "get_weather.v2", W)
    ]  # fmt: skip
    assert parse(HARMONY, " to=functions.add<|channel|>commentary json<|message|>{}", HEADER) == [call(0, "add", "{}")]
    assert parse(HARMONY, "Hm.<|end|>" + rest + final, HEADER + "<|channel|>analysis<|message|>") == [
        Reasoning("Hm."), Text("Hello.")
    ]  # fmt: skip
    assert parse(HARMONY, "lo.<|return|>", "<|channel|>final<|message|>Hel") == [Text("lo.<|return|>")]
    browser = "<|channel|>commentary to=browser.search<|message|>{}<|call|>"
    assert parse(HARMONY, browser) == [Text(browser)]
    tools_alone = Harmony(has_tools=True, has_reasoning=False)
    assert parse(tools_alone, analysis + rest + final) == [Text(analysis + "Hello.")]


MARKERS = sorted(
    {marker for format in FORMATS.values() for marker in format.markers}
    | {"```json\n", "```", ";", "</parameter>", "</function>", "call:"}
)
FRAGMENTS = [
    *MARKERS, *ANSWERS.values(), *(answer[: len(answer) // 2] for answer in ANSWERS.values()),
    '{"name": "add", "arguments": ', '"parameters": {', "}", "]", "{", "[", '"', ",", ":", "to=functions.add", "json",
    "analysis", "final", "add", "(", ")", "a=", "'", "\\u", "dead", "a:", "<function=add>", "<parameter=a>", "thought",
    "<parameter=c>\n", "<arg_key>c</arg_key><arg_value>", "c=", "c:", "d=", "d:", "{'", "nul",
    " ", "\n", " " * 70, "<", "<tool", "\\", "1.5e", "true", "q", "é",
]  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    prompt_end=st.sampled_from(["", "<think>\n", HEADER]),
    places=st.lists(st.integers(0, 300), max_size=30),
)
def test_any_cut_gives_the_same_parts_and_no_text_is_lost(
    name: str, fragments: list[str], prompt_end: str, places: list[int]
) -> None:
    answer = "".join(fragments)
    whole = events_of(FORMATS[name], [answer], prompt_end)
    assert events_of(FORMATS[name], cut(answer, places), prompt_end) == whole
    assert events_of(FORMATS[name], answer, prompt_end) == whole
    if name in IN_JSON:
        assert is_subsequence(told(whole), answer), "nothing is made up"
    if not (whole and isinstance(whole[-1], CallPart)):  # the answer has not ended inside a call
        for word in ("q", "é"):  # which no marker and no other part of a call has
            assert told(whole).count(word) == answer.count(word)
    for event in whole:
        event_text = event.arguments if isinstance(event, CallPart) else event.text
        event_text.encode()  # nothing that UTF-8 cannot express


def is_subsequence(part: str, whole: str) -> bool:
    rest = iter(whole)
    return all(char in rest for char in part)


def dumped(value: object) -> st.SearchStrategy[str]:
    return st.sampled_from([json.dumps(value), json.dumps(value, indent=1), json.dumps(value, ensure_ascii=False)])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(IN_JSON),
    arguments=st.dictionaries(st.text(max_size=4), VALUES, max_size=3).flatmap(dumped),
    places=st.lists(st.integers(0, 600), max_size=30),
)
def test_any_object_is_told_as_it_was_written(name: str, arguments: str, places: list[int]) -> None:
    answer = ANSWERS[name].replace(A, arguments)
    assert events_of(FORMATS[name], cut(answer, places)) == [call(0, "add", arguments), call(1, "get_weather.v2", W)]


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{% if tools %}<tools>{% endif %}<tool_call>{{ c }}</tool_call>", ("hermes", "")),
        ("<tool_call>{{ c }}</tool_call>{{ m.split('</think>') }}<think>", ("hermes", "think")),
        (
            "<tool_call>\n<function=' + name + '>\n<parameter=' + key + '>\n</tool_call></think>",
            ("qwen3-coder", "think"),
        ),
        ("<tool_call><function=x></function></tool_call>", None),
        ("<tool_call>' + name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value></tool_call></think>", ("glm", "think")),
        (
            "<|turn>model\n<|channel>thought\n<channel|><|tool_call>call:' + name + '{' }}<tool_call|>",
            ("gemma4", "gemma4"),
        ),
        ("<start_of_turn>developer\n{% if tools %}<start_function_call>call:' + name", ("functiongemma", "")),
        ("<|start_header_id|>{% if tools %}{{ 'as [func_name1(a=1), func_name2()] ' }}{% endif %}", ("pythonic", "")),
        ("<|header_start|>{% if tools %}{{ 'as [func_name1(a=1), func_name2()] ' }}{% endif %}", ("pythonic", "")),
        ("<start_of_turn>user\n{% if tools %}[func_name1(a=1)]{% endif %}<end_of_turn>", ("pythonic", "")),
        ("<tool_call>[func_name1(a=1), func_name2()]</tool_call>", None),
        ("<|tool_call|>[]<|/tool_call|>", None),
        ("<|start_header_id|>{% if tools %}{{ 'name, parameters' }}{% endif %}<|python_tag|>", ("llama3", "")),
        ("<|start_header_id|>{{ m.content }}", None),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]{{ calls }}", ("mistral-v3", "")),
        ("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", ("mistral", "")),
        ("[THINK]{{ t }}[/THINK][TOOL_CALLS]{{ name }}[ARGS]", ("mistral", "mistral")),
        ("<start_of_turn>user\n{% if tools %}…{% endif %}<end_of_turn>", ("gemma", "")),
        ("<start_of_turn>user\n<end_of_turn>", None),
        ("<|start|>assistant<|channel|>analysis<|message|>", ("harmony", "harmony")),
        ("<｜tool▁calls▁begin｜>function<｜tool▁sep｜>```json</think>", ("deepseek-v3", "think")),
        ("<｜tool▁calls▁begin｜>{{ name }}<｜tool▁sep｜>", ("deepseek", "")),
        ("<|im_start|>{{ m.content }}<|im_end|>", None),
        (None, None),
    ],
)
def test_the_format_is_found_in_the_chat_template(template: str | None, found: tuple[str, str] | None) -> None:
    format = format_of(template)
    assert (format and (format.tool_format, format.reasoning_format)) == found


def test_flags_set_the_format_or_turn_it_off() -> None:
    qwen = "<tool_call></think>"
    assert format_of(qwen, "none", "none") is None
    set_by_hand = format_of(qwen, "llama3", "none")
    assert set_by_hand
    assert (set_by_hand.tool_format, set_by_hand.reasoning_format) == ("llama3", "")
    with pytest.raises(SettingError, match="--tool-format harmony does not go with --reasoning-format think"):
        format_of(qwen, "harmony")
    assert {*get_args(ToolFormatName)} == {*TOOL_FORMATS, "harmony", "auto", "none"}
    assert {*get_args(ReasoningFormatName)} == {*REASONING_FORMATS, "harmony", "auto", "none"}


@pytest.mark.parametrize("name", FORMATS)
def test_little_is_held_back_however_long_the_answer_is(name: str) -> None:
    opening = ANSWERS[name].partition("add")[0]
    for piece in (" ", "\n", "<", "[", opening, f"{opening}q"):
        parser = AnswerParser(FORMATS[name], TOOLS, "", str)
        num_told = 0
        for num_pushed in range(1, 300):
            num_told += len(told(parser.push(piece)))
            assert num_pushed * len(piece) - num_told < MAX_KEY + 100, piece

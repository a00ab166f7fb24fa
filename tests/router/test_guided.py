"""The router's check of a grammar."""

from __future__ import annotations

import threading
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest
from llguidance import LLTokenizer

from pagoda.v1 import inference_pb2
from pagoda_server.checkpoints import resolve
from pagoda_server.grammars.compiling import MAX_LEVELS, GrammarError, compiled, grammar_of, to_lark
from pagoda_server.grammars.forced_text import longest_forced
from pagoda_server.router.errors import InvalidArgument, Unimplemented
from pagoda_server.router.request import guided
from pagoda_server.router.request.guided import GrammarChecker
from pagoda_server.router.text.tokenizer import Tokenizer
from tests.router.tokenizers_for_tests import byte_level, model_folder, sentence_piece, with_decoder


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve("synthetic"))


async def test_a_grammar_in_gbnf_reaches_the_engine_in_lark(tokenizer: Tokenizer) -> None:
    checked = await GrammarChecker(tokenizer).check(inference_pb2.Guided(ebnf_grammar='root ::= "a" [0-9]'))
    assert "start:" in checked.ebnf_grammar
    assert await GrammarChecker(tokenizer).check(checked) == checked


async def test_a_grammar_names_the_models_special_tokens(tokenizer: Tokenizer) -> None:
    checker = GrammarChecker(tokenizer)
    await checker.check(inference_pb2.Guided(ebnf_grammar='start: <|im_start|> "a" <|im_end|>'))
    with pytest.raises(InvalidArgument, match=r"tools: is wrong at line 1, column 8: unknown"):
        await checker.check(inference_pb2.Guided(ebnf_grammar="start: <|tool|>"), "tools")


async def test_a_grammar_is_checked_once_and_not_on_the_event_loops_thread(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    compiled = guided.compiled
    monkeypatch.setattr(guided, "compiled", lambda *args: threads.append(threading.current_thread()) or compiled(*args))
    checker = GrammarChecker(tokenizer)
    for _ in range(3):
        await checker.check(inference_pb2.Guided(regex="a+"))
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


async def test_a_model_whose_tokens_have_no_known_bytes_takes_no_format(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "has_bytes", False)
    with pytest.raises(Unimplemented, match="guided"):
        await GrammarChecker(tokenizer).check(inference_pb2.Guided(regex="a+"))


@pytest.mark.parametrize(("kind", "has_bytes"), [(byte_level, True), (sentence_piece, True), (None, False)])
def test_the_bytes_of_tokens_are_known_by_the_decoder(
    tmp_path: Path, kind: Callable[[], str] | None, has_bytes: bool
) -> None:
    folder = model_folder(tmp_path, kind() if kind else with_decoder(byte_level(), None).to_str())
    assert Tokenizer(folder).has_bytes == has_bytes


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (r'root ::= "\u00e9"', "é"),
        (r"root ::= [\u00e0-\u00e9]", "é"),
        (r'root ::= "\U0001F642"', "🙂"),
        (r'root ::= "\[\]"', "[]"),
        (r'root ::= "\x41" [^\x00-\x1f]', "Ab"),
        (r'root ::= "\x22\x5c\u005d" [\x5d\u005c-\u005e]', '"\\]]'),
        (r'root ::= "a\u0001\u000ab"', "a\x01\nb"),
        (r'root ::= [\[\]] "/" [/]', "]//"),
        ('root ::= "a" b # "\\u00e9\nb ::= "c"', "ac"),
    ],
)
def test_gbnf_means_what_its_escapes_say(grammar: str, text: str) -> None:
    tokenizer = LLTokenizer("byte")
    matcher, _ = compiled(grammar_of("ebnf_grammar", to_lark(grammar)), tokenizer)
    output = tokenizer.tokenize_str(text)
    assert matcher.try_consume_tokens(output) == len(output)
    assert matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (r'root ::= "\ud800"', r"escape \\ud800, which is no character"),
        ('root ::= "a" b\nb ::= [z', "at line 2, "),
        ('root ::= "a" "\\q"', "at line 1, "),
    ],
)
async def test_an_error_in_gbnf_names_the_clients_line(tokenizer: Tokenizer, grammar: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        await GrammarChecker(tokenizer).check(inference_pb2.Guided(ebnf_grammar=grammar))


@pytest.mark.parametrize(
    ("format", "value", "message"),
    [
        ("regex", r"a\bc", r"cannot be used: \b is not supported in regular expressions: /a\bc/"),
        ("ebnf_grammar", "start: A\nA: /b\\B/", r"is wrong at line 2, column 4: \B is not supported in regular"),
        (
            "json_schema",
            '{"maxLength": 1000000000000000000}',
            "has 1000000000000000000 at /maxLength, at most 42949672",
        ),
        ("json_schema", '{"items": {"maxLength": -1}}', "'maxLength', got -1 at /items"),
        (
            "json_schema",
            '{"properties": {"maxLength": {"maxLength": -1}}, "required": ["maxLength"]}',
            "got -1 at /properties/maxLength",
        ),
        ("json_schema", '{"properties": {"if": {"type": "string"}, "a": {"if": {}}}}', "'if' at /properties/a, which"),
        ("regex", "(?:a?){500}a{500}", "is too complex: lexer error: too many expressions constructed"),
        ("json_schema", '{"multipleOf": 1e-300}', "has a number at /multipleOf that cannot be followed: 1E-300 has"),
        ("json_schema", '{"multipleOf": 0.07}', "followed: 0.07 has too many digits as a double"),
        ("json_schema", '{"multipleOf": false}', "Expected f64 for 'multipleOf', got false"),
        ("json_schema", '{"const": 1e9999999999999999999}', "has a number whose exponent is too large"),
        ("ebnf_grammar", 'start: %json {"const": 1e9999999999999999999}', "has a number whose exponent is too large"),
        (
            "json_schema",
            '{"items": {"multipleOf": -1}}',
            "at /items/multipleOf that cannot be followed: -1 must be above 0",
        ),
        ("json_schema", '{"const": NaN}', "is not JSON: expected value at line 1, column 1"),
        ("ebnf_grammar", 'start: %json {"const": NaN}', "has a %json that is not JSON: expected value at line 1"),
    ],
)
async def test_an_error_names_what_the_client_has_written(
    tokenizer: Tokenizer, format: str, value: str, message: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await GrammarChecker(tokenizer).check(inference_pb2.Guided(**{format: value}))  # type: ignore[arg-type]
    assert message in refused.value.description


async def test_a_keyword_that_stands_at_several_places_is_named_without_one(tokenizer: Tokenizer) -> None:
    schema = '{"properties": {"a": {"maxLength": -1}, "b": {"maxLength": 5}}}'
    with pytest.raises(InvalidArgument) as refused:
        await GrammarChecker(tokenizer).check(inference_pb2.Guided(json_schema=schema))
    assert refused.value.description.endswith("'maxLength', got -1")


def schema_of(number: str, keyword: str = "const") -> str:
    value = f"[{number}, 1]" if keyword == "enum" else number
    return f'{{"type": "object", "properties": {{"const": {{"{keyword}": {value}}}}}, "required": ["const"]}}'


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ('{"x-guidance": 5}', "/x-guidance"),
        ('{"x-guidance": null}', "/x-guidance"),
        ('{"items": {"x-guidance": {"whitespace_flexible": true}}}', "/items/x-guidance"),
    ],
)
def test_a_style_that_would_be_left_out_is_refused_by_its_place(schema: str, place: str) -> None:
    for format, grammar in (("json_schema", schema), ("ebnf_grammar", f"start: %json {schema}")):
        with pytest.raises(GrammarError, match=f"has x-guidance at {place}: "):
            grammar_of(format, grammar)
    assert grammar_of("json_schema", '{"properties": {"x-guidance": {}}, "x-guidance": {"whitespace_flexible": true}}')


@pytest.mark.parametrize(
    "number",
    ["9007199254740993", "12345678901234567890", "123456789.12345679", "-0.12345678901234567", "1e400", "1" * 4000],
)
@pytest.mark.parametrize("keyword", ["const", "enum"])
def test_a_number_that_would_become_another_is_refused_by_its_place(number: str, keyword: str) -> None:
    with pytest.raises(GrammarError, match=f"at /properties/const/{keyword} that would not be kept"):
        grammar_of("json_schema", schema_of(number, keyword))


@pytest.mark.parametrize(
    "number", ["9007199254740992", "1234567890123456", "3.141592653589793", "1e22", "1e-7", "-7", "0.1", "1e20"]
)
def test_a_number_that_is_kept_is_written(number: str) -> None:
    matcher, _ = compiled(grammar_of("json_schema", schema_of(number)), LLTokenizer("byte"))
    output = bytes(matcher.compute_ff_tokens())
    assert Decimal(output.decode().rpartition(":")[2].strip(" }")) == Decimal(number)


def test_numbers_that_decide_nothing_are_not_refused() -> None:
    grammar_of("json_schema", '{"type": "integer", "default": 9007199254740993}')


@pytest.mark.parametrize(
    ("bounds", "allowed", "refused"),
    [
        ('"minimum": 9007199254740993, "maximum": 9007199254740997', ["9007199254740994", "9007199254740996"],
         ["9007199254740992", "9007199254740998"]),
        ('"exclusiveMinimum": 9007199254740992', ["9007199254740994"], ["9007199254740992", "9007199254740991"]),
        ('"exclusiveMinimum": 9007199254740993', ["9007199254740996"], ["9007199254740992", "9007199254740993"]),
        ('"minimum": 9007199254740998, "exclusiveMinimum": 5', ["9007199254740998"], ["9007199254740996", "6"]),
        ('"minimum": 0, "exclusiveMaximum": 9007199254740995', ["7", "9007199254740994"], ["9007199254740996"]),
        ('"minimum": 0, "exclusiveMaximum": 9007199254740994', ["9007199254740992"], ["9007199254740994"]),
        ('"minimum": -9007199254740993', ["-9007199254740992"], ["-9007199254740994"]),
        ('"maximum": 9223372036854775807', ["9223372036854774784", "-5"], ["9223372036854775808"]),
        ('"minimum": 9007199254740992', ["9007199254740992"], ["9007199254740991"]),
    ],
)  # fmt: skip
def test_no_number_outside_large_bounds_is_allowed(bounds: str, allowed: list[str], refused: list[str]) -> None:
    grammar = grammar_of("json_schema", f'{{"type": "array", "items": {{"type": "integer", {bounds}}}}}')
    for numbers, is_allowed in ((allowed, True), (refused, False)):
        for number in numbers:
            text = f"[{number}]".encode()
            matcher, _ = compiled(grammar, LLTokenizer("byte"))
            assert (matcher.validate_tokens([*text]) == len(text)) == is_allowed, number


@pytest.mark.parametrize(
    "schema", ['{"const": 9007199254740993}', '{"enum": [[0.12345678901234567]]}', '{"minimum": 9007199254740993}']
)
def test_numbers_in_a_schema_within_a_grammar_are_refused_too(schema: str) -> None:
    with pytest.raises(GrammarError, match="would not be kept"):
        grammar_of("ebnf_grammar", f'start: "a" %json {schema}')


# How a definition refers to the next one, and how many levels that takes.
CHAINS = {
    "array": ('{"type": "array", "items": {"$ref": "NEXT"}}', 2),
    "object": ('{"type": "object", "properties": {"a": {"$ref": "NEXT"}}, "required": ["a"]}', 3),
    "pattern": ('{"type": "object", "patternProperties": {"^a": {"$ref": "NEXT"}}}', 3),
    "tuple": ('{"type": "array", "prefixItems": [{"$ref": "NEXT"}], "items": false}', 3),
    "lists": ('{"type": "array", "items": ' * 20 + '{"$ref": "NEXT"}' + "}" * 20, 21),
    "any": ('{"anyOf": [{"$ref": "NEXT"}, {"type": "string"}]}', 3),
    "alias": ('{"$ref": "NEXT"}', 1),
}


def schema_of_chain(definition: str, length: int) -> str:
    chain = ", ".join(f'"d{at}": ' + definition.replace("NEXT", f"#/$defs/d{at + 1}") for at in range(length))
    return f'{{"$defs": {{{chain}, "d{length}": {{"type": "integer"}}}}, "$ref": "#/$defs/d0"}}'


@pytest.mark.parametrize("kind", CHAINS)
def test_the_longest_chain_of_references_compiles_and_a_longer_one_is_refused(kind: str) -> None:
    """In a thread of the usual stack, which llguidance would overflow."""
    definition, levels = CHAINS[kind]
    length = MAX_LEVELS // levels - levels - 4
    schema = schema_of_chain(definition, length)
    matcher, _ = compiled(grammar_of("json_schema", schema), LLTokenizer("byte"))
    for _ in range(20):  # until it meets another limit, in an error of its own
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(256) if mask[token // 8] >> token % 8 & 1]
        if matcher.is_error() or not allowed:
            break
        matcher.consume_token(allowed[0])
    longest_forced("json_schema", schema)
    with pytest.raises(GrammarError, match=rf"levels deep along its references, at most {MAX_LEVELS} may be"):
        grammar_of("json_schema", schema_of_chain(definition, length + 3 * levels))
    with pytest.raises(GrammarError, match="levels deep"):
        grammar_of("ebnf_grammar", f"start: %json {schema_of_chain(definition, length + 3 * levels)}")


@pytest.mark.parametrize(
    "rule", ['a{}: "x" a{} "y"', "  a{} : a{}", 'A{}: "x" A{}'], ids=["rules", "aliases", "terminals"]
)
def test_as_many_rules_as_may_be_within_each_other_compile_and_more_are_refused(rule: str) -> None:
    def grammar(count: int) -> str:
        first = rule.strip()[0]
        lines = [f"start: {first}0", *(rule.format(at, at + 1) for at in range(count)), f'{first}{count}: "z"']
        return "\n".join(lines)

    compiled(grammar_of("ebnf_grammar", grammar(MAX_LEVELS - 5)), LLTokenizer("byte"))
    longest_forced("ebnf_grammar", grammar(MAX_LEVELS - 5))
    with pytest.raises(GrammarError, match=f"at most {MAX_LEVELS} are allowed"):
        grammar_of("ebnf_grammar", grammar(MAX_LEVELS + 1))


def test_values_are_not_nested_deep_in_a_schema_within_a_grammar_either() -> None:
    with pytest.raises(GrammarError, match="more than 64 deep"):
        grammar_of("ebnf_grammar", "start: %json " + '{"items": ' * 70 + "{}" + "}" * 70)

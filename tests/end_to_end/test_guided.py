"""Structured output through real processes: answers match, errors name the place, and neighbours notice nothing."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from pagoda import Client
from pagoda.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from pagoda_server.cli.app import app
from pagoda_server.engine.runners.synthetic import expected_tokens
from tests.end_to_end.asking import Answer, ask, request
from tests.engine.random_schemas import assert_matches, random_schema
from tests.servers import Server

VOCAB_SIZE = 258
EMOJI = "🙂"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def ask_for(
    inference: inference_pb2_grpc.InferenceStub, guided: dict[str, Any], max_tokens: int = 100, **fields: Any
) -> Answer:
    fields = {"prompt": "x", "stopping": {"max_tokens": max_tokens}, **fields}
    return ask(inference, inference_pb2.GenerateRequest(guided=inference_pb2.Guided(**guided), **fields))


def test_the_model_says_that_it_takes_formats(control: control_pb2_grpc.ControlStub) -> None:
    (model,) = control.ListModels(control_pb2.ListModelsRequest()).models
    assert control_pb2.CAPABILITY_GUIDED in model.capabilities


@pytest.mark.parametrize(
    ("guided", "pattern"),
    [
        ({"regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"choice": {"options": ["yes", "no", f'"{EMOJI}\n\\']}}, f'yes|no|"{EMOJI}\n\\\\'),
        ({"ebnf_grammar": 'start: WORD " " WORD\nWORD: /[a-z]{2,4}/'}, "[a-z]{2,4} [a-z]{2,4}"),
        ({"ebnf_grammar": 'root ::= "<" [0-9] [0-9] ">"'}, "<[0-9][0-9]>"),
    ],
)
def test_an_answer_has_the_format(
    inference: inference_pb2_grpc.InferenceStub, guided: dict[str, Any], pattern: str
) -> None:
    answer = ask_for(inference, guided)
    assert re.fullmatch(pattern, answer.text())
    assert answer.finished().reason == inference_pb2.FINISH_REASON_STOP
    assert answer.finished().grammar or answer.finished().HasField("stop_token_id")


def test_json_matches_its_schema_whatever_else_is_asked_for(inference: inference_pb2_grpc.InferenceStub) -> None:
    guided = {"json_schema": json.dumps(SCHEMA)}
    plain, told = ask_for(inference, guided), ask_for(inference, guided, output={"logprobs": 1})
    several = ask_for(inference, guided, sampling={"n": 3, "seed": 7, "temperature": 1.0, "frequency_penalty": 1.0})
    for answer, index in ((plain, 0), (told, 0), *((several, index) for index in range(3))):
        assert_matches(answer.text(index), SCHEMA)
        assert answer.finished(index).grammar
    assert plain.responses[-1].usage.forced_tokens > 10
    assert told.responses[-1].usage.forced_tokens == 0  # each token has its log-probability, so each is computed
    assert len(told.tokens()) == sum(token.HasField("logprob") for token in told.tokens())
    assert plain.ids() == told.ids()
    assert json.loads(ask_for(inference, {"json_object": True}, 300).text()) is not None


def test_what_cuts_an_answer_off_is_told(inference: inference_pb2_grpc.InferenceStub) -> None:
    whole, guided = "abcdefgh", {"regex": "abcdefgh"}
    limited = ask_for(inference, guided, 3)
    assert (limited.text(), limited.finished().reason) == (whole[:3], inference_pb2.FINISH_REASON_LENGTH)
    by_text = ask_for(inference, guided, stopping={"max_tokens": 50, "stop": ["ef"]})
    assert (by_text.text(), by_text.finished().WhichOneof("matched")) == ("abcd", "stop_string")
    by_id = ask_for(inference, guided, stopping={"max_tokens": 50, "stop_token_ids": [ord("d")]})
    assert (by_id.text(), by_id.finished().stop_token_id) == ("abc", ord("d"))
    ended = ask_for(inference, guided, stopping={"max_tokens": 50, "min_tokens": 20, "ignore_eos": True})
    assert (ended.text(), ended.finished().grammar) == (whole, True)


@pytest.mark.parametrize(
    ("guided", "field", "place"),
    [
        ({"json_schema": '{"type": "object",}'}, "guided.json_schema", "line 1, column 19"),
        ({"json_schema": '{"properties": {"a": {"if": {}}}}'}, "guided.json_schema", "'if' at /properties/a"),
        ({"json_schema": '{"items":' * 100 + "{}" + "}" * 100}, "guided.json_schema", "more than 64 deep"),
        ({"regex": "abc(de"}, "guided.regex", "unclosed group at character 4"),
        ({"regex": "x{0}"}, "guided.regex", "empty text alone"),
        ({"ebnf_grammar": 'start: "a"\n  b'}, "guided.ebnf_grammar", "line 2"),
        ({"ebnf_grammar": "start: <nothing>"}, "guided.ebnf_grammar", "<nothing>"),
        ({"ebnf_grammar": 'root ::= "a'}, "guided.ebnf_grammar", "line 1"),
        ({"ebnf_grammar": "\n".join(f'r{at} ::= "a"' for at in range(600))}, "guided.ebnf_grammar", "600 rules"),
    ],
)
def test_a_wrong_grammar_is_refused_with_the_place(
    inference: inference_pb2_grpc.InferenceStub, guided: dict[str, Any], field: str, place: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        ask_for(inference, guided)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith(f"{field}: ")
    assert place in caught.value.details()


def test_a_grammar_that_explodes_ends_only_its_request(inference: inference_pb2_grpc.InferenceStub) -> None:
    """The check lets it pass: only while it is followed does its work grow beyond the bounds."""
    guided = {"ebnf_grammar": 'start: a\na: a a a a a | "x" | b\nb: a b | "x" a'}
    neighbour = request("y", 200)
    with ThreadPoolExecutor(1) as thread:
        beside = thread.submit(ask, inference, neighbour)
        with pytest.raises(grpc.RpcError) as caught:
            ask_for(inference, guided, 2000, stopping={"max_tokens": 2000, "ignore_eos": True})
        assert beside.result().ids() == expected_tokens(b"y", 200, VOCAB_SIZE)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith("guided: ")


def test_many_schemas_at_once_all_match(inference: inference_pb2_grpc.InferenceStub) -> None:
    random = Random(5)
    schemas = [random_schema(random) for _ in range(24)]
    with ThreadPoolExecutor(12) as threads:
        answers = threads.map(lambda schema: ask_for(inference, {"json_schema": json.dumps(schema)}, 1000), schemas)
        for schema, answer in zip(schemas, answers, strict=True):
            assert_matches(answer.text(), schema)


def test_python_and_the_command_ask_for_a_format(synthetic_server: Server, tmp_path: Path) -> None:
    with Client(synthetic_server.address) as client:
        text = "".join(chunk.text for chunk in client.generate(prompt="x", json_schema=SCHEMA, max_tokens=99))
        assert_matches(text, SCHEMA)
        assert "".join(chunk.text for chunk in client.generate(prompt="x", choice=["only"])) == "only"
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(json.dumps(SCHEMA))
    grammar.write_text("start: /[0-9]{4}/")
    command = ["generate", "x", "--raw", "--max-tokens", "99", "--address", synthetic_server.address]
    assert_matches(CliRunner().invoke(app, [*command, "--json-schema", str(schema)]).stdout, SCHEMA)
    assert re.fullmatch("[0-9]{4}\n", CliRunner().invoke(app, [*command, "--grammar", str(grammar)]).stdout)
    assert CliRunner().invoke(app, [*command, "--regex", "abc"]).stdout == "abc\n"
    both = CliRunner().invoke(app, [*command, "--regex", "abc", "--grammar", str(grammar)])
    assert "give one" in both.stderr
    missing = CliRunner().invoke(app, [*command, "--json-schema", str(tmp_path / "none")])
    assert missing.exit_code == 2

"""Structured output with real vocabularies: a multiple of 32, and grammars that meet limits of the library."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from pagoda import Client
from pagoda.v1 import inference_pb2, inference_pb2_grpc
from tests.end_to_end.asking import Answer, ask
from tests.real_models import qwen_gguf
from tests.servers import Server, running_server

pytestmark = pytest.mark.thorough

DATE = "2024-[01][0-9]-[0-3][0-9]"
WORDS = r"(\p{L}+ ?){1,30}\."
PATTERN = "^" + "([a-z]{1,20} ?)" * 33 + "$"  # of 500 characters


@pytest.fixture(scope="module")
def qwen() -> Iterator[Server]:
    with running_server("--model", str(qwen_gguf())) as server:
        yield server


@pytest.fixture(scope="module")
def default_model(default_model_folder: object) -> Iterator[Server]:
    with running_server() as server:
        yield server


def answers(server: Server, count: int, max_tokens: int, temperature: float, **guided: object) -> list[Answer]:
    """Ask the same at once, so many times. Seeds differ, which greedy requests do not notice."""

    def one(seed: int) -> Answer:
        message = inference_pb2.GenerateRequest(
            prompt="A date in 2024, please.",
            sampling=inference_pb2.Sampling(temperature=temperature, seed=seed),
            stopping=inference_pb2.Stopping(max_tokens=max_tokens),
            guided=inference_pb2.Guided(**guided),  # type: ignore[arg-type]
        )
        return ask(inference_pb2_grpc.InferenceStub(channel), message)

    with grpc.insecure_channel(server.address) as channel, ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def test_a_vocabulary_that_is_a_multiple_of_32_gives_what_the_grammar_asks_for(qwen: Server) -> None:
    engine = qwen.engine().pid
    for count in (1, 16):
        for answer in answers(qwen, count, 20, 1.0, regex=DATE):
            assert re.fullmatch(DATE, answer.text())
            assert answer.finished().grammar is not None
    schema = {"type": "object", "properties": {"year": {"type": "integer"}}, "required": ["year"]}
    for answer in answers(qwen, 4, 80, 0.0, json_schema=json.dumps(schema)):
        assert isinstance(json.loads(answer.text())["year"], int)
    assert qwen.engine().pid == engine


def matches(answer: Answer, pattern: str) -> bool:
    return re.fullmatch(pattern.replace(r"\p{L}", r"[^\W\d_]"), answer.text()) is not None


def test_a_greedy_request_has_one_outcome_and_it_matches_where_the_library_meets_a_limit(default_model: Server) -> None:
    found = [answer for _ in range(3) for answer in answers(default_model, 12, 300, 0.0, regex=WORDS)]
    assert len({answer.text() for answer in found}) == 1
    for answer in found:
        is_finished = answer.finished().reason == inference_pb2.FINISH_REASON_STOP
        assert not is_finished or matches(answer, WORDS)


def test_what_is_finished_is_json_where_the_library_meets_a_limit(default_model: Server) -> None:
    schema = {"type": "string", "pattern": PATTERN}
    for answer in answers(default_model, 12, 400, 1.0, json_schema=json.dumps(schema)):
        if answer.finished().reason == inference_pb2.FINISH_REASON_STOP:
            assert re.fullmatch(PATTERN, json.loads(answer.text()))


@pytest.mark.parametrize("choice", ["REQUIRED", "get_weather"])
def test_a_call_that_is_due_is_made_where_its_markers_are_added_tokens_but_not_special(
    qwen: Server, choice: str
) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    tools = [{"name": "get_weather", "parameters": parameters}]
    tool_choice = "required" if choice == "REQUIRED" else {"name": choice}
    with Client(qwen.address) as client:
        for question in ("What is the weather in Oslo?", "Hello!"):
            answer = client.answer(chat=question, tools=tools, tool_choice=tool_choice, max_tokens=100)
            ends = {"tool_calls", "length"} if choice == "REQUIRED" else {"tool_calls"}  # it may call more than once
            assert answer.finish_reason in ends
            assert set(answer.tool_calls[0].parsed) == {"city"}

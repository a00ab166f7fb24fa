"""Streams whose answers have a format, and whose engine is really killed: the whole answer keeps the format."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagoda import Client
from pagoda.answer import ToolCall, answer_of
from pagoda.chunk import chunk_from
from pagoda.v1 import chat_pb2, inference_pb2
from tests.end_to_end.asking import Answer, ask
from tests.end_to_end.test_required_calls import TEMPLATE
from tests.end_to_end.test_resume import Stub, check_same, meeting, model, read_until, resumable, resume, slowed
from tests.engine.random_schemas import assert_matches
from tests.servers import Server, running_server

pytestmark = pytest.mark.thorough

__all__ = ["model"]  # a fixture

PROMPT = "numbers"
MAX_TOKENS = 800
NUMBERS = {
    "type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 100, "maxItems": 100,
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"first": NUMBERS, "name": {"type": "string", "maxLength": 9}, "last": {"enum": ["x", "y"]}},
    "required": ["first", "name", "last"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that drafts tokens and writes tool calls. The tests kill its engine; it is ready again after each."""
    folder = tmp_path_factory.mktemp("models") / "calling"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("{{ tools | tojson }}", ""))
    with running_server("--model", str(folder), "--dtype", "float32", "--quantization", "none") as server:
        yield server


@pytest.fixture
def inference(server: Server) -> Iterator[Stub]:
    with grpc.insecure_channel(server.address) as channel:
        yield Stub(channel)


def in_format(**sampling: float) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        prompt=PROMPT,
        sampling=inference_pb2.Sampling(**sampling),  # type: ignore[arg-type]
        stopping=inference_pb2.Stopping(max_tokens=MAX_TOKENS),
        guided=inference_pb2.Guided(json_schema=json.dumps(SCHEMA)),
    )


def calling(**sampling: float) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        chat=chat_pb2.Chat(
            messages=[chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content="Hi")],
            tools=[chat_pb2.Tool(name="add", parameters=json.dumps(SCHEMA))],
            tool_choice=chat_pb2.ToolChoice(mode=chat_pb2.TOOL_CHOICE_MODE_REQUIRED),
        ),
        sampling=inference_pb2.Sampling(**sampling),  # type: ignore[arg-type]
        stopping=inference_pb2.Stopping(max_tokens=MAX_TOKENS),
    )


def named(request: inference_pb2.GenerateRequest, name: str) -> inference_pb2.GenerateRequest:
    """The request with an id, from which those of its calls follow."""
    request.request_id = name
    return request


TOLD = in_format(temperature=0.8, seed=8)
TOLD.output.logprobs = 2  # each token has its log-probability, so none is forced, and any may be drafted
CASES = {
    name: named(request, name)
    for name, request in {
        "greedy": in_format(seed=6),
        "seeded": in_format(temperature=1.0, seed=7, n=2),
        "told": TOLD,
        "call": calling(seed=6),
        "seeded call": calling(temperature=1.0, seed=9, n=2),
    }.items()
}


def said(responses: Sequence[inference_pb2.GenerateResponse], index: int) -> tuple[str, list[ToolCall]]:
    """The text of a sequence, and its calls."""
    answer = answer_of(chunk for chunk in map(chunk_from, responses) if chunk.index == index)
    return answer.text, answer.tool_calls


def check_format(responses: Sequence[inference_pb2.GenerateResponse], request: inference_pb2.GenerateRequest) -> None:
    """Each sequence is a whole answer that has its format; one that is cut off ends within a further call."""
    for index in range(request.sampling.n or 1):
        text, calls = said(responses, index)
        if request.HasField("guided"):
            assert_matches(text, SCHEMA)
            continue
        if Answer([*responses]).finished(index).reason == inference_pb2.FINISH_REASON_LENGTH:
            calls.pop()
        assert {call.name for call in calls} == {"add"}
        for call in calls:
            assert_matches(call.arguments, SCHEMA)


@pytest.fixture(scope="module")
def answers(server: Server) -> dict[str, Answer]:
    """What nothing disturbs, and for which nothing is drafted."""
    asked = []
    for request in CASES.values():
        asked.append(inference_pb2.GenerateRequest(max_draft_tokens=0))
        asked[-1].MergeFrom(request)
    with grpc.insecure_channel(server.address) as channel, ThreadPoolExecutor(len(CASES)) as pool:
        found = dict(zip(CASES, pool.map(partial(ask, Stub(channel)), asked), strict=True))
    for name, answer in found.items():
        check_format(answer.responses, CASES[name])
    return found


def check_resumed(server: Server, inference: Stub, answers: dict[str, Answer]) -> int:
    """Kill the engine in the middle of every stream and resume them all. Returns how many tokens were drafted then."""
    engine, reached, num_drafted = server.engine(), threading.Barrier(len(CASES) + 1), 0
    with slowed(engine), ThreadPoolExecutor(len(CASES)) as pool:
        reads = {
            name: pool.submit(read_until, inference.Generate(resumable(request, name)), 20 + 9 * at, reached)
            for at, (name, request) in enumerate(CASES.items())
        }
        reached.wait(60)
        engine.kill()
        broken = {name: read.result() for name, read in reads.items()}
    server.wait_ready()
    for name, request in CASES.items():
        n = request.sampling.n or 1
        counts = broken[name].counts(n)
        assert all(count < len(answers[name].ids(index)) for index, count in enumerate(counts)), "in the middle"
        rest = resume(inference, name, counts)
        whole = Answer([*broken[name].responses, *rest])
        check_same(whole, answers[name], n)
        assert [said(whole.responses, index) for index in range(n)] == [
            said(answers[name].responses, index) for index in range(n)
        ]
        check_format(whole.responses, request)
        num_drafted += rest[-1].usage.drafted_tokens
    return num_drafted


def test_answers_keep_their_format_when_the_engine_dies(
    server: Server, inference: Stub, answers: dict[str, Answer]
) -> None:
    tries = 5  # how much is drafted follows from times that the engine measures
    assert any(check_resumed(server, inference, answers) for _ in range(tries)), "nothing was drafted"


def test_the_client_gets_whole_calls_and_formats_of_an_engine_that_dies(
    server: Server, answers: dict[str, Answer]
) -> None:
    """It resumes by itself, whatever the format is."""
    engine, reached = server.engine(), threading.Barrier(3)
    asked: dict[str, dict[str, Any]] = {
        "seeded": {"prompt": PROMPT, "json_schema": SCHEMA, "temperature": 1.0, "seed": 7, "n": 2},
        "call": {"chat": "Hi", "tools": [{"name": "add", "parameters": SCHEMA}], "tool_choice": "required", "seed": 6},
    }
    with slowed(engine), Client(server.address, retries=8) as client, ThreadPoolExecutor(len(asked)) as pool:
        options = {"max_tokens": MAX_TOKENS, "resumable": True}
        reads = {
            name: pool.submit(meeting, client.generate(**fields, **options, request_id=f"client {name}"), 20, reached)
            for name, fields in asked.items()
        }
        reached.wait(60)
        engine.kill()
        chunks = {name: read.result() for name, read in reads.items()}
    for name, found in chunks.items():
        for index in range(CASES[name].sampling.n or 1):
            answer = answer_of(chunk for chunk in found if chunk.index == index)
            text, calls = said(answers[name].responses, index)
            assert (answer.tokens, answer.text) == (answers[name].ids(index), text)
            assert [call.arguments for call in answer.tool_calls] == [call.arguments for call in calls]

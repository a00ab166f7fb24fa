"""The vectors that the clients of all languages share, with both Python clients."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import json_format

from pagoda import AsyncClient, Chunk, Client, FinishReason, PagodaError
from pagoda.request import _FIELDS
from pagoda.v1 import control_pb2, inference_pb2
from pagoda_server.engine.runners.synthetic import advance, expected_hidden, expected_logprobs, expected_tokens
from tests.vectors import servers

pytestmark = pytest.mark.thorough

VOCAB_SIZE = 258
REQUESTS = {
    "Generate": inference_pb2.GenerateRequest,
    "Tokenize": inference_pb2.TokenizeRequest,
    "Detokenize": inference_pb2.DetokenizeRequest,
    "Embed": inference_pb2.EmbedRequest,
    "Score": inference_pb2.ScoreRequest,
}
BY_NAME = {vector["name"]: vector for vector in servers.VECTORS}
Vector = dict[str, Any]


@pytest.fixture(scope="module")
def connections() -> Iterator[dict[str, dict[str, str]]]:
    with servers.running() as connections:
        yield connections


def arguments_of(request: Vector) -> dict[str, Any]:
    """The client's arguments for a request that is written as protobuf JSON."""
    arguments: dict[str, Any] = {}
    for name, value in request.items():
        if name == "chat":
            arguments |= chat_arguments(value)
        elif name == "token_ids" and isinstance(value, dict):
            arguments["token_ids"] = value["ids"]
        elif name in ("inputs", "continuations"):
            arguments[name] = [each["text"] if "text" in each else each["token_ids"]["ids"] for each in value]
        elif name == "pooling":
            arguments[name] = value.removeprefix("POOLING_").lower()
        elif name == "guided":
            ((kind, each),) = value.items()
            arguments |= {"choice": each["options"]} if kind == "choice" else {option_of(f"guided.{kind}"): each}
        elif name in ("sampling", "stopping", "output", "cache"):
            arguments |= {option_of(f"{name}.{part}"): each for part, each in value.items()}
        else:
            arguments[name] = value
    return arguments


def option_of(path: str) -> str:
    return next(option for option, field in _FIELDS.items() if field == path)


def chat_arguments(chat: Vector) -> dict[str, Any]:
    messages = [{**each, "role": each["role"].removeprefix("ROLE_").lower()} for each in chat["messages"]]
    rest = {name: value for name, value in chat.items() if name != "messages"}
    if "tool_choice" in rest:
        rest["tool_choice"] = rest["tool_choice"]["mode"].removeprefix("TOOL_CHOICE_MODE_").lower()
    return {"chat": messages, **rest}


def options_of(vector: Vector, connections: dict[str, dict[str, str]]) -> dict[str, Any]:
    """How a client connects for this vector."""
    to = connections[vector.get("server", "plain")]
    token = vector.get("token", to.get("token"))
    return {
        "address": to["address"],
        "token": token or None,
        "tls": to.get("ca", False),
        "timeout_s": vector.get("timeout_s"),
        "retries": vector.get("retries", 0),
    }


class Calls:
    """What came of a call: chunks or a value, perhaps an error, and the time it took."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.value: Any = None
        self.error: PagodaError | None = None
        self.took_s = 0.0

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        except PagodaError as error:
            self.error = error
        self.took_s = time.monotonic() - start


def ask(vector: Vector, request: Vector, options: dict[str, Any]) -> Calls:
    calls = Calls()
    with Client(**options) as client, Client(**{**options, "retries": 3}) as other:
        beside = other.generate(**arguments_of(vector["beside"])) if "beside" in vector else None
        if beside is not None:
            for _ in range(3):
                next(beside)
        with calls.recording():
            match vector.get("call", "Generate"):
                case "Generate":
                    stream = client.generate(**arguments_of(request))
                    for chunk in stream:
                        calls.chunks.append(chunk)
                        if len(calls.chunks) == vector.get("cancel_after"):
                            break
                    stream.close()
                case call:
                    calls.value = getattr(client, call.lower())(**arguments_of(request))
        if beside is not None:
            beside.close()
    return calls


def ask_in_a_loop(vector: Vector, request: Vector, options: dict[str, Any]) -> Calls:
    return asyncio.run(_ask_in_a_loop(vector, request, options))


async def _ask_in_a_loop(vector: Vector, request: Vector, options: dict[str, Any]) -> Calls:
    calls = Calls()
    async with AsyncClient(**options) as client, AsyncClient(**{**options, "retries": 3}) as other:
        beside = other.generate(**arguments_of(vector["beside"])) if "beside" in vector else None
        if beside is not None:
            for _ in range(3):
                await anext(beside)
        with calls.recording():
            match vector.get("call", "Generate"):
                case "Generate":
                    async with contextlib.aclosing(client.generate(**arguments_of(request))) as stream:
                        async for chunk in stream:
                            calls.chunks.append(chunk)
                            if len(calls.chunks) == vector.get("cancel_after"):
                                break
                case call:
                    calls.value = await getattr(client, call.lower())(**arguments_of(request))
        if beside is not None:
            await beside.aclose()
    return calls


@pytest.mark.parametrize("ask", [ask, ask_in_a_loop], ids=["blocking", "asyncio"])
@pytest.mark.parametrize("name", BY_NAME)
def test_what_comes_back_is_what_the_vector_says(
    name: str, ask: Callable[[Vector, Vector, dict[str, Any]], Calls], connections: dict[str, dict[str, str]]
) -> None:
    vector = BY_NAME[name]
    request, expected = vector["request"], vector["expect"]
    if "faults" in vector:
        request = {**request, "request_id": f"{request['request_id']}/{uuid.uuid4()}"}
    calls = ask(vector, request, options_of(vector, connections))
    assert expected.get("not_before_s", 0) <= calls.took_s <= expected.get("within_s", 60)
    if "code" in expected:
        check_error(calls, expected)
        return
    assert calls.error is None
    if "is_idle" in expected:
        check_idle(connections["plain"]["address"])
    elif "call" in vector:
        check_value(calls.value, expected)
    else:
        check_answer(calls.chunks, expected)


def check_error(calls: Calls, expected: Vector) -> None:
    error = calls.error
    assert error is not None
    assert error.code is grpc.StatusCode[expected["code"]]
    for name in ("field", "reason", "queue_depth"):
        if name in expected:
            assert getattr(error, name) == expected[name]
    if "has_retry_delay" in expected:
        assert (error.retry_after_s is not None) == expected["has_retry_delay"]
    if "messages" in expected:
        assert len(calls.chunks) == expected["messages"]


def check_value(value: Any, expected: Vector) -> None:
    """Check what Tokenize, Detokenize, Embed or Score has returned."""
    if "scores" in expected:
        value = [{"logprob": each.logprob, "tokens": [*each.tokens], "logprobs": [*each.logprobs]} for each in value]
    assert [value] == [expected[name] for name in ("token_ids", "text", "vectors", "scores") if name in expected]


def check_idle(address: str) -> None:
    deadline = time.monotonic() + 60
    with Client(address) as client:
        while any(map(is_busy, client.load().engines)):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def is_busy(engine: control_pb2.EngineLoad) -> bool:
    return engine.running + engine.blocks_referenced > 0


def check_answer(chunks: list[Chunk], expected: Vector) -> None:
    if "request_id" in expected:
        assert {chunk.request_id for chunk in chunks} == {expected["request_id"]}
    told = [(at, list(chunk.prompt_ids)) for at, chunk in enumerate(chunks) if chunk.prompt_ids is not None]
    assert told == ([(0, expected["prompt_ids"])] if "prompt_ids" in expected else [])
    assert {chunk.index for chunk in chunks} == set(range(len(expected["sequences"])))
    for index, sequence in enumerate(expected["sequences"]):
        check_sequence([chunk for chunk in chunks if chunk.index == index], sequence)
    logprobs = [each for chunk in chunks if chunk.index == 0 for each in chunk.logprobs]
    assert [{"logprob": each.logprob, "top": [list(top) for top in each.top]} for each in logprobs] == expected.get(
        "logprobs", []
    )
    token_bytes = [each for chunk in chunks if chunk.index == 0 for each in chunk.token_bytes]
    assert [base64.b64encode(each).decode() for each in token_bytes] == expected.get("token_bytes", [])
    assert [at for at, chunk in enumerate(chunks) if chunk.usage] == [len(chunks) - 1]
    usage = chunks[-1].usage
    assert {name: getattr(usage, name) for name in expected["usage"]} == expected["usage"]


def check_sequence(chunks: list[Chunk], expected: Vector) -> None:
    assert [id for chunk in chunks for id in chunk.tokens] == expected["tokens"]
    assert "".join(chunk.text for chunk in chunks) == expected["text"]
    (end,) = [chunk for chunk in chunks if chunk.finish_reason]
    assert end.finish_reason == FinishReason(expected["finish_reason"])
    matched = [expected[name] for name in ("stop_string", "stop_token_id", "grammar") if name in expected]
    assert [end.matched] == (matched or [None])


@pytest.mark.parametrize("name", BY_NAME)
def test_a_vector_is_a_request_and_its_answer_is_the_one_computed_by_hand(name: str) -> None:
    vector = BY_NAME[name]
    request: Any = json_format.ParseDict(vector["request"], REQUESTS[vector.get("call", "Generate")]())
    kind = None if "call" in vector else request.WhichOneof("input")
    for sequence in vector["expect"].get("sequences", []):
        ids = {
            "prompt": lambda: list(request.prompt.encode()),
            "token_ids": lambda: list(request.token_ids.ids),
        }.get(kind, lambda: vector["expect"]["prompt_ids"])()
        count = len(sequence["tokens"])
        options = [each.encode() for each in request.guided.choice.options]
        expected = chosen_tokens(ids, options) if options else expected_tokens(ids, count, VOCAB_SIZE)
        assert sequence["tokens"] == expected
        assert vector["expect"]["usage"]["prompt_tokens"] == len(ids)
    if "vectors" in vector["expect"]:
        inputs = [list(each.token_ids.ids) or list(each.text.encode()) for each in request.inputs]
        states = [[expected_hidden(each) for each in checksums(ids)] for ids in inputs]
        means = [[sum(values) / len(rows) for values in zip(*rows, strict=True)] for rows in states]
        assert vector["expect"]["vectors"] == [mean[: request.dimensions] for mean in means]
    if "scores" in vector["expect"]:
        for score, part in zip(vector["expect"]["scores"], request.continuations, strict=True):
            prompt, ids = list(request.prompt.encode()), list(part.token_ids.ids) or list(part.text.encode())
            before = checksums([*prompt, *ids])[len(prompt) - 1 : -1]
            logprobs = [expected_logprobs(each, 0, VOCAB_SIZE, id).chosen for each, id in zip(before, ids, strict=True)]
            assert score == {"logprob": sum(logprobs), "tokens": ids, "logprobs": logprobs}


def checksums(ids: list[int]) -> list[int]:
    """The checksum after each token."""
    return list(itertools.accumulate(ids, advance, initial=0))[1:]


def chosen_tokens(ids: list[int], options: list[bytes]) -> list[int]:
    """What the synthetic model writes where its answer must be one of these texts: its tokens are bytes."""
    checksum, chosen = checksums(ids)[-1], b""
    while chosen not in options:
        allowed = sorted({each[len(chosen)] for each in options if each.startswith(chosen)})
        chosen += bytes([allowed[checksum % len(allowed)]])
        checksum = advance(checksum, chosen[-1])
    return list(chosen)

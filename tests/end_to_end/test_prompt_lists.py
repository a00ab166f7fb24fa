"""Several prompts in one request of /v1/completions: each is served as it would be alone."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagoda.v1 import control_pb2_grpc
from tests.end_to_end.asking import engine_load
from tests.end_to_end.test_http import COMPLETIONS, LONG, SYNTHETIC, Posted, wait_idle
from tests.end_to_end.test_tenants import tenants_file
from tests.servers import Server, running_server

MAX_REQUESTS = 8
PROMPTS = ["one", [1, 2, 3], "a third one " * 20]
GREEDY = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(*SYNTHETIC, "--max-requests", str(MAX_REQUESTS)) as server:
        yield server


@pytest.fixture
def control(server: Server) -> Iterator[control_pb2_grpc.ControlStub]:
    with grpc.insecure_channel(server.address) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        wait_idle(stub)
        yield stub


def alone(server: Server, **fields: Any) -> list[dict[str, Any]]:
    return [Posted(server, COMPLETIONS, {**GREEDY, "prompt": prompt, **fields}).json() for prompt in PROMPTS]


@pytest.mark.usefixtures("control")
@pytest.mark.parametrize("fields", [{}, {"n": 2, "temperature": 1, "seed": 3}, {"echo": True, "logprobs": 1}])
def test_each_prompt_is_answered_as_if_it_had_come_alone(server: Server, fields: dict[str, Any]) -> None:
    n = fields.get("n", 1)
    answers = alone(server, **fields)
    expected = [
        choice | {"index": n * at + choice["index"]} for at, each in enumerate(answers) for choice in each["choices"]
    ]
    together = Posted(server, COMPLETIONS, {**GREEDY, "prompt": PROMPTS, **fields}).json()
    assert together["choices"] == expected
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert together["usage"][name] == sum(each["usage"][name] for each in answers)


@pytest.mark.usefixtures("control")
def test_a_stream_carries_all_prompts_and_ends_each_once(server: Server) -> None:
    answers = alone(server)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *events, done = Posted(server, COMPLETIONS, {**GREEDY, "prompt": PROMPTS, **options}).events()
    assert done == "[DONE]"
    *parts, last = map(json.loads, events)
    texts: dict[int, str] = defaultdict(str)
    ends = []
    for (choice,) in (part["choices"] for part in parts):
        texts[choice["index"]] += choice["text"]
        ends += [choice["index"]] * (choice["finish_reason"] is not None)
    assert [texts[at] for at in range(3)] == [each["choices"][0]["text"] for each in answers]
    assert sorted(ends) == [0, 1, 2]
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == sum(each["usage"]["total_tokens"] for each in answers)


def test_a_client_that_goes_ends_all_of_its_prompts(server: Server, control: control_pb2_grpc.ControlStub) -> None:
    posted = Posted(server, COMPLETIONS, {**LONG, "prompt": ["a", "b", "c", "d"]})
    seen = set()
    for event in posted.events():
        seen.add(json.loads(event)["choices"][0]["index"])
        if len(seen) == 4:
            break
    assert engine_load(control).running == 4
    posted.response.close()
    posted.connection.close()
    wait_idle(control)


def test_each_prompt_takes_a_place_and_one_without_ends_all(
    server: Server, control: control_pb2_grpc.ControlStub
) -> None:
    refused = Posted(server, COMPLETIONS, {**LONG, "prompt": ["a"] * (MAX_REQUESTS + 1)})
    if refused.status == 200:  # it had begun
        *_, last = refused.events()
        assert json.loads(last)["error"]["code"] == "queue_full"
    else:
        assert refused.status == 429
    wait_idle(control)


@pytest.mark.usefixtures("control")
@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_an_error_names_the_prompt_that_it_is_about(server: Server, wrong: int) -> None:
    prompts: list[Any] = ["a", "b", "c"]
    for bad, field in (([1 << 31], f"prompt[{wrong}][0]"), ("", f"prompt[{wrong}]")):
        prompts[wrong] = bad
        refused = Posted(server, COMPLETIONS, {"prompt": prompts, "max_tokens": 4})
        assert (refused.status, refused.error()["param"]) == (400, field)


def test_every_prompt_counts_against_the_tenants_quota(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(tenants_file("small"))
    with running_server(*SYNTHETIC, "--tenants-file", str(tenants)) as server:
        token = {"authorization": "Bearer token of small"}
        allowed = Posted(server, COMPLETIONS, {**GREEDY, "prompt": ["a", "b"]}, **token)
        assert (allowed.status, len(allowed.json()["choices"])) == (200, 2)
        refused = Posted(server, COMPLETIONS, {**GREEDY, "prompt": ["a", "b", "c"]}, **token)
        assert (refused.status, "requests run" in refused.error()["message"]) == (429, True)

"""tritonclient, which speaks KServe's protocol over gRPC: unary and streamed, with errors and cancels."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagoda.v1 import control_pb2_grpc
from pagoda_server.engine.runners.synthetic import expected_tokens
from tests.counterparts.environments import python_with
from tests.counterparts.test_protocols import TRITON
from tests.end_to_end.asking import engine_load
from tests.servers import Server, running_server

pytestmark = pytest.mark.counterpart
CLIENT = Path(__file__).with_name("triton_client.py")


def text_of(prompt: str, count: int) -> str:
    ids = expected_tokens(prompt.encode(), count, 258)
    return bytes(id for id in ids if id < 256).decode(errors="replace")


@pytest.fixture(scope="module")
def server() -> Any:
    with running_server("--model", "synthetic", "--step-ms", "2") as server:
        yield server


@pytest.fixture(scope="module")
def seen(server: Server) -> Any:
    """What the client saw."""
    command = [python_with(*TRITON), str(CLIENT), server.address]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_it_finds_the_server_and_the_model(seen: Any) -> None:
    assert (seen["live"], seen["ready"], seen["server"]) == (True, [True, True, False], "pagoda")
    inputs = {tensor["name"]: (tensor["datatype"], tensor["shape"]) for tensor in seen["model"]["inputs"]}
    assert inputs["text_input"] == ("BYTES", ["1"])
    assert inputs["stream"] == ("BOOL", ["1"])


def test_one_call_answers_with_all_sequences(seen: Any) -> None:
    unary = seen["unary"]
    assert (unary["id"], unary["texts"]) == ("42", [text_of("steady", 20)] * 2)
    assert (unary["reasons"], unary["counts"]) == (["length"] * 2, [20, 20])


def test_an_answer_is_one_of_several_texts(seen: Any) -> None:
    assert seen["unary"]["choice"] in (["yes"], ["no"])


def test_errors_are_statuses(seen: Any) -> None:
    unary = seen["unary"]
    message = "sampling_parameters.temperature: is 1000, must be in [0, 100]"
    assert unary["bad value"] == ["StatusCode.INVALID_ARGUMENT", message]
    assert unary["bad model"][0] == "StatusCode.NOT_FOUND"
    assert unary["deadline"][0] == "StatusCode.DEADLINE_EXCEEDED"


def test_a_stream_answers_several_requests(seen: Any) -> None:
    streamed = seen["streamed"]
    texts = {id: "".join(pieces) for id, pieces in streamed["pieces"].items()}
    assert texts == {"a": text_of("first", 100), "b": text_of("second", 20), "c": text_of("third", 20)}
    assert [len(streamed["pieces"][id]) > 1 for id in "abc"] == [True, False, True]
    assert sorted(streamed["finals"]) == ["a", "b", "c"]
    assert streamed["errors"] == ["sampling_parameters.temperature: is 1000, must be in [0, 100]"]


def test_cancels_free_what_the_requests_hold(seen: Any, server: Server) -> None:
    assert seen["cancelled"][0] == seen["stream cancelled"][0] == "StatusCode.CANCELLED"
    with grpc.insecure_channel(server.address) as channel:
        control = control_pb2_grpc.ControlStub(channel)
        deadline = time.monotonic() + 60
        while (load := engine_load(control)).running or load.waiting or load.blocks_referenced:
            assert time.monotonic() < deadline, load
            time.sleep(0.01)
        assert load.output_tokens < 9000, "a request went on after its cancel"

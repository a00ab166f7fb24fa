"""The OpenAI API with OpenAI's own clients, of PyPI and of npm."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import grpc
import pytest

from pagoda.v1 import control_pb2, control_pb2_grpc
from tests.counterparts.environments import node_with, program, python_with
from tests.servers import Server, running_server

pytestmark = pytest.mark.counterpart
HERE = Path(__file__).parent
MAX_REQUESTS, TOKEN, STEP_S = 4, "s3cret", 0.01
Client: TypeAlias = "Callable[[Server, str], subprocess.Popen[str]]"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text(TOKEN)
    arguments = ("--http", "127.0.0.1:0", "--auth-token-file", str(token), "--max-requests", str(MAX_REQUESTS))
    with running_server("--model", "synthetic", "--step-ms", str(1e3 * STEP_S), *arguments) as server:
        yield server


@pytest.fixture(scope="module")
def model_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The default model, whose answers make sense, with formats that its template does not tell of."""
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text(TOKEN)
    formats = ("--tool-format", "hermes", "--reasoning-format", "think")
    with running_server("--http", "127.0.0.1:0", "--auth-token-file", str(token), *formats) as server:
        yield server


@pytest.fixture(params=["pypi", "npm"])
def client(request: pytest.FixtureRequest) -> Client:
    """Starts a client, which does what its second argument says."""
    if request.param == "pypi":
        command, folder = [python_with("openai", "openai>=2,<4"), HERE / "openai_client.py"], HERE
    else:
        command, folder = [program("node"), HERE / "openai_client.mjs"], node_with("openai-npm", "openai@6")

    def start(server: Server, what: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*command, server.http, TOKEN, str(MAX_REQUESTS), what],
            cwd=folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    return start


def load(control: control_pb2_grpc.ControlStub) -> control_pb2.EngineLoad:
    metadata = (("authorization", f"Bearer {TOKEN}"),)
    (found,) = control.GetLoad(control_pb2.GetLoadRequest(), metadata=metadata).engines
    return found


def test_the_client_understands_every_answer(server: Server, client: Client) -> None:
    output, _ = client(server, "checks").communicate(timeout=600)
    assert output.split()[-1] == "overload", output


def test_the_client_gets_what_programs_ask_for(model_server: Server, client: Client) -> None:
    """Formats, tool calls, reasoning, embeddings, and a prompt's log-probabilities."""
    output, _ = client(model_server, "programs").communicate(timeout=600)
    assert output.split()[-1] == "echo", output


def test_a_stream_that_the_client_leaves_frees_its_blocks(server: Server, client: Client) -> None:
    with client(server, "abort") as running, grpc.insecure_channel(server.address) as channel:
        control = control_pb2_grpc.ControlStub(channel)
        assert running.stdin
        assert running.stdout
        assert running.stdout.readline() == "streaming\n", running.communicate()[0]
        assert load(control).blocks_referenced
        running.stdin.write("leave\n")
        running.stdin.flush()
        assert running.stdout.readline() == "closed\n"
        deadline = time.monotonic() + 60
        while load(control).blocks_referenced:
            assert time.monotonic() < deadline, "its blocks are still held"
            time.sleep(STEP_S / 2)
        running.communicate("end\n")

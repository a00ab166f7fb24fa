"""Traces in Phoenix, a server that receives OTLP and shows calls of language models by their gen_ai attributes."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagoda.v1 import inference_pb2, inference_pb2_grpc
from tests.counterparts.environments import python_with
from tests.servers import running_server

pytestmark = pytest.mark.counterpart

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_call_is_shown_under_its_clients_span_with_its_model_and_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    with (
        phoenix(tmp_path) as address,
        running_server("--model", "synthetic", "--otlp-endpoint", address) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        request = inference_pb2.GenerateRequest(prompt="hello", stopping={"max_tokens": 5}, request_id="seen")
        metadata = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
        for _ in inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=metadata):
            pass
        called, asked = waited_for_spans(address, "pagoda.v1.Inference/Generate", "llm_request")
    assert called["context"]["trace_id"] == asked["context"]["trace_id"] == TRACE
    assert called["parent_id"] == PARENT
    assert asked["parent_id"] == called["context"]["span_id"]
    assert asked["span_kind"] == "LLM"
    shown = asked["attributes"]  # those of Phoenix, made from ours
    assert shown["llm.model_name"] == "synthetic"
    assert (shown["llm.token_count.prompt"], shown["llm.token_count.completion"]) == (5, 5)
    assert shown["gen_ai.request.id"] == "seen"


@contextlib.contextmanager
def phoenix(folder: Path) -> Iterator[str]:
    """The address of a running Phoenix."""
    program = python_with("phoenix", "arize-phoenix>=20,<21").parent / "phoenix"
    http, grpc_port = free_port(), free_port()
    environment = os.environ | {
        "PHOENIX_WORKING_DIR": str(folder), "PHOENIX_HOST": "127.0.0.1", "PHOENIX_PORT": str(http),
        "PHOENIX_GRPC_PORT": str(grpc_port), "PHOENIX_TELEMETRY_ENABLED": "false",
    }  # fmt: skip
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([program, "serve"], env=environment, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{http}"
    try:
        deadline = time.monotonic() + 120
        while fetched(f"{address}/v1/projects") is None:
            assert process.poll() is None, (folder / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, "Phoenix does not answer"
            time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def waited_for_spans(address: str, *names: str) -> list[dict[str, Any]]:
    """The spans of these names, each once, when Phoenix has all of them."""
    deadline = time.monotonic() + 120
    while True:
        spans = {
            span["name"]: span for span in (fetched(f"{address}/v1/projects/default/spans") or {"data": []})["data"]
        }
        if set(names) <= spans.keys():
            return [spans[name] for name in names]
        assert time.monotonic() < deadline, f"Phoenix has {sorted(spans)}"
        time.sleep(0.2)


def fetched(url: str) -> Any:
    """What an address answers; None while it does not."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port

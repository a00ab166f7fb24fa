"""Requests that wait at a router without an engine, as real processes."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2

from pagoda.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from pagoda_server.engine.runners.synthetic import expected_tokens
from pagoda_server.router.adapters.protocols import kserve_pb2 as kserve
from tests.end_to_end.asking import Answer, request
from tests.servers import Server, running_engine, running_server

pytestmark = pytest.mark.thorough
WAIT_S = 60.0


@dataclass
class Place:
    """A file of members, and the engine that may become one."""

    folder: Path
    members: Path = field(init=False)
    address: str = field(init=False)

    def __post_init__(self) -> None:
        self.members, self.address = self.folder / "engines.json", f"unix:{self.folder / 'engine.sock'}"
        self.write()

    def write(self, *addresses: str) -> None:
        entries = [{"name": "one", "address": address} for address in addresses]
        self.members.with_suffix(".new").write_text(json.dumps({"engines": entries}))
        self.members.with_suffix(".new").rename(self.members)

    def mark(self) -> str:
        path = self.folder / "engines.json.wanted"
        return path.read_text() if path.exists() else ""

    def until_marked(self) -> str:
        ends_at = time.monotonic() + WAIT_S
        while not self.mark():
            assert time.monotonic() < ends_at
            time.sleep(0.02)
        return self.mark()

    def server(self, *options: str) -> Any:
        return running_server("--model=synthetic", f"--engine=file:{self.members}", *options)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def begun(server: Server, asked: inference_pb2.GenerateRequest, timeout_s: float = WAIT_S) -> Any:
    """A call of Generate, which runs on a channel of its own."""
    return inference_pb2_grpc.InferenceStub(grpc.insecure_channel(server.address)).Generate(asked, timeout=timeout_s)


def fetched(url: str, body: dict[str, Any] | None = None) -> str:
    asked = urllib.request.Request(url, None if body is None else json.dumps(body).encode())
    with urllib.request.urlopen(asked, timeout=WAIT_S) as answer:
        return str(answer.read().decode())


def error_of(call: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value


def retry_delay_s(error: Any) -> float:
    metadata = dict(error.trailing_metadata())
    info = error_details_pb2.RetryInfo()
    details = status_pb2.Status.FromString(metadata["grpc-status-details-bin"]).details
    assert any(detail.Unpack(info) for detail in details)
    return info.retry_delay.ToNanoseconds() / 1e9


def test_a_request_waits_for_the_first_engine_and_asks_for_it(place: Place) -> None:
    with place.server("--engine-wait-s=60", "--http=127.0.0.1:0") as server:
        assert server.health() == health_pb2.HealthCheckResponse.SERVING, "it takes requests without an engine"
        assert place.mark() == ""
        generated = begun(server, request("waits", max_tokens=20))
        stub: Any = inference_pb2_grpc.InferenceStub(grpc.insecure_channel(server.address))
        continuations = [inference_pb2.Continuation(text="b")]
        scored = stub.Score.future(inference_pb2.ScoreRequest(prompt="a", continuations=continuations), timeout=WAIT_S)
        first = place.until_marked()
        time.sleep(1.5)
        assert place.mark() != first, "it is written again while requests wait"
        metrics = fetched(f"{server.http}/metrics")
        assert 'pagoda_requests_without_engine{model_name="synthetic"} 2.0' in metrics
        assert json.loads(fetched(f"{server.http}/v1/models"))["data"][0]["id"] == "synthetic"
        with running_engine(place.address, "--model=synthetic"):
            place.write(place.address)
            assert Answer(list(generated)).ids() == expected_tokens(b"waits", 20, 258)
            assert len(scored.result().scores) == 1
            time.sleep(1.5)
            last = place.mark()
            assert "later" in fetched(
                f"{server.http}/v1/completions", {"prompt": "later", "max_tokens": 2, "echo": True}
            )
            time.sleep(1.5)
            assert place.mark() == last, "nothing waits"


def test_a_request_that_waits_in_vain_ends_unavailable_with_a_retry_delay(place: Place) -> None:
    with place.server("--engine-wait-s=1") as server:
        began = time.monotonic()
        error: Any = error_of(begun(server, request("waits", max_tokens=20)))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert 0.9 < time.monotonic() - began < 10
        assert retry_delay_s(error) == 1.0
        error = error_of(begun(server, request("waits", max_tokens=20), timeout_s=0.3))
        # Both ends look at the deadline.
        assert error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)


def test_requests_that_wait_are_bounded_and_what_is_wrong_is_refused_at_once(place: Place) -> None:
    with place.server("--engine-wait-s=60", "--max-requests=2") as server:
        wrong = inference_pb2.GenerateRequest(prompt="a", sampling=inference_pb2.Sampling(temperature=-1))
        assert error_of(begun(server, wrong)).code() is grpc.StatusCode.INVALID_ARGUMENT
        assert place.mark() == "", "it asks for no engine"
        held = [begun(server, request(f"waits {at}", max_tokens=20)) for at in range(2)]
        place.until_marked()
        time.sleep(0.5)
        error = error_of(begun(server, request("one too many", max_tokens=20)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        held[0].cancel()
        time.sleep(0.5)
        held[0] = begun(server, request("takes its place", max_tokens=20))
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        for each in held:
            assert error_of(each).code() is grpc.StatusCode.UNAVAILABLE
        assert server.process.wait(WAIT_S) == 0


@pytest.mark.parametrize("kind", ["FIFO", "symbolic link", "folder"])
def test_a_mark_that_is_no_file_is_logged_and_the_next_one_is_written(place: Place, kind: str) -> None:
    path, target = place.folder / "engines.json.wanted", place.folder / "target"
    target.write_text("kept")
    match kind:
        case "FIFO":
            os.mkfifo(path)
        case "symbolic link":
            path.symlink_to(target)
        case "folder":
            path.mkdir()
    with place.server("--engine-wait-s=60") as server:
        held = begun(server, request("waits", max_tokens=20))
        ends_at = time.monotonic() + WAIT_S
        while "cannot ask for an engine" not in server.log.read_text():
            assert time.monotonic() < ends_at
            time.sleep(0.05)
        assert target.read_text() == "kept"
        path.rmdir() if kind == "folder" else path.unlink()
        place.until_marked()
        held.cancel()


def test_a_request_that_has_waited_is_checked_against_the_engines_own_limits(place: Place) -> None:
    with place.server("--engine-wait-s=60") as server:
        generated = begun(server, request("x" * 100, max_tokens=20))
        place.until_marked()
        with running_engine(place.address, "--model=synthetic", "--max-model-len=64"):
            place.write(place.address)
            error: Any = error_of(generated)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "64" in error.details()


WRONG = {
    "guided.json_schema": {"guided": {"json_schema": '{"type": 7}'}},
    "guided.regex": {"guided": {"regex": "("}},
    "guided.ebnf_grammar": {"guided": {"ebnf_grammar": "root ::= other"}},
    "prompt": {"prompt": "x" * 100},
}


def test_what_a_router_can_judge_itself_is_refused_without_an_engine(place: Place) -> None:
    with place.server("--engine-wait-s=60", "--http=127.0.0.1:0") as server:
        control: Any = control_pb2_grpc.ControlStub(grpc.insecure_channel(server.address))
        inference: Any = inference_pb2_grpc.InferenceStub(grpc.insecure_channel(server.address))
        (model,) = control.ListModels(control_pb2.ListModelsRequest()).models
        assert (model.name, model.ready, model.max_model_len, model.hidden_size) == ("synthetic", False, 0, 0)
        with running_engine(place.address, "--model=synthetic", "--max-model-len=64"):
            place.write(place.address)
            assert Answer(list(begun(server, request("known", max_tokens=2)))).ids()
        place.write()
        ends_at = time.monotonic() + WAIT_S
        while control.GetServerInfo(control_pb2.GetServerInfoRequest()).engines:
            assert time.monotonic() < ends_at
            time.sleep(0.05)
        (model,) = control.ListModels(control_pb2.ListModelsRequest()).models
        assert (model.name, model.ready, model.max_model_len) == ("synthetic", False, 64)
        asked = grpc.insecure_channel(server.address).unary_unary(
            "/inference.GRPCInferenceService/ModelReady",
            kserve.ModelReadyRequest.SerializeToString,
            kserve.ModelReadyResponse.FromString,
        )
        assert asked(kserve.ModelReadyRequest(name="synthetic")).ready, "requests are taken, and wait"
        assert not asked(kserve.ModelReadyRequest(name="other")).ready
        assert json.loads(fetched(f"{server.http}/v1/models/synthetic"))["id"] == "synthetic"
        path = place.folder / "engines.json.wanted"
        path.unlink(missing_ok=True)
        for field, fields in WRONG.items():
            error: Any = error_of(begun(server, inference_pb2.GenerateRequest(**({"prompt": "a"} | fields))))
            assert (error.code(), error.details().partition(":")[0]) == (grpc.StatusCode.INVALID_ARGUMENT, field)
        with pytest.raises(grpc.RpcError, match=r"inputs\[0\]\.text: is 100 tokens"):
            inference.Embed(inference_pb2.EmbedRequest(inputs=[{"text": "x" * 100}]), timeout=WAIT_S)
        assert place.mark() == "", "none of them asks for an engine"

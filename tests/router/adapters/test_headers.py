"""llm-d's headers, by gRPC's metadata and by HTTP."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import grpc
import pytest

from pagoda.v1 import control_pb2, control_pb2_grpc, inference_pb2_grpc
from tests.end_to_end.asking import engine_load, request
from tests.servers import Server, running_server

Ask: TypeAlias = Callable[..., None]
TTFT, TPOT, TENANT = "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms", "x-llm-d-inference-fairness-id"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server that runs one sequence at a time, the most urgent one first."""
    arguments = ("--step-ms", "5", "--policy", "deadline", "--max-num-seqs", "1", "--http", "127.0.0.1:0")
    with running_server("--model", "synthetic", *arguments) as server:
        yield server


@pytest.fixture(params=["grpc", "http"])
def ask(request: pytest.FixtureRequest, server: Server) -> Ask:
    """Ask for three tokens with a header. Raises ValueError, with the field that was wrong."""
    return ask_by_grpc(server) if request.param == "grpc" else ask_by_http(server)


def ask_by_grpc(server: Server, max_tokens: int = 3) -> Ask:
    def ask(text: str, *headers: tuple[str, str]) -> None:
        message = request(text, max_tokens)
        with grpc.insecure_channel(server.address) as channel:
            try:
                list(inference_pb2_grpc.InferenceStub(channel).Generate(message, metadata=headers, timeout=60))
            except grpc.RpcError as error:
                raise ValueError(error.details()) from None

    return ask


def ask_by_http(server: Server) -> Ask:
    def ask(text: str, *headers: tuple[str, str]) -> None:
        body = json.dumps({"model": "synthetic", "prompt": text, "max_tokens": 3}).encode()
        about = {"content-type": "application/json", **dict(headers)}
        try:
            with urllib.request.urlopen(
                urllib.request.Request(f"{server.http}/v1/completions", body, about), timeout=60
            ):
                pass
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error)["error"]["message"]) from None

    return ask


def test_a_header_names_the_tenant(server: Server, ask: Ask) -> None:
    name = ask.__qualname__.partition(".")[0]
    ask("a tenant's", (TENANT, name))
    with grpc.insecure_channel(server.address) as channel:
        control, names, deadline = control_pb2_grpc.ControlStub(channel), set[str](), time.monotonic() + 60
        while name not in names:  # a table may be a quarter of a second old
            assert time.monotonic() < deadline, names
            names = {tenant.name for tenant in control.GetLoad(control_pb2.GetLoadRequest()).tenants}
            time.sleep(0.02)
    with pytest.raises(ValueError, match=f"^{TENANT}: names another tenant than x-pagoda-tenant"):
        ask("two tenants'", (TENANT, name), ("x-pagoda-tenant", "another"))


@pytest.mark.parametrize("key", [TTFT, TPOT])
def test_a_header_that_is_no_target_is_refused(ask: Ask, key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key}: is 0, must be in"):
        ask("x", (key, "0"))


@pytest.mark.thorough
def test_a_header_makes_a_request_urgent(server: Server, ask: Ask) -> None:
    """It waits behind another one and is served before it."""
    order: list[str] = []
    patient = ask_by_grpc(server, max_tokens=400)  # it ends long after the other one

    def timed(name: str, ask: Ask, *headers: tuple[str, str]) -> None:
        ask(name, *headers)
        order.append(name)

    with grpc.insecure_channel(server.address) as channel, ThreadPoolExecutor(2) as threads:
        control = control_pb2_grpc.ControlStub(channel)
        running = inference_pb2_grpc.InferenceStub(channel).Generate(request("it runs", 10_000))
        next(running)
        first = threads.submit(timed, "patient", patient)
        while engine_load(control).waiting < 1:
            time.sleep(0.01)
        second = threads.submit(timed, "urgent", ask, (TTFT, "5000"))
        while engine_load(control).waiting < 2:
            time.sleep(0.01)
        running.cancel()
        first.result()
        second.result()
    assert order == ["urgent", "patient"]

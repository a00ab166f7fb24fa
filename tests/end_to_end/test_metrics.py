"""The page of metrics of a real server with two routers, and who may read it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagoda.v1 import inference_pb2_grpc
from tests.end_to_end.asking import Answer, request
from tests.servers import Server, running_server

RIGHTS = {"acme": "", "operators": '"observe", "act_for_tenants"'}
CALLS = 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    tenants: Path = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    tenants.write_text(
        "".join(
            f'[[token]]\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
            f'tenant = "{name}"\nrights = [{rights}]\n'
            for name, rights in RIGHTS.items()
        )
    )
    with running_server(
        "--model", "synthetic", "--step-ms", "2", "--workers", "2", "--http", "127.0.0.1:0", "--max-requests", "20",
        "--tenants-file", str(tenants),
    ) as server:  # fmt: skip
        yield server


def metadata(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


@contextlib.contextmanager
def stub(server: Server) -> Iterator[inference_pb2_grpc.InferenceStub]:
    """Over a connection of its own, which may reach either router."""
    with grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def generate(inference: inference_pb2_grpc.InferenceStub, max_tokens: int, token: str) -> Answer:
    return Answer(list(inference.Generate(request("x", max_tokens), metadata=metadata(token), timeout=60)))


def scraped(server: Server) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    asked = urllib.request.Request(f"{server.http}/metrics", headers=dict(metadata("operators")))
    with urllib.request.urlopen(asked, timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            (sample.name, frozenset(sample.labels.items()) - {("model_name", "synthetic")}): sample.value
            for family in families
            for sample in family.samples
        }


def value(page: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    return page.get((name, frozenset(labels.items())), 0.0)


@pytest.mark.parametrize(("token", "code"), [("", 401), ("wrong", 401), ("acme", 403)])
def test_only_those_who_may_observe_read_it(server: Server, token: str, code: int) -> None:
    asked = urllib.request.Request(f"{server.http}/metrics", headers=dict(metadata(token)) if token else {})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(asked, timeout=30)
    assert caught.value.code == code


def test_any_router_tells_what_all_have_counted(server: Server) -> None:
    before = scraped(server)
    with contextlib.ExitStack() as stack:
        for _ in range(CALLS):
            assert len(generate(stack.enter_context(stub(server)), 20, "acme").ids()) == 20
        with pytest.raises(grpc.RpcError):
            generate(stack.enter_context(stub(server)), 20, "wrong")
        with pytest.raises(grpc.RpcError):
            generate(stack.enter_context(stub(server)), 0, "acme")
    body = json.dumps({"prompt": "x", "max_tokens": 20, "ignore_eos": True}).encode()
    asked = urllib.request.Request(f"{server.http}/v1/completions", body, dict(metadata("acme")))
    with urllib.request.urlopen(asked, timeout=30) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 20
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"{server.http}/v1/models", timeout=30)
    seen = [scraped(server) for _ in range(6)]  # each over a connection of its own

    def grown(name: str, **labels: str) -> set[float]:
        return {value(page, name, **labels) - value(before, name, **labels) for page in seen}

    assert grown("pagoda_calls_total", method="Generate", code="OK", reason="") == {CALLS + 1}
    assert grown("pagoda_calls_total", method="Generate", code="UNAUTHENTICATED", reason="") == {1}
    assert grown("pagoda_calls_total", method="other", code="UNAUTHENTICATED", reason="") == {1}
    assert grown("pagoda_calls_total", method="Generate", code="INVALID_ARGUMENT", reason="") == {1}
    assert grown("vllm:generation_tokens_total", engine="0") == {20 * (CALLS + 1)}
    assert grown("vllm:request_success_total", engine="0", finished_reason="length") == {CALLS + 1}
    assert grown("vllm:time_to_first_token_seconds_count", engine="0") == {CALLS + 1}
    (gaps,) = grown("vllm:inter_token_latency_seconds_count", engine="0")
    assert 0 < gaps <= 19 * (CALLS + 1), "tokens that come together have no gap between them"
    assert grown("pagoda_tenant_service_total", engine="0", tenant="acme") != {0.0}
    for page in seen:
        assert value(page, "pagoda_admitted_requests_limit") == 20
        assert value(page, "vllm:cache_config_info", engine="0", block_size="4", num_gpu_blocks="32768") == 1
        for router in "01":
            assert value(page, "process_resident_memory_bytes", router=router) > 1e6


def test_a_router_that_dies_is_left_out_and_counts_from_0_when_it_is_back(server: Server) -> None:
    (victim, *_) = [
        child
        for child in psutil.Process(server.process.pid).children()
        if "pagoda_server.router.process.main" in child.cmdline()
    ]
    victim.kill()
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError):  # the connection was that router's
            page = scraped(server)
            memory = [router for router in "01" if value(page, "process_resident_memory_bytes", router=router)]
            counted = value(page, "pagoda_calls_total", method="Generate", code="OK", reason="")
            assert counted <= CALLS + 1
            if len(memory) == 2 and value(page, "pagoda_engine_up", engine="0"):
                break
        assert time.monotonic() < deadline
        time.sleep(0.1)

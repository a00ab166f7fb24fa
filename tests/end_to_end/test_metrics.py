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
from typing import Any

import grpc
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagoda.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from pagoda_server.engine.serving.session import LOAD_EVERY_S
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


def settled() -> None:
    """Wait until each router has heard of the last step: one without sequences in it hears of it a moment later."""
    time.sleep(2 * LOAD_EVERY_S)


def scraped(server: Server) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    asked = urllib.request.Request(f"{server.http}/metrics", headers=dict(metadata("operators")))
    with urllib.request.urlopen(asked, timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            (sample.name, frozenset(sample.labels.items()) - {("model_name", "synthetic")}): sample.value
            for family in families
            for sample in family.samples
        }


def scraped_with(server: Server, number: float, name: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The page once the engine's figure has this value: each router hears of the last step when it reads of it."""
    deadline = time.monotonic() + 60
    while (found := value(page := scraped(server), name, engine="0")) != number:
        assert time.monotonic() < deadline, f"{name} is {found}, not {number}"
        time.sleep(0.01)
    return page


def value(page: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    return page.get((name, frozenset(labels.items())), 0.0)


@pytest.mark.parametrize(("token", "code"), [("", 401), ("wrong", 401), ("acme", 403)])
def test_only_those_who_may_observe_read_it(server: Server, token: str, code: int) -> None:
    asked = urllib.request.Request(f"{server.http}/metrics", headers=dict(metadata(token)) if token else {})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(asked, timeout=30)
    assert caught.value.code == code


def test_any_router_tells_what_all_have_counted(server: Server) -> None:
    settled()
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
    settled()
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


def test_drafts_and_forced_tokens_add_up_to_what_the_answers_tell(server: Server) -> None:
    """Only one token is allowed, so the output repeats itself, and every draft that repeats it is accepted."""
    repeating = request("aaaaaaaa", 40)
    repeating.sampling.allowed_token_ids.append(ord("a"))
    guided = request("x", 40)
    guided.guided.regex = "[xy]abcdefgh"
    settled()
    before, told = scraped(server), inference_pb2.Usage()
    deadline = time.monotonic() + 120
    with stub(server) as inference:
        while not (told.accepted_tokens and told.forced_tokens):
            assert time.monotonic() < deadline, "nothing was drafted, though a step costs the same with drafts"
            for message in (repeating, guided):
                *_, last = inference.Generate(message, metadata=metadata("acme"), timeout=60)
                told.completion_tokens += last.usage.completion_tokens
                told.drafted_tokens += last.usage.drafted_tokens
                told.accepted_tokens += last.usage.accepted_tokens
                told.forced_tokens += last.usage.forced_tokens
    num_tokens = value(before, "pagoda_generation_tokens_total", engine="0") + told.completion_tokens
    page = scraped_with(server, num_tokens, "pagoda_generation_tokens_total")

    def grown(name: str) -> float:
        return value(page, name, engine="0") - value(before, name, engine="0")

    for prefix in ("pagoda_", "vllm:"):
        assert grown(f"{prefix}spec_decode_num_draft_tokens_total") == told.drafted_tokens
        assert grown(f"{prefix}spec_decode_num_accepted_tokens_total") == told.accepted_tokens
        assert 0 < grown(f"{prefix}spec_decode_num_drafts_total") <= told.drafted_tokens
    assert grown("pagoda_forced_tokens_total") == told.forced_tokens
    settled()
    with grpc.insecure_channel(server.address) as channel:
        control, engine = control_pb2_grpc.ControlStub(channel), control_pb2.EngineLoad()
        while engine.output_tokens != num_tokens:
            assert time.monotonic() < deadline
            load = control.GetLoad(control_pb2.GetLoadRequest(), metadata=metadata("operators"), timeout=60)
            (engine,) = load.engines
    told_by_load = (engine.drafts, engine.drafted_tokens, engine.accepted_tokens, engine.forced_tokens)
    names = [f"spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens")]
    assert told_by_load == tuple(value(page, f"pagoda_{name}_total", engine="0") for name in (*names, "forced_tokens"))


@pytest.mark.parametrize("method", ["Embed", "Score"])
def test_embed_and_score_count_as_generate_does_under_their_own_names(server: Server, method: str) -> None:
    text, calls = "what is read", 5
    messages: dict[str, Any] = {
        "Embed": inference_pb2.EmbedRequest(inputs=[{"text": text}]),
        "Score": inference_pb2.ScoreRequest(prompt=text[:4], continuations=[{"text": text[4:]}]),
    }
    settled()
    before = scraped(server)
    with contextlib.ExitStack() as stack:
        for _ in range(calls):  # each over a connection of its own: both routers have some of them
            ask = getattr(stack.enter_context(stub(server)), method)
            assert ask(messages[method], metadata=metadata("acme"), timeout=60).usage.prompt_tokens == len(text)
    if method == "Embed":
        body = json.dumps({"input": text}).encode()
        calls += 1
        with urllib.request.urlopen(
            urllib.request.Request(f"{server.http}/v1/embeddings", body, dict(metadata("acme"))), timeout=30
        ) as answer:
            assert json.load(answer)["usage"]["prompt_tokens"] == len(text)
    num_tokens = value(before, "vllm:prompt_tokens_total", engine="0") + calls * len(text)
    page = scraped_with(server, num_tokens, "vllm:prompt_tokens_total")

    def grown(name: str, **labels: str) -> float:
        return value(page, name, **labels) - value(before, name, **labels)

    assert grown("pagoda_calls_total", method=method, code="OK", reason="") == calls
    assert grown("vllm:e2e_request_latency_seconds_count", engine="0", method=method) == calls
    assert grown("vllm:e2e_request_latency_seconds_sum", engine="0", method=method) > 0
    assert grown("vllm:request_prefill_time_seconds_sum", engine="0", method=method) > 0
    assert grown("vllm:request_prompt_tokens_sum", engine="0", method=method) == calls * len(text)
    assert grown("vllm:e2e_request_latency_seconds_count", engine="0", method="Generate") == 0


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

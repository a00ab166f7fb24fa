"""Tenants that do not trust each other, on one server: what each can learn of the other, do to it, and use."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import psutil
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from pagoda import Client
from pagoda.errors import Overloaded
from pagoda.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    control_pb2,
    control_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    trace_pb2,
)
from pagoda_server.engine.runners.synthetic import expected_tokens
from pagoda_server.router.adapters.protocols import kserve_pb2, vllm_engine_pb2
from tests.end_to_end.asking import Answer, request
from tests.servers import Server, running_server

Metadata: TypeAlias = tuple[tuple[str, str], ...]

RIGHTS = {
    "acme": [],
    "brown": [],
    "small": [],
    "operators": ["admin", "observe"],
    "gateway": ["act_for_tenants"],
}
QUOTAS = "[tenant.small]\nmax_requests = 2\ntokens_per_minute = 30_000\n"
SYNTHETIC = ("--model", "synthetic", "--step-ms", "2")
LONG = "a prompt that fills some blocks of the cache, long enough to be found there again: " * 2


def tenants_file(*names: str) -> str:
    """A file with the token "token of NAME" for each tenant."""
    return QUOTAS + "".join(
        f'[[token]]\nsha256 = "{hashlib.sha256(f"token of {name}".encode()).hexdigest()}"\n'
        f'tenant = "{name}"\nrights = {RIGHTS[name]}\n'
        for name in names
    )


def by(name: str, *, acting_for: str | None = None) -> Metadata:
    """Metadata of a tenant's call."""
    token = (("authorization", f"Bearer token of {name}"),)
    return token if acting_for is None else (*token, ("x-pagoda-tenant", acting_for))


ACME, BROWN, OPERATORS = by("acme"), by("brown"), by("operators")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    path.write_text(tenants_file(*RIGHTS))
    return path


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[Server]:
    """A server of five tenants. Tests share it, and leave it and its file as they were."""
    weights = ("--policy", "fair", "--tenant-weights", "acme=2")
    with running_server(*SYNTHETIC, *weights, "--tenants-file", str(path)) as server:
        yield server


class Stubs:
    def __init__(self, channel: grpc.Channel) -> None:
        self.inference = inference_pb2_grpc.InferenceStub(channel)
        self.control = control_pb2_grpc.ControlStub(channel)
        self.admin = admin_pb2_grpc.AdminStub(channel)
        self.reflection = reflection_pb2_grpc.ServerReflectionStub(channel)

    def ask(self, metadata: Metadata, message: inference_pb2.GenerateRequest) -> Answer:
        return Answer(list(self.inference.Generate(message, metadata=metadata, timeout=60)))

    def started(self, metadata: Metadata, request_id: str, tokens: int = 20_000) -> Any:
        """A stream that has begun."""
        message = request(f"of {request_id}", max_tokens=tokens)
        message.request_id = request_id
        call = self.inference.Generate(message, metadata=metadata)
        next(call)
        return call

    def trace(self, metadata: Metadata) -> list[trace_pb2.StepTracePart]:
        return list(self.control.GetStepTrace(trace_pb2.GetStepTraceRequest(), metadata=metadata))

    def load(self, metadata: Metadata) -> control_pb2.Load:
        load: control_pb2.Load = self.control.GetLoad(control_pb2.GetLoadRequest(), metadata=metadata)
        return load

    def abort(self, metadata: Metadata, request_id: str, tenant: str | None = None) -> None:
        self.admin.Abort(admin_pb2.AbortRequest(request_id=request_id, tenant=tenant), metadata=metadata)


@pytest.fixture
def stubs(server: Server) -> Iterator[Stubs]:
    with grpc.insecure_channel(server.address) as channel:
        yield Stubs(channel)


@contextlib.contextmanager
def refused(code: grpc.StatusCode, words: str | None = None) -> Iterator[None]:
    with pytest.raises(grpc.RpcError, match=words) as caught:
        yield
    assert caught.value.code() is code, caught.value


def wait_for(what: str, is_so: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


# -- what a tenant can do to another ----------------------------------------------------------------------------------


def test_another_tenants_request_cannot_be_aborted(stubs: Stubs) -> None:
    call = stubs.started(ACME, "mine", 300)
    with refused(grpc.StatusCode.NOT_FOUND):
        stubs.abort(BROWN, "mine")
    with refused(grpc.StatusCode.PERMISSION_DENIED, "the right admin"):
        stubs.abort(BROWN, "mine", tenant="acme")
    with refused(grpc.StatusCode.PERMISSION_DENIED, "the right act_for_tenants"):
        stubs.abort(by("brown", acting_for="acme"), "mine")
    *_, last = call
    assert last.finished.reason == inference_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize(
    ("metadata", "tenant"),
    [(ACME, None), (ACME, "acme"), (OPERATORS, "acme"), (by("gateway", acting_for="acme"), None)],
)
def test_a_tenant_an_administrator_and_a_gateway_abort_a_request(
    stubs: Stubs, metadata: Metadata, tenant: str | None
) -> None:
    call = stubs.started(ACME, "to be aborted")
    stubs.abort(metadata, "to be aborted", tenant)
    assert list(call)[-1].finished.reason == inference_pb2.FINISH_REASON_CANCELLED


def test_ids_tell_nothing_of_another_tenants_requests(stubs: Stubs) -> None:
    call = stubs.started(ACME, "same")
    message = request("x", max_tokens=3)
    message.request_id = "same"
    assert len(stubs.ask(BROWN, message).ids()) == 3
    with refused(grpc.StatusCode.ALREADY_EXISTS):
        stubs.ask(ACME, message)
    call.cancel()


def test_drain_and_flush_need_the_right_to_administer(server: Server, stubs: Stubs) -> None:
    stubs.ask(ACME, request(LONG, max_tokens=1))
    for metadata in (BROWN, by("gateway", acting_for="operators")):
        with refused(grpc.StatusCode.PERMISSION_DENIED, "the right admin"):
            stubs.admin.Drain(admin_pb2.DrainRequest(), metadata=metadata)
        with refused(grpc.StatusCode.PERMISSION_DENIED, "the right admin"):
            stubs.admin.FlushCache(admin_pb2.FlushCacheRequest(), metadata=metadata)
    assert server.health() == health_pb2.HealthCheckResponse.SERVING
    assert stubs.ask(ACME, request(LONG, max_tokens=1)).responses[-1].usage.cached_tokens > 0
    assert stubs.admin.FlushCache(admin_pb2.FlushCacheRequest(), metadata=OPERATORS).freed_blocks > 0


def test_a_refusal_names_the_missing_right_for_programs(stubs: Stubs) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stubs.admin.Drain(admin_pb2.DrainRequest(), metadata=BROWN)
    status = rpc_status.from_call(caught.value)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, dict(info.metadata)) == ("RIGHT_MISSING", {"right": "admin"})


@pytest.mark.parametrize(
    ("service", "method", "message"),
    [
        ("inference", "Generate", request("x", max_tokens=1)),
        ("inference", "Tokenize", inference_pb2.TokenizeRequest(prompt="x")),
        ("inference", "Detokenize", inference_pb2.DetokenizeRequest(token_ids=[1])),
        ("control", "GetLoad", control_pb2.GetLoadRequest()),
        ("control", "WatchLoad", control_pb2.WatchLoadRequest()),
        ("control", "GetServerInfo", control_pb2.GetServerInfoRequest()),
        ("control", "ListModels", control_pb2.ListModelsRequest()),
        ("control", "GetStepTrace", trace_pb2.GetStepTraceRequest()),
        ("admin", "Abort", admin_pb2.AbortRequest(request_id="x")),
    ],
)
def test_no_call_is_for_another_tenant_without_the_right_and_none_is_without_a_token(
    stubs: Stubs, service: str, method: str, message: Any
) -> None:
    def call(*metadata: tuple[str, str]) -> None:
        answer = getattr(getattr(stubs, service), method)(message, metadata=metadata)
        if isinstance(answer, grpc.Call):
            next(answer)

    with refused(grpc.StatusCode.PERMISSION_DENIED, "the right act_for_tenants"):
        call(*by("brown", acting_for="acme"))
    for metadata in ((), by("nobody"), (("x-pagoda-tenant", "acme"),)):
        with refused(grpc.StatusCode.UNAUTHENTICATED):
            call(*metadata)


@pytest.mark.parametrize(
    "service",
    [
        vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"],
        kserve_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"],
    ],
    ids=lambda service: service.full_name,
)
def test_every_method_of_an_adapter_is_guarded(server: Server, service: Any) -> None:
    acting = (*BROWN, ("x-llm-d-inference-fairness-id", "acme"))
    with grpc.insecure_channel(server.address) as channel:
        for method in service.methods:
            call = channel.stream_stream(f"/{service.full_name}/{method.name}")
            for metadata, code in (((), grpc.StatusCode.UNAUTHENTICATED), (acting, grpc.StatusCode.PERMISSION_DENIED)):
                with pytest.raises(grpc.RpcError) as caught:
                    list(call(iter([b""]), metadata=metadata, timeout=60))
                assert caught.value.code() is code, method.name


def test_an_adapter_tells_a_tenant_no_more_than_control_does(server: Server, stubs: Stubs) -> None:
    def ask(metadata: Metadata, method: str, message: Any, kind: Any) -> Any:
        call = channel.unary_unary(f"/vllm.grpc.engine.VllmEngine/{method}", None, kind.FromString)
        return call(message.SerializeToString(), metadata=metadata, timeout=60)

    running = stubs.started(ACME, "acme-1")
    with grpc.insecure_channel(server.address) as channel:
        seen, whole = (
            ask(metadata, "GetLoads", vllm_engine_pb2.GetLoadsRequest(), vllm_engine_pb2.GetLoadsResponse).loads[0]
            for metadata in (BROWN, OPERATORS)
        )
        assert (seen.num_running_reqs, seen.num_used_tokens, seen.token_usage) == (1, 0, 0.0)
        assert (whole.num_running_reqs, whole.num_used_tokens > 0) == (1, True)
        abort = vllm_engine_pb2.AbortRequest(request_ids=["acme-1"])
        ask(BROWN, "Abort", abort, vllm_engine_pb2.AbortResponse)
        next(running)
        ask(ACME, "Abort", abort, vllm_engine_pb2.AbortResponse)
        *_, last = running
    assert last.finished.reason == inference_pb2.FINISH_REASON_CANCELLED


def test_health_is_anyones_and_reflection_needs_a_token(server: Server, stubs: Stubs) -> None:
    assert server.health() == health_pb2.HealthCheckResponse.SERVING
    listing = [reflection_pb2.ServerReflectionRequest(list_services="")]
    with refused(grpc.StatusCode.UNAUTHENTICATED):
        next(stubs.reflection.ServerReflectionInfo(iter(listing)))
    assert next(stubs.reflection.ServerReflectionInfo(iter(listing), metadata=BROWN)).list_services_response.service


# -- what a tenant can learn of another -------------------------------------------------------------------------------


def test_a_step_trace_holds_ones_own_sequences_alone(stubs: Stubs) -> None:
    calls = [stubs.started(ACME, "a secret of acme"), stubs.started(BROWN, "brown's own")]
    wait_for("a step of both", lambda: any(s.running >= 2 for part in stubs.trace(BROWN) for s in part.steps))
    seen, whole = stubs.trace(BROWN), stubs.trace(OPERATORS)
    for call in calls:
        call.cancel()
    assert b"acme" not in b"".join(part.SerializeToString() for part in seen)
    assert {move.tenant for part in whole for move in part.moves} >= {"acme", "brown"}
    theirs = {move.sequence for part in whole for move in part.moves if move.tenant != "brown"}
    mine = {move.sequence for part in seen for move in part.moves if move.request_id == "brown's own"}
    shown = {number for part in seen for step in part.steps for number in (*step.sequences, *step.idle)}
    assert mine <= shown
    assert not shown & theirs
    assert all(part.is_partial and not part.blocks_total for part in seen)
    steps = [step for part in seen for step in part.steps]
    assert all(len(step.chunk_lengths) <= len(step.sequences) and not step.blocks_free for step in steps)
    assert max(step.running for step in steps) >= 2, "others are counted"


def test_a_load_tells_of_others_only_how_many_they_are(stubs: Stubs) -> None:
    calls = [stubs.started(ACME, "a"), stubs.started(BROWN, "b")]
    wait_for("the engine's table of tenants", lambda: stubs.load(OPERATORS).num_tenants >= 2)
    own = stubs.load(BROWN)
    watched = next(stubs.control.WatchLoad(control_pb2.WatchLoadRequest(), metadata=BROWN))
    whole = stubs.load(OPERATORS)
    for call in calls:
        call.cancel()
    assert {"acme", "brown"} <= {tenant.name for tenant in whole.tenants}
    assert whole.reserved_tokens > 0
    assert whole.engines[0].output_tokens > 0
    for load in (own, watched):
        assert [tenant.name for tenant in load.tenants] == ["brown"]
        assert (load.requests, load.num_tenants >= 2) == (2, True)
        assert {field.name for field, _ in load.engines[0].ListFields()} <= {"engine", "waiting", "running"}
        assert not load.reserved_tokens
        assert load.tenants[0].share == round(load.tenants[0].share, 2)


def test_settings_that_name_tenants_are_for_those_that_may_observe(stubs: Stubs) -> None:
    def info(metadata: Metadata) -> control_pb2.ServerInfo:
        found: control_pb2.ServerInfo = stubs.control.GetServerInfo(
            control_pb2.GetServerInfoRequest(), metadata=metadata
        )
        return found

    assert info(OPERATORS).engines[0].info.settings["tenant_weights"] == "acme=2"
    seen = info(BROWN)
    assert b"acme" not in seen.SerializeToString()
    assert seen.engines[0].info.settings["policy"] == "fair"


def test_a_cached_prompt_is_found_by_its_tenant_alone(stubs: Stubs) -> None:
    def cached(metadata: Metadata, salt: str = "", text: str = "only acme knows this. " + LONG) -> int:
        message = request(text, max_tokens=1)
        message.cache.salt = salt
        tokens: int = stubs.ask(metadata, message).responses[-1].usage.cached_tokens
        return tokens

    assert cached(ACME) == 0
    assert cached(ACME) > 0
    assert cached(by("gateway", acting_for="acme")) > 0
    for salt in ("", "acme", "acme\0", hashlib.sha256(b"acme\0").hexdigest()):
        assert cached(BROWN, salt) == 0, "brown has computed it in this test at most once for each salt"
    assert cached(ACME, "another") == 0
    assert cached(ACME, "another") > 0


# -- quotas -----------------------------------------------------------------------------------------------------------


def exceeded(caught: grpc.RpcError) -> tuple[str, str, float | None]:
    """The quota that a refusal names, its limit, and the delay before a retry."""
    assert caught.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in rpc_status.from_call(caught).details:
        detail.Unpack(info)
        detail.Unpack(retry)
    assert info.reason == "QUOTA_EXCEEDED"
    delay_s = retry.retry_delay.ToTimedelta().total_seconds() if retry.HasField("retry_delay") else None
    return info.metadata["quota"], info.metadata["limit"], delay_s


def test_quotas_hold_one_tenant_and_no_other(server: Server, stubs: Stubs) -> None:
    small = by("small")
    calls = [stubs.started(small, f"{at}", 10_000) for at in range(2)]
    with pytest.raises(grpc.RpcError) as caught:
        stubs.ask(small, request("third", max_tokens=1))
    assert exceeded(caught.value)[:2] == ("max_requests", "2")
    with pytest.raises(grpc.RpcError) as caught:
        stubs.ask(by("gateway", acting_for="small"), request("third", max_tokens=1))
    assert exceeded(caught.value)[0] == "max_requests"
    assert stubs.ask(ACME, request("third", max_tokens=3)).ids()
    for call in calls:
        call.cancel()
    wait_for("places", lambda: stubs.load(small).requests == 0)


@pytest.mark.thorough
def test_servers_that_share_no_file_keep_a_quota_together(path: Path) -> None:
    arguments = (*SYNTHETIC, "--tenants-file", str(path), "--quota-hosts", "2")
    small = by("small")
    with contextlib.ExitStack() as stack:
        running = []
        for _ in range(2):
            server = stack.enter_context(running_server(*arguments))
            channel = stack.enter_context(grpc.insecure_channel(server.address))
            inference = inference_pb2_grpc.InferenceStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                list(inference.Generate(request("more than a part", max_tokens=16_000), metadata=small))
            assert exceeded(caught.value) == ("tokens_per_minute", "15000", None)
            running.append(inference.Generate(request("one of two", max_tokens=10_000), metadata=small))
            next(running[-1])
            with pytest.raises(grpc.RpcError) as caught:
                list(inference.Generate(request("another one", max_tokens=1), metadata=small))
            assert exceeded(caught.value)[:2] == ("max_requests", "1")
        for call in running:
            next(call)
            call.cancel()


@pytest.mark.thorough
def test_tokens_are_reserved_for_the_longest_answer_and_come_back_if_it_is_shorter(
    server: Server, stubs: Stubs
) -> None:
    small = by("small")
    with pytest.raises(grpc.RpcError) as caught:
        stubs.ask(small, request("longer than the quota", max_tokens=31_000))
    assert exceeded(caught.value) == ("tokens_per_minute", "30000", None)
    began = time.monotonic()
    call = stubs.started(small, "most of it", 29_500)
    with pytest.raises(grpc.RpcError) as caught:
        stubs.ask(small, request("the rest and more", max_tokens=20_000))
    quota, _, delay_s = exceeded(caught.value)
    assert quota == "tokens_per_minute"
    assert delay_s is not None
    assert 0 < delay_s < 40  # 500 tokens come each second
    with Client(server.address, token="token of small") as client:  # it waits as it is told
        assert next(client.generate(prompt="the rest and more", max_tokens=2000)).tokens
    assert time.monotonic() - began > 1500 / 500
    wait_for("the place of what that client no longer reads", lambda: stubs.load(small).requests == 1)
    with pytest.raises(grpc.RpcError) as caught:
        stubs.ask(small, request("more again", max_tokens=20_000))
    assert exceeded(caught.value)[0] == "tokens_per_minute"
    call.cancel()
    wait_for("the tokens that it did not use", lambda: stubs.load(small).requests == 0)
    stubs.started(small, "again", 20_000).cancel()


def test_the_tokens_of_all_inputs_and_continuations_count(stubs: Stubs) -> None:
    small, text = by("small"), "x" * 4000
    many = inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(text=text)] * 8)
    with pytest.raises(grpc.RpcError) as caught:
        stubs.inference.Embed(many, metadata=small)
    assert exceeded(caught.value) == ("tokens_per_minute", "30000", None)
    wait_for("places", lambda: stubs.load(small).reserved_tokens == 0)
    parts = [inference_pb2.Continuation(text=text)] * 7 + [inference_pb2.Continuation(text="x")] * 100
    with pytest.raises(grpc.RpcError) as caught:
        stubs.inference.Score(inference_pb2.ScoreRequest(prompt=text, continuations=parts), metadata=small)
    assert exceeded(caught.value) == ("tokens_per_minute", "30000", None)
    shared = inference_pb2.ScoreRequest(prompt="y" * 2000, continuations=parts[-100:])
    response = stubs.inference.Score(shared, metadata=ACME)
    assert response.usage.prompt_tokens == 2100, "the input counts once"


def test_what_is_scored_is_found_in_the_cache_by_its_tenant_alone(stubs: Stubs) -> None:
    message = inference_pb2.ScoreRequest(prompt="scored by acme alone. " + LONG)
    message.continuations.add(text="x")
    found = [stubs.inference.Score(message, metadata=who).usage.cached_tokens for who in (ACME, ACME, BROWN)]
    assert found[0] == found[2] == 0
    assert found[1] > 0


def test_a_client_is_told_which_kind_of_overload_it_is(server: Server) -> None:
    with Client(server.address, token="token of small", retries=0) as client:
        with pytest.raises(Overloaded) as caught:
            list(client.generate(prompt="x", max_tokens=31_000))
        assert caught.value.reason == "QUOTA_EXCEEDED"


# -- the file ---------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_file_is_read_again_when_it_changes_and_a_wrong_one_changes_nothing(
    server: Server, stubs: Stubs, path: Path
) -> None:
    def replace(text: str) -> None:
        path.with_name("new").write_text(text)
        os.replace(path.with_name("new"), path)

    def knows(name: str) -> bool:
        try:
            stubs.load(by(name))
            return True
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return False
            raise

    running = stubs.started(BROWN, "runs on")
    try:
        replace(tenants_file("acme")[:-20])
        wait_for("a line about the wrong file", lambda: "the tenants stay as they were" in server.log.read_text())
        assert knows("brown")
        replace(tenants_file("acme"))
        wait_for("the end of brown's token", lambda: not knows("brown"))
        assert knows("acme")
        line = next(line for line in server.log.read_text().splitlines() if "stay as they were" in line)
        assert "tenants.toml: " in line
        assert "(at " in line
        path.unlink()
        wait_for("a line about no file", lambda: "cannot read" in server.log.read_text())
        assert knows("acme")
        replace("# tenants\n")
        wait_for("a line about no tenants", lambda: "has no [[token]]" in server.log.read_text())
        assert knows("acme")
        path.unlink()
        os.mkfifo(path)
        wait_for("a line about the FIFO", lambda: "is not a regular file" in server.log.read_text())
        assert knows("acme")
        path.unlink()
        assert next(running).tokens, "a stream outlives its token"
    finally:
        running.cancel()
        replace(tenants_file(*RIGHTS))
        wait_for("brown's token", lambda: knows("brown"))


def test_a_wrong_file_ends_the_start_with_one_line(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text("[[token]]\ntenant = 'a'\n")
    command = [sys.executable, "-m", "pagoda_server.cli", "serve", *SYNTHETIC, "--tenants-file", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: --tenants-file: ")
    assert line.endswith("[[token]] number 1: sha256 must be a SHA-256 in 64 hexadecimal digits, in lower case")


# -- several routers --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_of_it_holds_over_several_routers(path: Path) -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]  # the kernel spreads connections over the routers
    with (
        running_server(*SYNTHETIC, "--workers", "2", "--tenants-file", str(path)) as server,
        contextlib.ExitStack() as stack,
    ):
        channels = [stack.enter_context(grpc.insecure_channel(server.address, options=options)) for _ in range(10)]
        several = [Stubs(channel) for channel in channels]

        def is_ready(stubs: Stubs) -> bool:
            with contextlib.suppress(grpc.RpcError):
                return bool(stubs.ask(ACME, request("x", max_tokens=1)).ids())
            return False

        wait_for("the engine, at each router", lambda: all(map(is_ready, several)))
        call = several[0].started(ACME, "mine")
        for stubs in several:
            with refused(grpc.StatusCode.NOT_FOUND):
                stubs.abort(BROWN, "mine")
            with refused(grpc.StatusCode.PERMISSION_DENIED, "the right admin"):
                stubs.abort(BROWN, "mine", tenant="acme")
            with refused(grpc.StatusCode.PERMISSION_DENIED, "the right admin"):
                stubs.admin.Drain(admin_pb2.DrainRequest(), metadata=BROWN)
            load = stubs.load(BROWN)
            assert (load.requests, load.reserved_tokens, list(load.tenants)) == (1, 0, [])
            assert stubs.load(OPERATORS).reserved_tokens > 20_000
        several[-1].abort(OPERATORS, "mine", tenant="acme")
        assert list(call)[-1].finished.reason == inference_pb2.FINISH_REASON_CANCELLED
        calls, refusals = [], []
        for stubs in several:  # all routers together have the two places
            try:
                calls.append(stubs.started(by("small"), f"{len(calls)}", 1000))
            except grpc.RpcError as error:
                refusals.append(exceeded(error)[:2])
        assert len(calls) == 2
        assert refusals == [("max_requests", "2")] * (10 - len(calls))
        for stubs in several:
            assert stubs.ask(BROWN, request("free", 20)).ids() == expected_tokens(b"free", 20, 258)


@pytest.mark.slow
def test_a_router_that_starts_late_waits_for_a_right_file_while_the_others_serve(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(tenants_file("acme"))
    options = [("grpc.use_local_subchannel_pool", 1)]

    def listening(server: Server) -> int:
        """How many routers listen, each at the shared port."""
        port = int(server.address.rpartition(":")[2])
        links = [link for child in psutil.Process(server.process.pid).children() for link in child.net_connections()]
        return sum(link.status == psutil.CONN_LISTEN and link.laddr.port == port for link in links)

    with running_server(*SYNTHETIC, "--workers", "2", "--tenants-file", str(path)) as server:
        assert listening(server) == 2
        path.write_text("[[token")
        next(
            child
            for child in psutil.Process(server.process.pid).children()
            if "pagoda_server.router.process.main" in child.cmdline()
        ).kill()
        wait_for("the new router", lambda: "this router waits for its tenants" in server.log.read_text())
        assert listening(server) == 1
        for _ in range(8):
            with grpc.insecure_channel(server.address, options=options) as channel:
                assert Stubs(channel).ask(ACME, request("x", max_tokens=2)).ids()
        path.write_text(tenants_file("acme"))
        wait_for("both routers", lambda: listening(server) == 2)


def test_a_fifo_in_place_of_the_file_keeps_no_server_from_ending(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(tenants_file("acme"))
    with running_server(*SYNTHETIC, "--tenants-file", str(path)) as server:
        path.unlink()
        os.mkfifo(path)
        wait_for("a line about the FIFO", lambda: "is not a regular file" in server.log.read_text())
        assert server.stop(timeout_s=30) == 0

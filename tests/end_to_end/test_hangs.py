"""Engines that hang: a process that is stopped, or one whose loop alone is stuck while its other threads answer."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagoda.v1 import control_pb2, control_pb2_grpc, inference_pb2_grpc
from pagoda_server.engine.runners.synthetic import expected_tokens
from tests.end_to_end.asking import Answer, ask, request
from tests.servers import Server, free_address, running_engine, running_server

pytestmark = pytest.mark.thorough

MODEL = ("--model", "synthetic")
FAST = (*MODEL, "--step-ms", "2")
STUCK = (*MODEL, "--step-ms", "3000000")  # its first step sleeps in the loop's thread; the other threads live on
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
CHANNELS = pytest.mark.parametrize("transport", ["grpc", "shm"])
LATE_S = 5.0  # for what follows the hang timeout, on a machine that does other things


def until(is_so: Callable[[], bool], timeout_s: float) -> float:
    """Wait until something is so; return how many seconds that took."""
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < timeout_s, f"not within {timeout_s} s"
        time.sleep(0.02)
    return time.monotonic() - began


def is_lost(server: Server, timeout_s: float) -> bool:
    """Whether a call with this deadline gets no answer."""
    with grpc.insecure_channel(server.address) as channel:
        try:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(request("x", max_tokens=3), timeout=timeout_s)
            return Answer(list(call)).ids() != expected_tokens(b"x", 3, 258)
        except grpc.RpcError as error:
            return error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)


@contextlib.contextmanager
def short_calls(server: Server, timeout_s: float) -> Iterator[None]:
    """Clients call all the time with a deadline."""
    stop = threading.Event()

    def call() -> None:
        while not stop.is_set():
            is_lost(server, timeout_s)
            time.sleep(0.01)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def status_of_healthz(server: Server) -> int:
    try:
        with urllib.request.urlopen(f"{server.http}/healthz", timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


@CHANNELS
def test_an_engine_that_hangs_is_given_up_and_replaced(transport: str) -> None:
    arguments = (*FAST, "--hang-timeout-s", "3", "--channel", transport)
    with running_server(*arguments) as server, grpc.insecure_channel(server.address) as channel:
        inference = inference_pb2_grpc.InferenceStub(channel)
        call = inference.Generate(request("stuck", max_tokens=20_000))
        next(call)
        server.engine().suspend()
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        server.wait_ready()
        assert ask(inference, request("after", max_tokens=3)).ids()


@CHANNELS
def test_clients_with_short_deadlines_do_not_hide_a_hang(transport: str) -> None:
    with running_server(*FAST, "--hang-timeout-s", "4", "--channel", transport) as server:
        engine = server.engine()
        with short_calls(server, timeout_s=1.0):
            engine.suspend()
            assert until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, 4 + LATE_S) > 3
            until(lambda: not is_lost(server, 1.0), 60)
        assert server.engine().pid != engine.pid


@CHANNELS
def test_an_idle_engine_that_hangs_is_noticed_and_replaced(transport: str) -> None:
    with running_server(*FAST, "--hang-timeout-s", "3", "--channel", transport, "--http", "127.0.0.1:0") as server:
        engine = server.engine()
        assert status_of_healthz(server) == 200
        engine.suspend()
        until(lambda: status_of_healthz(server) == 503 or server.engines() != [engine], 3 + LATE_S)
        server.wait_ready()
        assert server.engine().pid != engine.pid
        assert not is_lost(server, 30)


def test_an_engine_whose_loop_alone_is_stuck_is_replaced() -> None:
    with running_server(*STUCK, "--hang-timeout-s", "3") as server:
        engine = server.engine()
        with short_calls(server, timeout_s=1.0):
            until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, 4 + LATE_S)
        server.wait_ready()
        assert "hangs: it has not answered for 3 s" in server.log.read_text()


def test_several_routers_replace_an_engine_that_hangs_once() -> None:
    with running_server(*FAST, "--workers", "2", "--hang-timeout-s", "3") as server:
        engine = server.engine()
        engine.suspend()
        until(lambda: server.engines() not in ([engine], []), 30)
        replaced = server.engine()
        server.wait_ready()
        time.sleep(4)  # a router that is late would give up this one, too
        assert server.engine().pid == replaced.pid
        with grpc.insecure_channel(server.address) as channel:
            info = control_pb2_grpc.ControlStub(channel).GetServerInfo(control_pb2.GetServerInfoRequest())
        assert [status.restarts for status in info.engines] == [1]


@pytest.mark.parametrize("transport", ["unix", "tcp", "shm"])
def test_an_idle_attached_engine_that_is_stopped_is_unhealthy_until_it_continues(
    tmp_path: Path, transport: str
) -> None:
    listen = free_address() if transport == "tcp" else f"{transport}:{tmp_path / 'engine.sock'}"
    attached = ("--engine", listen, "--hang-timeout-s", "3", "--http", "127.0.0.1:0")
    with running_engine(listen, *FAST) as engine, running_server(*MODEL, *attached) as server:
        engine.send_signal(signal.SIGSTOP)
        assert until(lambda: server.health() == NOT_SERVING, 3 + LATE_S) > 2
        assert status_of_healthz(server) == 503
        engine.send_signal(signal.SIGCONT)
        server.wait_ready(30)
        assert status_of_healthz(server) == 200
        assert not is_lost(server, 30)


@pytest.mark.parametrize(("transport", "fault"), [("unix", "stuck"), ("tcp", "stopped"), ("shm", "stopped")])
def test_beside_a_healthy_engine_one_that_hangs_loses_one_call_at_most_once_it_is_found(
    tmp_path: Path, transport: str, fault: str
) -> None:
    def listen(name: str) -> str:
        return free_address() if transport == "tcp" else f"{transport}:{tmp_path / name}"

    addresses = [listen("bad"), listen("good")]
    attached = ("--engine", ",".join(addresses), "--hang-timeout-s", "4")
    with (
        running_engine(addresses[0], *(STUCK if fault == "stuck" else FAST)) as bad,
        running_engine(addresses[1], *FAST),
        running_server(*MODEL, *attached) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        control = control_pb2_grpc.ControlStub(channel)
        until(lambda: len(control.GetLoad(control_pb2.GetLoadRequest()).engines) == 2, 60)
        if fault == "stopped":
            bad.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        lost_before, lost_after, answered = 0, 0, 0
        while time.monotonic() - began < 16:
            is_found = "hangs: it has not answered for 4 s" in server.log.read_text()
            if not is_lost(server, 1.5):
                answered += 1
                time.sleep(0.02)
            elif is_found:
                lost_after += 1
            else:
                lost_before += 1
        assert lost_before <= 2, "while it is late with an answer, the other engine is asked"
        assert lost_after == 0
        assert answered > 20
        assert server.log.read_text().count("hangs: it has not answered") == 1
        assert server.health() == SERVING


def test_the_health_of_an_engine_follows_its_loop(tmp_path: Path) -> None:
    listen = f"unix:{tmp_path / 'engine.sock'}"
    with (
        running_engine(listen, *MODEL, "--step-ms", "8000", "--hang-timeout-s", "2"),
        running_server(*MODEL, "--engine", listen, "--hang-timeout-s", "30") as server,
        grpc.insecure_channel(listen) as engine,
        grpc.insecure_channel(server.address) as router,
    ):

        def health() -> health_pb2.HealthCheckResponse.ServingStatus:
            return health_pb2_grpc.HealthStub(engine).Check(health_pb2.HealthCheckRequest(), timeout=5).status

        assert health() == SERVING
        call = inference_pb2_grpc.InferenceStub(router).Generate(request("one step", max_tokens=1))
        assert until(lambda: health() == NOT_SERVING, 2 + LATE_S) > 1
        list(call)
        until(lambda: health() == SERVING, LATE_S)


def test_an_attached_engine_that_was_stuck_serves_again_once_its_loop_answers(tmp_path: Path) -> None:
    listen = f"shm:{tmp_path / 'engine.sock'}"
    with (
        running_engine(listen, *MODEL, "--step-ms", "8000"),
        running_server(*MODEL, "--engine", listen, "--hang-timeout-s", "2") as server,
    ):
        assert is_lost(server, 0.5)
        until(lambda: server.health() == NOT_SERVING, 2 + LATE_S)
        assert server.health() == NOT_SERVING, "its other threads greet the router, but that does not count"
        server.wait_ready(30)


def test_a_step_that_takes_nearly_the_hang_timeout_is_no_hang() -> None:
    with (
        running_server(*MODEL, "--step-ms", "3500", "--hang-timeout-s", "4") as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        engine = server.engine()
        answer = ask(inference_pb2_grpc.InferenceStub(channel), request("slow", max_tokens=3))
        assert answer.ids() == expected_tokens(b"slow", 3, 258)
        assert server.engine().pid == engine.pid


def test_a_router_that_was_stopped_does_not_take_its_engine_for_hung() -> None:
    with (
        running_server(*MODEL, "--step-ms", "600", "--hang-timeout-s", "1.5") as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        engine, router = server.engine(), psutil.Process(server.process.pid)
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request("patience", max_tokens=14))
        responses = [next(call)]
        for _ in range(3):
            router.suspend()  # most likely while a step runs and a ping waits for its end
            time.sleep(2.5)
            router.resume()
            time.sleep(0.3)
        assert Answer([*responses, *call]).ids() == expected_tokens(b"patience", 14, 258)
        assert server.engine().pid == engine.pid

"""Several router processes on one port give a client the same guarantees as one."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagoda.v1 import admin_pb2, admin_pb2_grpc, control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from pagoda_server.engine.runners.synthetic import expected_tokens
from tests.end_to_end.asking import Answer, ask, request
from tests.servers import Server, running_server

pytestmark = pytest.mark.thorough

WORKERS = 2
HANG_TOKENS = 2000  # of streams that run when a router stops
MANY = 20  # connections, which do not all reach the same router
PROCESSES = 1 + WORKERS * 2  # the engine, and each router with the process that renders its chats
ARGUMENTS = ("--model", "synthetic", "--step-ms", "2", "--workers", str(WORKERS))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server with all of its processes, which are running again after each test."""
    with running_server(*ARGUMENTS, "--max-requests", "33") as server:
        yield server


def routers(server: Server) -> list[psutil.Process]:
    return [child for child in psutil.Process(server.process.pid).children() if _is_router(child)]


def _is_router(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # one may end after it was listed
        is_running = process.status() != psutil.STATUS_ZOMBIE
        return is_running and "pagoda_server.router.process.main" in process.cmdline()
    return False


def wait_for(what: str, is_so: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


@contextlib.contextmanager
def connections(server: Server, count: int) -> Iterator[list[grpc.Channel]]:
    """Separate connections to ready routers: the kernel spreads connections, not calls, over the routers."""
    with contextlib.ExitStack() as stack:
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [stack.enter_context(grpc.insecure_channel(server.address, options=options)) for _ in range(count)]
        for channel in channels:
            wait_for("each router has the engine", partial(is_serving, channel))
        yield channels


def held_by(server: Server) -> list[int]:
    """The client connections of each router."""
    port = int(server.address.rpartition(":")[2])
    return [
        sum(link.status == psutil.CONN_ESTABLISHED and link.laddr.port == port for link in router.net_connections())
        for router in routers(server)
    ]


def is_serving(channel: grpc.Channel) -> bool:
    status = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60).status
    return bool(status == health_pb2.HealthCheckResponse.SERVING)


def running_of(control: control_pb2_grpc.ControlStub, tenant: str) -> int:
    tenants = control.GetLoad(control_pb2.GetLoadRequest()).tenants
    return sum(found.running for found in tenants if found.name == tenant)


def test_streams_spread_over_the_routers_and_their_answers_are_right(server: Server) -> None:
    with connections(server, MANY) as channels:
        calls = [
            inference_pb2_grpc.InferenceStub(channel).Generate(request(f"{at}", max_tokens=300))
            for at, channel in enumerate(channels)
        ]
        first = [next(call) for call in calls]
        assert len(held_by(server)) == WORKERS
        assert all(held_by(server))
        for at, (head, call) in enumerate(zip(first, calls, strict=True)):
            assert len(Answer([head, *call]).ids()) == 300
            assert ask(inference_pb2_grpc.InferenceStub(channels[at]), request(f"{at}", 20)).ids() == expected_tokens(
                f"{at}".encode(), 20, 258
            )


def test_load_and_limits_are_those_of_all_routers_whichever_is_asked(server: Server) -> None:
    with connections(server, MANY) as channels:
        assert all(held_by(server))
        calls = [
            inference_pb2_grpc.InferenceStub(channel).Generate(
                request(f"{at}", max_tokens=30_000), metadata=(("x-pagoda-tenant", "ann"),)
            )
            for at, channel in enumerate(channels)
        ]
        for call in calls:
            next(call)
        for channel in channels:
            control = control_pb2_grpc.ControlStub(channel)
            wait_for("every stream is ann's", lambda control=control: running_of(control, "ann") == MANY)
            assert control.GetLoad(control_pb2.GetLoadRequest()).requests == MANY
            assert next(control.WatchLoad(control_pb2.WatchLoadRequest())).requests == MANY
            info = control.GetServerInfo(control_pb2.GetServerInfoRequest())
            assert (info.limits.max_requests, info.settings["max_requests"]) == (33, "33")
        for call in calls:
            call.cancel()
        control = control_pb2_grpc.ControlStub(channels[0])
        wait_for("no request", lambda: control.GetLoad(control_pb2.GetLoadRequest()).requests == 0)


def test_abort_reaches_the_router_that_has_the_request(server: Server) -> None:
    with connections(server, MANY) as channels:
        assert all(held_by(server))
        message = request("to be aborted", max_tokens=30_000)
        message.request_id = "mine"
        for channel in channels[1:]:  # some are the other router's
            call = inference_pb2_grpc.InferenceStub(channels[0]).Generate(message)
            next(call)
            admin_pb2_grpc.AdminStub(channel).Abort(admin_pb2.AbortRequest(request_id="mine"))
            assert Answer(list(call)).finished().reason == 3  # CANCELLED
        with pytest.raises(grpc.RpcError) as caught:
            admin_pb2_grpc.AdminStub(channels[0]).Abort(admin_pb2.AbortRequest(request_id="nobody's"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_killed_router_takes_only_its_own_streams_and_is_replaced(server: Server) -> None:
    with connections(server, MANY) as channels:
        assert all(held_by(server))
        before = {router.pid for router in routers(server)}
        server.engine().suspend()  # no stream ends before a router is killed
        calls = [
            inference_pb2_grpc.InferenceStub(channel).Generate(request(f"{at}", max_tokens=100))
            for at, channel in enumerate(channels)
        ]
        control = control_pb2_grpc.ControlStub(channels[0])
        wait_for("all of them", lambda: control.GetLoad(control_pb2.GetLoadRequest()).requests == MANY)
        routers(server)[0].kill()
        server.engine().resume()
        finished = lost = 0
        for call in calls:
            try:
                finished += len(Answer(list(call)).ids()) == 100
            except grpc.RpcError as error:
                lost += error.code() is grpc.StatusCode.UNAVAILABLE
        assert finished
        assert lost
        assert finished + lost == MANY
    wait_for("a new router", lambda: len({router.pid for router in routers(server)} - before) == 1)

    def is_whole() -> bool:
        with connections(server, MANY):
            return len(held_by(server)) == WORKERS and all(held_by(server))

    wait_for("connections on both", is_whole)
    assert ask(stub_of(server), request("after", max_tokens=20)).ids() == expected_tokens(b"after", 20, 258)


def test_a_router_that_hangs_takes_only_its_own_streams_and_is_replaced() -> None:
    with running_server(*ARGUMENTS, "--hang-timeout-s", "5") as server, connections(server, MANY) as channels:
        assert all(held_by(server))
        before = {router.pid for router in routers(server)}
        calls = [
            inference_pb2_grpc.InferenceStub(channel).Generate(request(f"{at}", max_tokens=HANG_TOKENS))
            for at, channel in enumerate(channels)
        ]
        first = [next(call) for call in calls]
        stopped = routers(server)[0]
        stopped.suspend()
        wait_for("it is replaced", lambda: len({router.pid for router in routers(server)} - before) == 1, 30)
        assert not stopped.is_running()
        finished = lost = 0
        for at, (head, call) in enumerate(zip(first, calls, strict=True)):
            try:
                finished += Answer([head, *call]).ids() == expected_tokens(f"{at}".encode(), HANG_TOKENS, 258)
            except grpc.RpcError as error:
                lost += error.code() is grpc.StatusCode.UNAVAILABLE
        assert finished
        assert lost
        assert finished + lost == MANY
        assert "hangs: it has not answered for" in server.log.read_text()


def test_a_killed_engine_is_replaced_and_all_routers_count_it(server: Server) -> None:
    server.engine().kill()
    with connections(server, MANY) as channels:

        def is_counted() -> bool:
            infos = [
                control_pb2_grpc.ControlStub(channel).GetServerInfo(control_pb2.GetServerInfoRequest())
                for channel in channels
            ]
            ready = control_pb2.ENGINE_STATE_READY
            return all([(each.restarts, each.state) for each in info.engines] == [(1, ready)] for info in infos)

        wait_for("each router knows of the new engine", is_counted)


def test_drain_stops_all_routers_also_one_that_is_started_later() -> None:
    with running_server(*ARGUMENTS) as server, connections(server, MANY) as channels:
        assert all(held_by(server))
        calls = [inference_pb2_grpc.InferenceStub(channel).Generate(request("x", 300)) for channel in channels]
        first = [next(call) for call in calls]
        admin_pb2_grpc.AdminStub(channels[0]).Drain(admin_pb2.DrainRequest(), timeout=120)
        for head, call in zip(first, calls, strict=True):
            assert len(Answer([head, *call]).ids()) == 300  # it answers when all have finished
        for channel in channels:
            with pytest.raises(grpc.RpcError) as caught:
                ask(inference_pb2_grpc.InferenceStub(channel), request("late", 1))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        before = {router.pid for router in routers(server)}
        routers(server)[0].kill()
        wait_for("a new router", lambda: len({router.pid for router in routers(server)} - before) == 1)
        for _ in range(20):
            time.sleep(0.1)
            with contextlib.suppress(grpc.RpcError):
                assert server.health() == health_pb2.HealthCheckResponse.NOT_SERVING


def test_sigterm_lets_the_streams_of_all_routers_finish_and_leaves_nothing() -> None:
    with running_server(*ARGUMENTS) as server, connections(server, MANY) as channels:
        assert all(held_by(server))
        calls = [inference_pb2_grpc.InferenceStub(channel).Generate(request("last", 400)) for channel in channels]
        first = [next(call) for call in calls]
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len(children) == PROCESSES
        server.process.send_signal(signal.SIGTERM)
        for head, call in zip(first, calls, strict=True):
            assert Answer([head, *call]).ids() == expected_tokens(b"last", 400, 258)
        assert server.process.wait(60) == 0
        assert not any(child.is_running() for child in children)
        host, _, port = server.address.rpartition(":")
        with socket.socket() as again:  # binds without options: the port is free again
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind((host, int(port)))


def test_a_second_sigterm_ends_the_wait() -> None:
    with running_server(*ARGUMENTS, "--grace-s", "600") as server, connections(server, 1) as (channel,):
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request("endless", max_tokens=30_000))
        next(call)
        server.process.send_signal(signal.SIGTERM)
        wait_for("the drain", lambda: not is_serving(channel))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_no_process_outlives_the_parent() -> None:
    with running_server(*ARGUMENTS) as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len(children) == PROCESSES
        server.process.kill()
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive


def test_a_port_that_another_server_shares_among_its_routers_is_refused(server: Server) -> None:
    with (
        pytest.raises(AssertionError, match="in use"),
        running_server(*ARGUMENTS, "--listen", server.address),
    ):
        pass


def stub_of(server: Server) -> inference_pb2_grpc.InferenceStub:
    return inference_pb2_grpc.InferenceStub(grpc.insecure_channel(server.address))


def test_a_stream_is_resumed_whichever_router_is_asked(server: Server) -> None:
    resumable = request("kept", max_tokens=200)
    resumable.request_id, resumable.resumable = "kept", True
    expected = expected_tokens(b"kept", 200, 258)
    with connections(server, MANY) as channels:
        inference = [inference_pb2_grpc.InferenceStub(channel) for channel in channels]
        live = inference[0].Generate(resumable)
        seen = Answer([next(live) for _ in range(20)]).ids()
        for count, stub in enumerate(inference, start=1):
            resume = inference_pb2.ResumeRequest(request_id="kept", received=[count])
            part = stub.Resume(resume, timeout=60)
            assert next(part).tokens.tokens[0].id == expected[count]
        assert all(held_by(server)), "some of these calls reached another router"
        rest = Answer(list(inference[-1].Resume(inference_pb2.ResumeRequest(request_id="kept", received=[len(seen)]))))
        assert seen + rest.ids() == expected
        with pytest.raises(grpc.RpcError) as caught:
            list(live)
        assert caught.value.code() is grpc.StatusCode.ABORTED
        for stub in inference:
            for wrong, code in (("kept", grpc.StatusCode.INVALID_ARGUMENT), ("x", grpc.StatusCode.NOT_FOUND)):
                with pytest.raises(grpc.RpcError) as caught:
                    list(stub.Resume(inference_pb2.ResumeRequest(request_id=wrong, received=[999])))
                assert caught.value.code() is code

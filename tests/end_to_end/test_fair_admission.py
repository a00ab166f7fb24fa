"""Under `--policy fair` a tenant that fills the server does not keep others out: real calls of several tenants."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pagoda import Client
from pagoda.v1 import control_pb2, control_pb2_grpc, inference_pb2_grpc
from pagoda_server.engine.runners.synthetic import expected_tokens
from tests.end_to_end.asking import request
from tests.servers import Server, running_server

pytestmark = pytest.mark.thorough

PLACES, RUNNING = 17, 4
ALONE = 16  # of the 17 places, those that a tenant alone may have
LONG = 30_000  # tokens: 150 s of steps
ARGUMENTS = ("--model", "synthetic", "--step-ms", "5", "--policy", "fair")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    limits = ("--max-num-seqs", str(RUNNING), "--max-requests", str(PLACES))
    with running_server(*ARGUMENTS, *limits, "--tenant-weights", "double=2") as server:
        yield server


@pytest.fixture
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as channel:
        yield channel
        wait_for(lambda: load_of(channel).requests == 0)


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def load_of(channel: grpc.Channel) -> control_pb2.Load:
    return control_pb2_grpc.ControlStub(channel).GetLoad(control_pb2.GetLoadRequest())


class Tenant:
    """A tenant's calls, in the order in which they were admitted; the block's end cancels them."""

    def __init__(self, channel: grpc.Channel, name: str) -> None:
        self.calls: list[Any] = []
        self._channel = channel
        self._metadata = (("x-pagoda-tenant", name),)

    def call(self, max_tokens: int = LONG, *, has_prompt: bool = False, is_silent: bool = False) -> Any:
        """Start a call. It may ask for its prompt's ids, or be silent: its message does not arrive."""
        if is_silent:
            method = self._channel.stream_stream("/pagoda.v1.Inference/Generate")
            messages = iter(lambda: threading.Event().wait(300), None)
            call = method(messages, metadata=self._metadata, timeout=300)
        else:
            message = request("long", max_tokens)
            message.output.prompt = has_prompt
            call = inference_pb2_grpc.InferenceStub(self._channel).Generate(message, metadata=self._metadata)
        self.calls.append(call)
        return call

    def fill(self, count: int, **options: Any) -> None:
        """Start calls while there are free places for them."""
        for _ in range(count):
            before = load_of(self._channel).requests
            self.call(**options)
            wait_for(lambda before=before: load_of(self._channel).requests > before)  # type: ignore[misc]

    def ended(self) -> list[Any]:
        return [call for call in self.calls if call.done()]

    def __enter__(self) -> Tenant:
        return self

    def __exit__(self, *raised: object) -> None:
        for call in self.calls:
            call.cancel()


def told(call: Any) -> tuple[str, str, float]:
    """The reason, the queue's depth and the retry delay of a call that was refused before its first message."""
    with pytest.raises(grpc.RpcError) as caught:
        next(call)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    status = rpc_status.from_call(call)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(retry)
    return info.reason, info.metadata["queue_depth"], retry.retry_delay.ToTimedelta().total_seconds()


def test_a_tenant_that_holds_every_place_gives_way_to_one_that_comes_later(channel: grpc.Channel) -> None:
    with Tenant(channel, "greedy") as greedy, Tenant(channel, "modest") as modest:
        greedy.fill(ALONE)
        for call in greedy.calls[:RUNNING]:
            next(call)
        time.sleep(0.1)  # the estimate of the delay is that old at most
        refused = greedy.call()
        reason, depth, delay_s = told(refused)
        assert (reason, depth) == ("QUEUE_FULL", str(ALONE))
        assert delay_s >= 10, "no running request is near its end"
        assert f"{ALONE} of them for this tenant; what is left is for others" in refused.details()
        greedy.calls.pop()

        modest.fill(1, max_tokens=5)
        for evicted in range(1, 6):
            modest.call(max_tokens=5)
            wait_for(lambda evicted=evicted: len(greedy.ended()) == evicted)  # type: ignore[misc]
        assert greedy.ended() == greedy.calls[-5:], "the newest that wait"
        assert {told(call)[:2] for call in greedy.ended()} == {("EVICTED", str(PLACES))}
        for call in greedy.calls[:RUNNING]:
            assert next(call).HasField("tokens"), "what runs is not evicted"
            call.cancel()
        for call in modest.calls:
            ids = [token.id for response in call for token in response.tokens.tokens]
            assert ids == expected_tokens(b"long", 5, 258)


def test_weights_are_those_of_the_scheduler(channel: grpc.Channel) -> None:
    with Tenant(channel, "single") as single, Tenant(channel, "double") as double:
        single.fill(ALONE)
        double.fill(1)
        for evicted in range(1, 11):
            double.call()
            wait_for(lambda evicted=evicted: len(single.ended()) == evicted)  # type: ignore[misc]
        assert told(double.call())[0] == "QUEUE_FULL", "11 places of weight 2 beside 6 of weight 1"


def test_what_has_not_begun_is_evicted_before_any_message(channel: grpc.Channel) -> None:
    with Tenant(channel, "greedy") as greedy, Tenant(channel, "modest") as modest:
        greedy.fill(ALONE - 2)
        greedy.fill(1, has_prompt=True)
        greedy.fill(1, is_silent=True)
        modest.fill(1)
        for evicted in (1, 2):
            modest.call()
            wait_for(lambda evicted=evicted: len(greedy.ended()) == evicted)  # type: ignore[misc]
        assert greedy.ended() == greedy.calls[-2:]
        assert [told(call)[0] for call in greedy.ended()] == ["EVICTED"] * 2


def test_a_client_tries_an_evicted_call_again(
    server: Server, channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.5)))  # the client's delays would be 30 s
    with (
        Tenant(channel, "greedy") as greedy,
        Tenant(channel, "modest") as modest,
        Client(server.address, retries=100, timeout_s=300, tenant="greedy") as client,
        ThreadPoolExecutor(1) as threads,
    ):
        greedy.fill(ALONE - 1)
        answer = threads.submit(lambda: list(client.generate(prompt="patient", max_tokens=5, ignore_eos=True)))
        wait_for(lambda: load_of(channel).requests >= ALONE)
        modest.fill(1)
        modest.call()
        wait_for(lambda: load_of(channel).requests <= PLACES)
        for calls in (greedy, modest):
            calls.__exit__()
        assert [id for chunk in answer.result() for id in chunk.tokens] == expected_tokens(b"patient", 5, 258)


@pytest.mark.slow
def test_each_of_several_routers_has_a_place_for_a_tenant_that_comes_later() -> None:
    with (
        running_server(*ARGUMENTS, "--workers", "2", "--max-requests", "34", "--max-num-seqs", "64") as server,
        contextlib.ExitStack() as stack,
    ):
        options = [("grpc.use_local_subchannel_pool", 1)]  # the kernel spreads connections over the routers
        channels = [stack.enter_context(grpc.insecure_channel(server.address, options)) for _ in range(12)]
        for channel in channels:
            greedy = stack.enter_context(Tenant(channel, "greedy"))
            for _ in range(ALONE + 1):
                greedy.call()
        wait_for(lambda: load_of(channels[0]).requests == 2 * ALONE)
        for channel in channels:
            modest = Tenant(channel, "modest")
            assert list(modest.call(max_tokens=3)), "though all of the other tenant's requests run"

"""The clients of `bench.micro.router`: of a router, and of an engine's channel. Each runs in a process of its own.

All clients read one clock. A client times the arrival of a request's first message. The timing in the last message
says how long the engine held the request; the difference is what the rest of the path added.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing.connection
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import uvloop

from bench.micro.lean_client import LeanConnection
from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import inference_pb2
from pagoda_server.router.engines.transport import EngineLink, transport_to

PROMPT_LEN = 8
STEADY_TOKENS = 1 << 20  # more than a stream reaches
ARRIVING_TOKENS = 64  # of a request that arrives beside others
BURST_PAUSE_S = 0.3
GENERATE = "/pagoda.v1.Inference/Generate"


@dataclass
class Arrivals:
    """What a client saw. Times are those of the monotonic clock, which all processes share."""

    times: list[list[float]] = field(default_factory=list)  # one list per stream, one entry per message
    tokens: list[list[int]] = field(default_factory=list)  # the same, number of tokens in each message
    added_ttft_s: list[float] = field(default_factory=list)


Client: TypeAlias = Callable[[Connection, str, float, Arrivals], None]
"""Sends "started" on its pipe and works until the pipe is readable. Each client defines what the number means."""


def run_client(pipe: Connection, client: Client, address: str, number: float) -> None:
    """Run a client in a process of its own; when told to stop, send what it saw."""
    arrivals = Arrivals()
    client(pipe, address, number, arrivals)
    pipe.recv()
    pipe.send(arrivals)


# -- of a router ----------------------------------------------------------------------------------------------------


def read_streams(
    pipe: Connection, address: str, streams: float, arrivals: Arrivals, max_tokens: int = STEADY_TOKENS
) -> None:
    """Hold `streams` streams that do not end, if `max_tokens` is more than a stream reaches."""
    connection = LeanConnection(address, GENERATE)
    waiting = int(streams)

    def open_stream() -> None:
        times: list[float] = []
        tokens: list[int] = []
        arrivals.times.append(times)
        arrivals.tokens.append(tokens)

        def on_message(message: bytes) -> None:
            nonlocal waiting
            times.append(time.monotonic())
            tokens.append(len(inference_pb2.GenerateResponse.FromString(message).tokens.tokens))
            if len(times) == 1:
                waiting -= 1
                if not waiting:
                    pipe.send("started")

        connection.call(_request(max_tokens), on_message, _refuse_end)

    for _ in range(waiting):
        open_stream()
    readable: list[Any] = [connection, pipe]

    def is_readable() -> bool:
        ready: list[Any] = multiprocessing.connection.wait(readable)
        return connection in ready

    while is_readable():
        connection.receive()


def ask_alone(pipe: Connection, address: str, pause_s: float, arrivals: Arrivals) -> None:
    """Send short requests, each about `pause_s` after the last one ended, at random points of a step."""
    _go_first()
    requests = _Requests(address, arrivals)
    pipe.send("started")
    while not pipe.poll():
        requests.start(1)
        requests.receive_all()
        time.sleep(random.uniform(0.5, 1.5) * pause_s)


def ask_evenly(pipe: Connection, address: str, interval_s: float, arrivals: Arrivals) -> None:
    """Send a request every `interval_s`, whether or not earlier ones have ended."""
    _go_first()
    requests = _Requests(address, arrivals)
    pipe.send("started")
    due = time.monotonic()
    while not pipe.poll():
        requests.start(ARRIVING_TOKENS)
        due += interval_s
        requests.receive_until_due(due)


def ask_at_once(pipe: Connection, address: str, count: float, arrivals: Arrivals) -> None:
    """Send `count` requests at once, and again when all have ended."""
    _go_first()
    requests = _Requests(address, arrivals)
    pipe.send("started")
    while not pipe.poll():
        for _ in range(int(count)):
            requests.start(ARRIVING_TOKENS)
        requests.receive_all()
        time.sleep(BURST_PAUSE_S)


class _Requests:
    """Requests on one connection; when one ends, the latency added to its TTFT goes to `arrivals`."""

    def __init__(self, address: str, arrivals: Arrivals) -> None:
        self.running = 0
        self._connection = LeanConnection(address, GENERATE)
        self._arrivals = arrivals

    def start(self, max_tokens: int) -> None:
        first = 0.0
        last = b""
        request = _request(max_tokens)
        submitted = time.monotonic()
        self.running += 1

        def on_message(message: bytes) -> None:
            nonlocal first, last
            first = first or time.monotonic()
            last = message

        def on_end() -> None:
            self.running -= 1
            timing = inference_pb2.GenerateResponse.FromString(last).timing
            self._arrivals.added_ttft_s.append(first - submitted - timing.queue_s - timing.prefill_s)

        self._connection.call(request, on_message, on_end)

    def receive_all(self) -> None:
        while self.running:
            self._connection.receive()

    def receive_until_due(self, due: float) -> None:
        while (left := due - time.monotonic()) > 0:
            if multiprocessing.connection.wait([self._connection.fileno()], left):
                self._connection.receive()


def _go_first() -> None:
    """Take real-time priority where allowed: a client on another machine would not wait for these cores."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def _refuse_end() -> None:
    raise RuntimeError("a stream ended early")


def _request(max_tokens: int) -> bytes:
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=_prompt()),
        stopping=inference_pb2.Stopping(max_tokens=max_tokens, ignore_eos=True),
    ).SerializeToString()


def _prompt() -> list[int]:
    return random.choices(range(256), k=PROMPT_LEN)


# -- of an engine's channel -----------------------------------------------------------------------------------------


def read_channel(pipe: Connection, address: str, streams: float, arrivals: Arrivals) -> None:
    """Read streams from the channel, as `read_streams` does, with all streams in one list."""
    uvloop.run(_read_channel(pipe, address, int(streams), arrivals))


async def _read_channel(pipe: Connection, address: str, streams: int, arrivals: Arrivals) -> None:
    times: list[float] = []
    tokens: list[int] = []
    async with _link_to(address) as link:
        await link.write(_submit(1, streams, STEADY_TOKENS))
        while not pipe.poll():
            message = await _next(link)
            if len(message.step.tokens) >= streams:
                times.append(time.monotonic())
                tokens.append(len(message.step.tokens))
                if len(times) == 1:
                    pipe.send("started")
    arrivals.times.append(times)
    arrivals.tokens.append(tokens)


def ask_channel_alone(pipe: Connection, address: str, pause_s: float, arrivals: Arrivals) -> None:
    """Send short requests on the channel, as `ask_alone` does."""
    _go_first()
    uvloop.run(_ask_channel_alone(pipe, address, pause_s, arrivals))


async def _ask_channel_alone(pipe: Connection, address: str, pause_s: float, arrivals: Arrivals) -> None:
    number = 0
    async with _link_to(address) as link:
        pipe.send("started")
        while not pipe.poll():
            number += 1
            submitted = time.monotonic()
            await link.write(_submit(number, 1, 1))
            while not (step := (await _next(link)).step).ended:
                pass
            held_s = step.ended[0].queue_s + step.ended[0].prefill_s
            arrivals.added_ttft_s.append(time.monotonic() - submitted - held_s)
            await asyncio.sleep(random.uniform(0.5, 1.5) * pause_s)


@contextlib.asynccontextmanager
async def _link_to(address: str) -> Any:
    transport = transport_to(address)
    link = await transport.connect()
    try:
        await _next(link)  # hello
        yield link
    finally:
        link.close()
        await transport.close()


async def _next(link: EngineLink) -> engine_pb2.EngineMessage:
    if (message := await link.read()) is None:
        raise ConnectionError("the engine closed the link")
    return message


def _submit(first_sequence: int, count: int, max_tokens: int) -> engine_pb2.RouterMessage:
    sampling = inference_pb2.Sampling(temperature=0, top_p=1, repetition_penalty=1, n=count, seed=1)
    return engine_pb2.RouterMessage(
        submit=engine_pb2.Submit(
            first_sequence=first_sequence, prompt=_prompt(), sampling=sampling, max_tokens=max_tokens
        )
    )

"""`python -m bench.micro.refusals`: how fast a busy router refuses, and what that does to its streams.

A synthetic engine with steps of 20 ms gives 64 streams their tokens through one router, which has 64 places. A client
in a process of its own reads them, and its gaps between tokens show how long the router was held up. Another process
sends calls: one after another, at a fixed rate, and in bursts on one connection. They are timed from the last byte sent
to the status; docs/operations.md says what is promised. A server of grpc.aio alone, which has no streams and refuses
every call, is timed in the same way: it shows the least that a refusal takes on this machine.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing.connection import Connection
from typing import Annotated, Any

import grpc
import numpy as np
import typer
import uvloop
from rich.console import Console
from rich.table import Table

from bench import BenchError
from bench.micro.lean_client import LeanConnection
from bench.micro.router_clients import GENERATE, Arrivals, read_streams, run_client
from bench.systems import Server, served
from pagoda_server.router.process.public_port import SERVER_OPTIONS

STREAMS = 64
STEP_MS = 20.0
SETTLE_S = 1.5
MAX_TOKENS = 30_000  # ten minutes of steps
PROMPT = b"\x1a\x05hello"  # GenerateRequest.prompt


# -- refusals --------------------------------------------------------------------------------------------------------


class Refusals:
    """Calls on one connection that the server refuses. delays_s: from a call's start to its status."""

    def __init__(self, address: str) -> None:
        self.delays_s: list[float] = []
        self._connection = LeanConnection(address, GENERATE)
        self._running = 0

    def start(self) -> None:
        began = time.perf_counter()

        def on_end() -> None:
            self.delays_s.append(time.perf_counter() - began)
            self._running -= 1

        self._running += 1
        self._connection.call(PROMPT, _refuse_message, on_end)

    def receive_all(self) -> None:
        while self._running:
            self._connection.receive()

    def receive_until(self, due: float) -> None:
        while (left := due - time.perf_counter()) > 0:
            if multiprocessing.connection.wait([self._connection.fileno()], left):
                self._connection.receive()


def one_after_another(address: str, seconds: float) -> list[float]:
    refusals = Refusals(address)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        refusals.start()
        refusals.receive_all()
    return refusals.delays_s


def at_a_rate(address: str, seconds: float, rate: float) -> list[float]:
    refusals = Refusals(address)
    began = time.perf_counter()
    for index in range(int(seconds * rate)):
        refusals.receive_until(began + index / rate)
        refusals.start()
    refusals.receive_all()
    return refusals.delays_s


def at_once(address: str, count: int) -> list[float]:
    refusals = Refusals(address)
    for _ in range(count):
        refusals.start()
    refusals.receive_all()
    return refusals.delays_s


def _refuse_message(message: bytes) -> None:
    raise BenchError("a call was not refused")


# -- servers and streams ---------------------------------------------------------------------------------------------


def _server() -> AbstractContextManager[Server]:
    return served(
        [
            *("--model", "synthetic", "--step-ms", f"{STEP_MS:g}", "--kv-cache-gb", "0.1"),
            *("--max-requests", str(STREAMS), "--max-num-seqs", "256", "--log-level", "error"),
        ]
    )


def _refuse_all(parent: Connection) -> None:
    """Serve with grpc.aio alone, and refuse every call with a status of the router's size; send the address."""

    async def refuse(_: object, context: Any) -> None:
        details = "the queue is full: 64 requests are admitted, the limit is 64"
        metadata = (("grpc-status-details-bin", bytes(200)), ("grpc-retry-pushback-ms", "1000"))
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, details, metadata)

    async def serve() -> None:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        service, _, method = GENERATE.removeprefix("/").partition("/")
        handlers = {method: grpc.stream_stream_rpc_method_handler(refuse)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        parent.send(f"127.0.0.1:{port}")
        await server.wait_for_termination()

    uvloop.run(serve())


@contextlib.contextmanager
def _bare_server() -> Iterator[str]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_refuse_all, args=(theirs,), daemon=True)
    process.start()
    yield ours.recv()
    process.kill()
    process.join()


@contextlib.contextmanager
def _streams(address: str) -> Iterator[Arrivals]:
    """Read the streams meanwhile; what arrived is there after the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=run_client, args=(theirs, partial(read_streams, max_tokens=MAX_TOKENS), address, STREAMS)
    )
    process.daemon = True
    process.start()
    theirs.close()
    ours.recv()
    time.sleep(SETTLE_S)
    arrivals = Arrivals()
    yield arrivals
    ours.send("stop")
    arrivals.times = ours.recv().times
    process.join()


def _gaps_ms(arrivals: Arrivals, start: float, end: float) -> np.ndarray:
    all_times = map(np.array, arrivals.times)
    return np.concatenate([1e3 * np.diff(times[(times >= start) & (times < end)]) for times in all_times])


def _measured(work: Any, *arguments: Any) -> tuple[Any, float, float]:
    """Run the work and return its result and the times between which it ran."""
    start = time.monotonic()
    result = work(*arguments)
    return result, start, time.monotonic()


def main(
    seconds: Annotated[float, typer.Option(help="Length of each measurement of refusals.")] = 5.0,
    rate: Annotated[float, typer.Option(help="Refusals a second at the fixed rate.")] = 500.0,
    bursts: Annotated[list[int], typer.Option(help="Calls in a burst; may be repeated.")] = [200, 1000, 5000],  # noqa: B006
) -> None:
    console = Console(width=160)
    refusals = Table(
        "refusals", "p50 ms", "p99 ms", "last ms", "promised", "grpc.aio alone", "ITL p99 / max ms", box=None
    )
    ways: list[tuple[str, str, Any, tuple[Any, ...]]] = [
        ("one after another", "p99 10", one_after_another, (seconds,)),
        (f"{rate:g} a second", "p99 10", at_a_rate, (seconds, rate)),
        *((f"{count} at once", f"last {10 + 0.2 * count:g}", at_once, (count,)) for count in bursts),
    ]
    with _server() as server, _bare_server() as bare:
        address = server.address
        for name, promised, way, arguments in ways:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                of_bare_ms = 1e3 * np.array(pool.apply(_timed, (way, bare, *arguments)))
            with _streams(address) as arrivals, multiprocessing.get_context("spawn").Pool(1) as pool:
                pool.apply(time.time)
                delays, start, end = _measured(pool.apply, _timed, (way, address, *arguments))
            delays_ms, gaps = 1e3 * np.array(delays), _gaps_ms(arrivals, start - 0.1, end + 0.1)
            refusals.add_row(
                name, *(f"{value:.1f}" for value in (*np.percentile(delays_ms, (50, 99)), delays_ms.max())), promised,
                f"p99 {np.percentile(of_bare_ms, 99):.1f}, last {of_bare_ms.max():.1f}",
                f"{np.percentile(gaps, 99):.1f} / {gaps.max():.1f}",
            )  # fmt: skip
            time.sleep(0.5)
    console.print(refusals)


def _timed(way: Any, *arguments: Any) -> list[float]:
    delays: list[float] = way(*arguments)
    return delays


if __name__ == "__main__":
    typer.run(main)

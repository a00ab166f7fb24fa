"""`python -m bench.micro.overload`: what ten times too many requests, and readers that stall, do to everyone else.

A synthetic engine with steps of a fixed length serves 64 sequences at once. First a closed loop of 64 calls finds the
capacity: requests finished per second. Then requests arrive at random (Poisson), at a multiple of the capacity, for a
minute each. They come from a process of its own, over several connections, and are never sent again. Goodput counts
requests that finish with a TTFT of at most twice the time in which the server serves all its places, and a TPOT of at
most twice that of the full batch; the first tenth of the time is left out. docs/operations.md says what is promised.

In the second part, 50 streams read their tokens and a further client sends short requests, one after another. Their
gaps and the latency added to their TTFT are measured alone, and beside readers that never take a byte after their
request was sent.
"""

from __future__ import annotations

import contextlib
import heapq
import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

import pagoda
from bench import BenchError
from bench.micro.lean_client import LeanConnection
from bench.micro.router_clients import GENERATE, Arrivals, Client, ask_alone, read_streams, run_client
from bench.systems import served
from pagoda.v1 import inference_pb2

PROMPT_LEN, OUTPUT_LEN = 64, 32
BATCH = 64
CONNECTIONS = 8
SLACK = 2.0  # targets ÷ the times from which they are derived
STREAMS = 50
STREAM_TOKENS = 30_000
PAUSE_S = 0.05  # between the short requests beside the streams
SETTLE_S = 2.0
GRACE_S = 60.0  # for admitted requests to finish after the last one was sent


# -- requests that arrive, whether or not the server keeps up --------------------------------------------------------


@dataclass(slots=True)
class Outcome:
    """One request. Times are those of time.perf_counter; without arrivals it was refused."""

    due: float
    sent: float
    arrivals: list[float] = field(default_factory=list)  # one per message
    last: bytes = b""
    ended: float = 0.0

    @property
    def is_finished(self) -> bool:
        return bool(self.last) and inference_pb2.GenerateResponse.FromString(self.last).HasField("finished")

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0] - self.due

    @property
    def tpot_s(self) -> float:
        return (self.arrivals[-1] - self.arrivals[0]) / (OUTPUT_LEN - 1)


class _Calls:
    """Calls spread over several connections."""

    def __init__(self, address: str) -> None:
        self.outcomes: list[Outcome] = []
        self.running = 0
        self._connections = [LeanConnection(address, GENERATE) for _ in range(CONNECTIONS)]
        self._request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=range(1, PROMPT_LEN + 1)),
            cache=inference_pb2.Cache(bypass=True),
            output=inference_pb2.Output(text=False),
            stopping=inference_pb2.Stopping(max_tokens=OUTPUT_LEN, ignore_eos=True),
        ).SerializeToString()

    def start(self, due: float) -> None:
        outcome = Outcome(due, time.perf_counter())

        def on_message(message: bytes) -> None:
            outcome.arrivals.append(time.perf_counter())
            outcome.last = message

        def on_end() -> None:
            outcome.ended = time.perf_counter()
            self.running -= 1

        connection = self._connections[len(self.outcomes) % CONNECTIONS]
        self.outcomes.append(outcome)
        self.running += 1
        connection.call(self._request, on_message, on_end)

    def receive(self, timeout_s: float) -> None:
        readable: list[Any] = list(self._connections)
        ready: list[Any] = multiprocessing.connection.wait(readable, max(0.0, timeout_s))
        for connection in ready:
            connection.receive()


def closed_loop(address: str, seconds: float) -> list[Outcome]:
    """Keep the batch full, with no request waiting."""
    calls = _Calls(address)
    end = time.perf_counter() + seconds
    while (now := time.perf_counter()) < end:
        while calls.running < BATCH:
            calls.start(now)
        calls.receive(end - now)
    return [outcome for outcome in calls.outcomes if outcome.ended]


def open_loop(address: str, rate: float, seconds: float) -> list[Outcome]:
    """Send requests when they are due, `rate` a second on average, and wait for the admitted ones to end."""
    calls = _Calls(address)
    gaps = np.random.default_rng(0).exponential(1 / rate, size=int(2 * rate * seconds) + 100)
    began = time.perf_counter()
    for due in began + np.cumsum(gaps):
        if due > began + seconds:
            break
        while (left := due - time.perf_counter()) > 0:
            calls.receive(left)
        calls.receive(0)
        calls.start(due)
    end = time.perf_counter() + GRACE_S
    while calls.running and time.perf_counter() < end:
        calls.receive(end - time.perf_counter())
    if calls.running:
        raise BenchError(f"{calls.running} requests have not ended after {GRACE_S:g} s")
    return calls.outcomes


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a full batch achieves. rate: requests finished per second."""

    rate: float
    tpot_s: float

    @classmethod
    def of(cls, outcomes: list[Outcome]) -> Capacity:
        ends = heapq.nsmallest(len(outcomes), (outcome.ended for outcome in outcomes))[BATCH:]  # the batch was full
        if len(ends) < 2 or not all(outcome.is_finished for outcome in outcomes):
            raise BenchError("too few requests have finished to tell the capacity")
        tpot_s = float(np.median([outcome.tpot_s for outcome in outcomes]))
        return cls((len(ends) - 1) / (ends[-1] - ends[0]), tpot_s)


@dataclass(frozen=True, slots=True)
class Load:
    """The figures of one offered load. Times in ms; nan where nothing was admitted or refused."""

    factor: float
    offered: float
    goodput: float
    refused: float
    ttft_ms: tuple[float, float]
    itl_ms: tuple[float, float]
    refusal_ms: tuple[float, float]
    late_ms: float

    @classmethod
    def of(cls, outcomes: list[Outcome], factor: float, seconds: float, capacity: Capacity, places: int) -> Load:
        """Percentiles are the 50th and 99th. late_ms: by how much the client sent a request late, 99th percentile."""
        began = outcomes[0].due
        start, end = began + seconds / 10, began + seconds
        counted = [outcome for outcome in outcomes if start <= outcome.ended < end]
        admitted = [outcome for outcome in counted if outcome.is_finished]
        refused = [outcome for outcome in counted if not outcome.arrivals]
        max_ttft_s, max_tpot_s = SLACK * places / capacity.rate, SLACK * capacity.tpot_s
        met = sum(each.ttft_s <= max_ttft_s and each.tpot_s <= max_tpot_s for each in admitted)
        gaps = [later - earlier for each in admitted for earlier, later in pairwise(each.arrivals[:-1])]
        return cls(
            factor=factor,
            offered=len(outcomes) / seconds,
            goodput=met / (end - start),
            refused=len(refused) / (end - start),
            ttft_ms=_percentiles_ms([each.ttft_s for each in admitted]),
            itl_ms=_percentiles_ms(gaps),
            refusal_ms=_percentiles_ms([each.ended - each.sent for each in refused]),
            late_ms=_percentiles_ms([each.sent - each.due for each in outcomes])[1],
        )


def _percentiles_ms(times_s: list[float]) -> tuple[float, float]:
    if not times_s:
        return float("nan"), float("nan")
    half, most = 1e3 * np.percentile(times_s, (50, 99))
    return float(half), float(most)


# -- readers that stall ----------------------------------------------------------------------------------------------


def stall(pipe: multiprocessing.connection.Connection, address: str, count: float, arrivals: Arrivals) -> None:
    """Open streams, each on a connection of its own, and let the server send them nothing but pings."""
    connections = [LeanConnection(address, GENERATE, window=0) for _ in range(int(count))]
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=range(1, PROMPT_LEN + 1)),
        stopping=inference_pb2.Stopping(max_tokens=STREAM_TOKENS, ignore_eos=True),
    ).SerializeToString()
    for connection in connections:
        connection.call(request, lambda message: None, lambda: None)
    pipe.send("started")
    readable: list[Any] = [pipe, *connections]
    ready: list[Any] = []
    while pipe not in ready:
        for connection in ready:
            connection.receive()  # a server closes a connection on which a ping is not answered
        ready = multiprocessing.connection.wait(readable)


@contextlib.contextmanager
def _beside(client: Client, address: str, number: float) -> Iterator[Arrivals]:
    """Run a client in a process of its own; what it saw is there after the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_client, args=(theirs, client, address, number), daemon=True)
    process.start()
    theirs.close()
    ours.recv()
    arrivals = Arrivals()
    yield arrivals
    ours.send("stop")
    seen = ours.recv()
    arrivals.times, arrivals.added_ttft_s = seen.times, seen.added_ttft_s
    process.join()


def beside_stalled(address: str, count: int, seconds: float) -> tuple[list[float], list[float]]:
    """The gaps of streams and the latency added to TTFTs, in seconds, beside `count` readers that stall."""
    streams = partial(read_streams, max_tokens=STREAM_TOKENS)
    with _beside(streams, address, STREAMS) as arrivals, contextlib.ExitStack() as stack:
        if count:
            stack.enter_context(_beside(stall, address, count))
        time.sleep(SETTLE_S)
        start = time.monotonic()
        with _beside(ask_alone, address, PAUSE_S) as asked:
            time.sleep(seconds)
        end = time.monotonic()
        with pagoda.Client(address) as client:
            (load,) = client.load().engines
        if load.running < STREAMS + count:
            raise BenchError(f"{load.running} sequences run, fewer than {STREAMS} streams and {count} stalled ones")
    gaps = [later - earlier for times in arrivals.times for earlier, later in pairwise(times) if start <= earlier < end]
    return gaps, asked.added_ttft_s


# -- the command -----------------------------------------------------------------------------------------------------


def _server(step_ms: float, *arguments: str) -> Any:
    command = ["--model", "synthetic", "--step-ms", f"{step_ms:g}", "--log-level", "error", *arguments]
    return served(command)


def _in_a_process(work: Any, *arguments: Any) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def main(
    seconds: Annotated[float, typer.Option(help="How long each load is offered.")] = 60.0,
    factors: Annotated[list[float], typer.Option(help="Offered load ÷ capacity; may be repeated.")] = [1, 2, 5, 10],  # noqa: B006
    places: Annotated[int, typer.Option(help="--max-requests of the server.")] = 256,
    policy: Annotated[str, typer.Option(help="--policy of the server.")] = "priority",
    step_ms: Annotated[float, typer.Option(help="Length of the engine's steps.")] = 20.0,
    stalled: Annotated[int, typer.Option(help="Readers that stall in the second part.")] = 200,
) -> None:
    console = Console(width=160)
    limits = ("--max-num-seqs", str(BATCH), "--max-requests", str(places), "--policy", policy)
    loads = []
    with _server(step_ms, *limits) as server:
        capacity = Capacity.of(_in_a_process(closed_loop, server.address, max(3.0, seconds / 6)))
        for factor in factors:
            outcomes = _in_a_process(open_loop, server.address, factor * capacity.rate, seconds)
            loads.append(Load.of(outcomes, factor, seconds, capacity, places))
    console.print(_loads_table(loads, capacity))
    room = ("--max-num-seqs", str(STREAMS + stalled + 1), "--token-budget", "1024", "--max-queued-tokens", str(1 << 40))
    with _server(step_ms, "--kv-cache-gb", "0.1", *room) as server:
        alone = beside_stalled(server.address, 0, seconds / 4)
        beside = beside_stalled(server.address, stalled, seconds / 4)
    console.print(_stalled_table(alone, beside, stalled))


def _loads_table(loads: list[Load], capacity: Capacity) -> Table:
    table = Table(
        "offered ÷ capacity", "offered/s", "goodput/s", "÷ peak (bar 0.90)", "refused/s", "TTFT p50 / p99 ms",
        "ITL p50 / p99 ms", "refusal p50 / p99 ms", "client late p99 ms",
        title=f"capacity {capacity.rate:.1f} requests/s", box=None,
    )  # fmt: skip
    peak = max(load.goodput for load in loads)
    for load in loads:
        table.add_row(
            f"{load.factor:g}", f"{load.offered:.0f}", f"{load.goodput:.1f}", f"{load.goodput / peak:.2f}",
            f"{load.refused:.0f}",
            *(f"{half:.1f} / {most:.1f}" for half, most in (load.ttft_ms, load.itl_ms, load.refusal_ms)),
            f"{load.late_ms:.1f}",
        )  # fmt: skip
    return table


def _stalled_table(
    alone: tuple[list[float], list[float]], beside: tuple[list[float], list[float]], stalled: int
) -> Table:
    table = Table(f"{STREAMS} streams", "ITL p50 / p99 ms", "added to TTFT p50 / p99 ms", box=None)
    for name, figures in (("alone", alone), (f"beside {stalled} stalled readers", beside)):
        table.add_row(name, *(f"{half:.1f} / {most:.1f}" for half, most in map(_percentiles_ms, figures)))
    return table


if __name__ == "__main__":
    typer.run(main)

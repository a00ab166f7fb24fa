"""`python -m bench.router`: what one router process carries, and what it adds, with an engine that costs little.

An engine of the synthetic model paces its steps. Clients in processes of their own hold steady streams through the
router; a probe beside them sends short requests one after another. All read one clock, and the figures are those of a
window in which every stream runs. Routers' processor time counts both user and system, threads of gRPC included.

The engine's clock gives what is added to TTFT: a response's timing says how long the engine held the request until its
first token. What is added to ITL is the difference to the same number of streams read from the engine's own channel.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Annotated, Any

import grpc
import numpy as np
import psutil
import typer
from rich.console import Console
from rich.table import Table

from bench.errors import BenchError
from bench.lean_client import LeanConnection
from bench.server import becomes_ready
from protos import engine_pb2, engine_pb2_grpc, inference_pb2

PROMPT_LEN = 8
STEADY_TOKENS = 1 << 20  # more than a stream gets to
WARM_UP_S = 1.5
GENERATE = "/pagoda.v1.Inference/Generate"


@dataclass
class Arrivals:
    """What a client saw. Times are of the monotonic clock, which all processes share."""

    times: list[list[float]] = field(default_factory=list)  # a list a stream, one entry a message
    tokens: list[list[int]] = field(default_factory=list)  # of each of the messages
    added_ttft_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Row:
    load: str
    tokens_per_s: float
    tokens_per_message: float
    cores: dict[str, float]  # process → processor seconds a second
    gaps_ms: np.ndarray
    direct_gaps_ms: np.ndarray
    added_ttft_ms: np.ndarray


def main(
    streams: Annotated[list[int], typer.Option(help="Streams at once; may be given again.")] = [1, 64, 512],  # noqa: B006
    step_ms: Annotated[list[float], typer.Option(help="An engine's step; 0 as fast as it can.")] = [20.0],  # noqa: B006
    seconds: Annotated[float, typer.Option(help="The window that is measured.")] = 5.0,
    clients: Annotated[int, typer.Option(help="Processes with a connection each, sharing the streams.")] = 1,
    workers: Annotated[int, typer.Option(help="Router processes.")] = 1,
) -> None:
    rows = []
    console = Console(width=160)
    for count in streams:
        for step in step_ms:
            with console.status(f"{count} streams, steps of {step:g} ms"):
                rows.append(_measure(count, step, seconds, min(clients, count), workers))
    console.print(_table(rows))


def _measure(streams: int, step_ms: float, seconds: float, clients: int, workers: int) -> Row:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        at = f"unix:{folder}/engine.sock"
        engine = stack.enter_context(_engine(at, streams + 1, step_ms))
        router, address = stack.enter_context(_router(at, workers))
        direct, *_ = _run([(_read_channel, at, streams)], seconds, {})
        work = [(_read_streams, address, streams * (i + 1) // clients - streams * i // clients) for i in range(clients)]
        seen, start, end, cores = _run([*work, (_probe, address, 1)], seconds, {"router": router, "engine": engine})
    tokens, gaps = _within(seen, start, end)
    _, direct_gaps = _within(direct, 0, np.inf)
    return Row(
        load=f"{streams} × {f'{step_ms:g} ms' if step_ms else 'unpaced'}",
        tokens_per_s=tokens.sum() / (end - start),
        tokens_per_message=float(tokens.mean()),
        cores=cores,
        gaps_ms=gaps,
        direct_gaps_ms=direct_gaps,
        added_ttft_ms=1e3 * np.array([added for arrivals in seen for added in arrivals.added_ttft_s]),
    )


def _within(seen: list[Arrivals], start: float, end: float) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each message, and the milliseconds from each to the one before it in its stream."""
    counts, gaps = [], []
    for arrivals in seen:
        for times, tokens in zip(map(np.array, arrivals.times), map(np.array, arrivals.tokens), strict=True):
            inside = (times >= start) & (times < end)
            counts.append(tokens[inside])
            gaps.append(1e3 * np.diff(times[inside]))
    return np.concatenate(counts), np.concatenate(gaps)


# -- clients: each in a process of its own --------------------------------------------------------------------------

Client = Callable[[Connection, str, int, Arrivals], None]


def _run(
    work: list[tuple[Client, str, int]], seconds: float, servers: dict[str, psutil.Process]
) -> tuple[list[Arrivals], float, float, dict[str, float]]:
    """Arrivals of each client, the window's start and end, and the cores that each process kept busy within it."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for client in work:
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_client, args=(theirs, *client), daemon=True))
        processes[-1].start()
        theirs.close()  # so that a client's death is the end of its pipe
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()  # all of its streams have begun
    time.sleep(WARM_UP_S)
    groups = {name: [server, *server.children(recursive=True)] for name, server in servers.items()}
    groups["clients"] = [psutil.Process(process.pid) for process in processes]
    before, start = {name: _cpu_s(group) for name, group in groups.items()}, time.monotonic()
    time.sleep(seconds)
    after, end = {name: _cpu_s(group) for name, group in groups.items()}, time.monotonic()
    for pipe in pipes:
        pipe.send("stop")
    seen = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return seen, start, end, {name: (after[name] - before[name]) / (end - start) for name in groups}


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def _client(pipe: Connection, client: Client, address: str, streams: int) -> None:
    arrivals = Arrivals()
    client(pipe, address, streams, arrivals)
    pipe.recv()
    pipe.send(arrivals)


def _read_streams(pipe: Connection, address: str, streams: int, arrivals: Arrivals) -> None:
    connection = LeanConnection(address, GENERATE)
    waiting = streams

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

        connection.call(_request(STEADY_TOKENS), on_message, _refuse_end)

    for _ in range(streams):
        open_stream()
    readable: list[Any] = [connection, pipe]

    def is_readable() -> bool:
        ready: list[Any] = multiprocessing.connection.wait(readable)
        return connection in ready

    while is_readable():
        connection.receive()


def _probe(pipe: Connection, address: str, _: int, arrivals: Arrivals) -> None:
    """Short requests one after another, at no fixed point of a step."""
    connection = LeanConnection(address, GENERATE)
    pipe.send("started")
    while not pipe.poll():
        messages: list[bytes] = []
        first: list[float] = []

        def on_message(message: bytes, messages: list[bytes] = messages, first: list[float] = first) -> None:
            first.append(time.monotonic())
            messages.append(message)

        submitted = time.monotonic()
        connection.call(_request(1), on_message, lambda: None)
        while len(messages) < 2:
            connection.receive()
        timing = inference_pb2.GenerateResponse.FromString(messages[1]).timing
        arrivals.added_ttft_s.append(first[0] - submitted - timing.queue_s - timing.prefill_s)
        time.sleep(random.uniform(0.005, 0.02))


def _refuse_end() -> None:
    raise RuntimeError("a stream ended early")


def _read_channel(pipe: Connection, address: str, streams: int, arrivals: Arrivals) -> None:
    """The engine's own channel, without a router."""
    sampling = inference_pb2.Sampling(temperature=0, top_p=1, repetition_penalty=1, n=streams, seed=1)
    submit = engine_pb2.Submit(first_sequence=1, prompt=range(PROMPT_LEN), sampling=sampling, max_tokens=STEADY_TOKENS)
    stop = threading.Event()

    def requests() -> Iterator[engine_pb2.RouterMessage]:
        yield engine_pb2.RouterMessage(submit=submit)
        stop.wait()

    times: list[float] = []
    tokens: list[int] = []
    with grpc.insecure_channel(address) as channel:
        for message in engine_pb2_grpc.EngineStub(channel).Connect(requests()):
            if len(message.step.tokens) < streams:
                continue
            times.append(time.monotonic())
            tokens.append(len(message.step.tokens))
            if len(times) == 1:
                pipe.send("started")
            if pipe.poll():
                break
        stop.set()
    arrivals.times.append(times)
    arrivals.tokens.append(tokens)


def _request(max_tokens: int) -> bytes:
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=random.choices(range(256), k=PROMPT_LEN)),
        stopping=inference_pb2.Stopping(max_tokens=max_tokens, ignore_eos=True),
    ).SerializeToString()


# -- servers --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _engine(listen: str, max_num_seqs: int, step_ms: float) -> Iterator[psutil.Process]:
    sizes = ["--max-num-seqs", str(max_num_seqs), "--token-budget", str(max_num_seqs + 512)]
    room = ["--max-model-len", str(STEADY_TOKENS + 64), "--kv-cache-gb", "0.4"]
    pace = ["--step-ms", str(step_ms)] if step_ms else []
    command = [sys.executable, "-m", "engine", "--model", "synthetic", "--listen", listen, "--log-level", "warning"]
    with _stopped_at_end(subprocess.Popen([*command, *sizes, *room, *pace])) as process:
        yield psutil.Process(process.pid)


@contextlib.contextmanager
def _router(engine: str, workers: int) -> Iterator[tuple[psutil.Process, str]]:
    command = [sys.executable, "-m", "clients.cli", "serve", "--model", "synthetic", "--listen", "127.0.0.1:0"]
    limits = ["--max-requests", "4096", "--max-queued-tokens", str(1 << 40), "--log-level", "warning"]
    spread = ["--workers", str(workers)] if workers > 1 else []
    process = subprocess.Popen([*command, "--engine", engine, *limits, *spread], stdout=subprocess.PIPE, text=True)
    with _stopped_at_end(process):
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        if not becomes_ready(address, process):
            raise BenchError("the router did not become ready")
        yield psutil.Process(process.pid), address


@contextlib.contextmanager
def _stopped_at_end(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


# -- report ---------------------------------------------------------------------------------------------------------


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, header_style="bold")
    headings = (
        "streams × step", "tokens/s", "tokens a message", "router, cores", "router µs/token", "tokens/router s",
        "engine, clients, cores", "added TTFT p50/p99 ms", "ITL p50/p99 ms", "of the engine p50/p99 ms",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.load,
            f"{row.tokens_per_s:,.0f}",
            f"{row.tokens_per_message:.2f}",
            f"{row.cores['router']:.2f}",
            f"{1e6 * row.cores['router'] / row.tokens_per_s:.1f}",
            f"{row.tokens_per_s / row.cores['router']:,.0f}",
            f"{row.cores['engine']:.2f}, {row.cores['clients']:.2f}",
            *(_percentiles(values) for values in (row.added_ttft_ms, row.gaps_ms, row.direct_gaps_ms)),
        )
    return table


def _percentiles(values: np.ndarray) -> str:
    return " / ".join(f"{value:.2f}" for value in np.percentile(values, (50, 99)))


if __name__ == "__main__":
    typer.run(main)

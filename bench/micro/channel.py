"""`python -m bench.micro.channel`: latency and CPU time of the channel alone, over each transport, in turns.

A child process stands for the engine: at a fixed pace it gives EngineServer a step with one token for every sequence.
This process stands for the router: an EngineChannel and one reader. Nothing is scheduled, computed or detokenized. The
latency is that from the engine loop's call of send() to the reader that holds the tokens.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer
import uvloop
from rich.console import Console
from rich.progress import track
from rich.table import Table

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import control_pb2, inference_pb2
from pagoda_server.engine.core.step import Counters, StepOutput
from pagoda_server.engine.loop.loop import Add, Inbox, LoadSnapshot, Ping
from pagoda_server.engine.scheduling.tenants import TenantTable
from pagoda_server.engine.serving.listen import start_listening
from pagoda_server.engine.serving.server import EngineServer
from pagoda_server.router.engines.channel import EngineChannel

WARM_UP_STEPS = 100
NO_TENANTS = TenantTable()  # does not change, so it is sent once


@dataclass(frozen=True, slots=True)
class Figures:
    """One run: latencies from send() to the reader, and CPU time of each process per step, in microseconds."""

    transport: str
    sequences: int
    steps: int
    latency_p50: float
    latency_p99: float
    engine_cpu: float
    router_cpu: float


def main(
    sequences: Annotated[str, typer.Option(help="Sequences per step, comma-separated.")] = "1,64,256",
    transports: Annotated[str, typer.Option(help="grpc, shm, or both; comma-separated.")] = "grpc,shm",
    steps: Annotated[int, typer.Option(help="Steps per run.")] = 1000,
    step_ms: Annotated[float, typer.Option(help="Time between steps.")] = 3.0,
    repeat: Annotated[int, typer.Option(help="Number of turns; the table gives medians.")] = 5,
    output: Annotated[Path | None, typer.Option(help="JSON file for the figures of every run.")] = None,
) -> None:
    """Measure one-way latency, and CPU time per step of both processes. Trust ratios within one run."""
    plan = [(count, name) for _ in range(repeat) for count in sequences.split(",") for name in transports.split(",")]
    runs = [measure(name, int(count), steps, step_ms / 1e3) for count, name in track(plan, "measuring", transient=True)]
    Console(width=max(120, Console().width)).print(_table(runs))
    if output:
        output.write_text(json.dumps([asdict(run) for run in runs], indent=2))


def measure(transport: str, sequences: int, steps: int, step_s: float) -> Figures:
    spawn = multiprocessing.get_context("spawn")
    with listening_address(transport) as address:
        here, there = spawn.Pipe()
        engine = spawn.Process(target=engine_end, args=(address, sequences, steps, step_s, there))
        engine.start()
        try:
            latencies, router_cpu = uvloop.run(_router_end(address, sequences, steps))
            engine_cpu: float = here.recv()
        finally:
            engine.kill()
            engine.join()
    p50, p99 = np.percentile(latencies, [50, 99])
    return Figures(
        transport, sequences, steps, 1e6 * p50, 1e6 * p99, 1e6 * engine_cpu / steps, 1e6 * router_cpu / steps
    )


@contextmanager
def listening_address(transport: str) -> Iterator[str]:
    if transport == "shm":
        yield f"shm:@pagoda-bench-{secrets.token_hex(8)}"
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield f"unix:{folder}/engine.sock"


# -- the engine's process --------------------------------------------------------------------------------------------


def engine_end(address: str, sequences: int, steps: int, step_s: float, result: Connection) -> None:
    uvloop.run(_engine_end(address, sequences, steps, step_s, result))


async def _engine_end(address: str, sequences: int, steps: int, step_s: float, result: Connection) -> None:
    server = EngineServer(control_pb2.EngineInfo(epoch=1, vocab_size=1 << 16, max_model_len=1 << 20))
    inbox = Inbox()
    server.attach(inbox)
    await start_listening(server, address)
    result.send(await asyncio.to_thread(_steps, server, inbox, sequences, steps, step_s))
    await asyncio.Event().wait()  # the parent kills this process once it has the last message


def _steps(server: EngineServer, inbox: Inbox, sequences: int, steps: int, step_s: float) -> float:
    """Send steps from a thread, as the engine's loop does; return the process's CPU seconds after the warm-up."""
    waiting = sequences
    while waiting:
        waiting -= _handled(inbox, None)
    ids = list(range(sequences))
    started = 0.0
    next_step = time.monotonic()
    for step in range(WARM_UP_STEPS + steps):
        if step == WARM_UP_STEPS:
            started = time.process_time()
        next_step += step_s
        time.sleep(max(0.0, next_step - time.monotonic()))
        output = StepOutput(sequences=ids, tokens=[1000 + step] * sequences, logprobs=[None] * sequences)
        server.send(output, _load(step, sent=time.monotonic()))
        _handled(inbox, 0.0)
    return time.process_time() - started


def _handled(inbox: Inbox, timeout_s: float | None) -> int:
    """Answer the router's pings; return the number of new sequences."""
    count = 0
    for message in inbox.take(timeout_s):
        if isinstance(message, Ping):
            message.reply()
        elif isinstance(message, Add):
            count += 1 + len(message.siblings)
    return count


def _load(step: int, sent: float) -> LoadSnapshot:
    """A load whose step duration carries the time of sending: both processes read the same clock."""
    counters = Counters(steps=step)
    return LoadSnapshot(
        counters,
        waiting=0,
        running=1,
        blocks_total=8192,
        blocks_free=1,
        blocks_evictable=1,
        block_size=16,
        kv_slots_unused=0,
        step_s=sent,
        tenants=NO_TENANTS,
    )


# -- the router's process --------------------------------------------------------------------------------------------


async def _router_end(address: str, sequences: int, steps: int) -> tuple[list[float], float]:
    """Return the latency of each step after the warm-up, and this process's CPU time for them, in seconds."""
    ready = asyncio.Event()

    async def on_change() -> None:
        ready.set()

    channel = EngineChannel(address, hang_timeout_s=60.0, on_change=on_change)
    running = asyncio.create_task(channel.run())
    await ready.wait()
    stream = channel.submit(
        engine_pb2.Submit(prompt=[1], sampling=inference_pb2.Sampling(n=sequences), max_tokens=1 << 20)
    )
    latencies: list[float] = []
    started: float | None = None
    while channel.load.steps < WARM_UP_STEPS + steps - 1:
        await stream.wait()
        latency_s = time.monotonic() - channel.load.step_time_s
        for inbox in stream.inboxes:
            inbox.tokens.clear()
        if channel.load.steps >= WARM_UP_STEPS:
            started = time.process_time() if started is None else started
            latencies.append(latency_s)
    assert started is not None
    cpu_s = time.process_time() - started
    running.cancel()
    return latencies, cpu_s


def _table(runs: list[Figures]) -> Table:
    table = Table(box=None, header_style="bold")
    for heading in (
        "sequences",
        "transport",
        "latency p50 µs",
        "p99 µs",
        "engine CPU µs/step",
        "router CPU µs/step",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for sequences, transport in dict.fromkeys((run.sequences, run.transport) for run in runs):
        same = [run for run in runs if (run.sequences, run.transport) == (sequences, transport)]
        columns = ("latency_p50", "latency_p99", "engine_cpu", "router_cpu")
        table.add_row(
            str(sequences), transport, *(_spread([getattr(run, column) for run in same]) for column in columns)
        )
    return table


def _spread(values: list[float]) -> str:
    return f"{median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


if __name__ == "__main__":
    typer.run(main)

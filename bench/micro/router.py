"""`python -m bench.micro.router`: capacity of a router process, and the latency that it adds, with a cheap engine.

An engine with the synthetic model paces its steps. Clients, each in its own process, hold steady streams through the
router, and a probe sends short requests one after another. All processes read one clock. Figures are those of a window
in which every stream runs. The router's CPU time is user and system time of all threads, gRPC's included.

The latency added to TTFT is TTFT minus the time that the engine held the request. It is measured for the probe; for
requests at even intervals, on average as many at once as there are streams; and for the same number of requests in one
burst, where each waits for the earlier ones, so that the figure shows the rate of admission and not one request's cost.
A probe on the engine's channel shows how much of it belongs to channel and engine. The latency added to ITL is the
difference from the same number of streams read from the channel.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import numpy as np
import psutil
import typer
from rich.console import Console
from rich.table import Table

from bench.micro.router_clients import (
    ARRIVING_TOKENS,
    STEADY_TOKENS,
    Arrivals,
    Client,
    ask_alone,
    ask_at_once,
    ask_channel_alone,
    ask_evenly,
    read_channel,
    read_streams,
    run_client,
)
from bench.processes import spawned
from bench.systems import served

WARM_UP_S = 1.5
PROBE_PAUSE_S = 0.0125

Work: TypeAlias = tuple[Client, str, float]


@dataclass(frozen=True, slots=True)
class Window:
    """What clients saw in a window, and how many cores each process kept busy."""

    seen: list[Arrivals]
    start: float
    end: float
    cores: dict[str, float]

    @property
    def added_ttft_ms(self) -> np.ndarray:
        return 1e3 * np.array([added for arrivals in self.seen for added in arrivals.added_ttft_s])


@dataclass(frozen=True, slots=True)
class Row:
    load: str
    tokens_per_s: float
    tokens_per_message: float
    cores: dict[str, float]  # process → CPU seconds per second
    gaps_ms: np.ndarray
    direct_gaps_ms: np.ndarray
    added_ttft_ms: dict[str, np.ndarray]  # kind of arrivals → one entry per request


def main(
    streams: Annotated[list[int], typer.Option(help="Concurrent streams; may be repeated.")] = [1, 64, 512],  # noqa: B006
    step_ms: Annotated[list[float], typer.Option(help="Time of an engine step; 0: unpaced. May be repeated.")] = [20.0],  # noqa: B006
    seconds: Annotated[float, typer.Option(help="Length of each measured window.")] = 5.0,
    clients: Annotated[int, typer.Option(help="Client processes that share the streams, with a connection each.")] = 1,
    workers: Annotated[int, typer.Option(help="Router processes.")] = 1,
    channel: Annotated[str, typer.Option(help="Transport to the engine: shm or grpc.")] = "shm",
) -> None:
    rows = []
    console = Console(width=160)
    for count in streams:
        for step in step_ms:
            with console.status(f"{count} streams, steps of {step:g} ms"):
                rows.append(_measure(count, step, seconds, min(clients, count), workers, channel))
    console.print(_throughput(rows))
    console.print(_latency(rows))


def _measure(streams: int, step_ms: float, seconds: float, clients: int, workers: int, channel: str) -> Row:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        at = f"{'shm' if channel == 'shm' else 'unix'}:{folder}/engine.sock"
        engine = stack.enter_context(running_engine(at, 2 * streams + 1, step_ms))
        limits = ["--max-requests", "4096", "--max-queued-tokens", str(1 << 40), "--workers", str(workers)]
        server = stack.enter_context(served(["--model", "synthetic", "--engine", at, *limits]))
        router, address = psutil.Process(server.pid), server.address
        direct = run_clients([(read_channel, at, streams), (ask_channel_alone, at, PROBE_PAUSE_S)], seconds, {})
        shares = [streams * (i + 1) // clients - streams * i // clients for i in range(clients)]
        work: list[Work] = [(read_streams, address, share) for share in shares]
        steady = run_clients(
            [*work, (ask_alone, address, PROBE_PAUSE_S)], seconds, {"router": router, "engine": engine}
        )
        added = {"on the channel": direct.added_ttft_ms, "alone": steady.added_ttft_ms}
        if step_ms:
            interval_s = ARRIVING_TOKENS * step_ms / 1e3 / streams
            added["evenly"] = run_clients([(ask_evenly, address, interval_s)], seconds, {}).added_ttft_ms
            added["at once"] = run_clients([(ask_at_once, address, streams)], seconds, {}).added_ttft_ms
    tokens, gaps = within(steady.seen, steady.start, steady.end)
    _, direct_gaps = within(direct.seen, direct.start, direct.end)
    return Row(
        load=f"{streams} × {f'{step_ms:g} ms' if step_ms else 'unpaced'}",
        tokens_per_s=tokens.sum() / (steady.end - steady.start),
        tokens_per_message=float(tokens.mean()),
        cores=steady.cores,
        gaps_ms=gaps,
        direct_gaps_ms=direct_gaps,
        added_ttft_ms=added,
    )


def within(seen: list[Arrivals], start: float, end: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of each message, and the milliseconds between neighbours in a stream."""
    counts, gaps = [], []
    for arrivals in seen:
        for times, tokens in zip(map(np.array, arrivals.times), map(np.array, arrivals.tokens), strict=True):
            inside = (times >= start) & (times < end)
            counts.append(tokens[inside])
            gaps.append(1e3 * np.diff(times[inside]))
    return np.concatenate(counts), np.concatenate(gaps)


# -- clients ---------------------------------------------------------------------------------------------------------


def run_clients(work: Sequence[Work], seconds: float, servers: dict[str, psutil.Process]) -> Window:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for client in work:
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=run_client, args=(theirs, *client), daemon=True))
        processes[-1].start()
        theirs.close()  # so that a client's death closes its pipe
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()  # all its streams have started
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
    return Window(seen, start, end, {name: (after[name] - before[name]) / (end - start) for name in groups})


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


# -- servers --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def running_engine(listen: str, max_num_seqs: int, step_ms: float, *options: str) -> Iterator[psutil.Process]:
    arguments = [
        *options,
        *("--model", "synthetic", "--listen", listen, "--log-level", "warning", "--kv-cache-gb", "0.4"),
        *("--max-num-seqs", str(max_num_seqs), "--token-budget", str(max_num_seqs + 512)),
        *("--max-model-len", str(STEADY_TOKENS + 64)),
        *(("--step-ms", str(step_ms)) if step_ms else ()),
    ]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pagoda_server.engine", *arguments]
        with spawned(command, Path(folder) / "log") as process:
            yield psutil.Process(process.pid)


# -- report ---------------------------------------------------------------------------------------------------------


def _throughput(rows: list[Row]) -> Table:
    table = _table(
        "streams × step", "tokens/s", "tokens/message", "router, cores", "router µs/token", "tokens/router s",
        "engine, clients, cores", "ITL p50/p99 ms", "on the channel p50/p99 ms",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row.load,
            f"{row.tokens_per_s:,.0f}",
            f"{row.tokens_per_message:.2f}",
            f"{row.cores['router']:.2f}",
            f"{1e6 * row.cores['router'] / row.tokens_per_s:.1f}",
            f"{row.tokens_per_s / row.cores['router']:,.0f}",
            f"{row.cores['engine']:.2f}, {row.cores['clients']:.2f}",
            _percentiles(row.gaps_ms),
            _percentiles(row.direct_gaps_ms),
        )
    return table


def _latency(rows: list[Row]) -> Table:
    arrivals = list(dict.fromkeys(name for row in rows for name in row.added_ttft_ms))
    table = _table("added to TTFT, p50/p99 ms", *arrivals)
    for row in rows:
        values = (row.added_ttft_ms.get(name) for name in arrivals)
        table.add_row(row.load, *("" if value is None else _percentiles(value) for value in values))
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _percentiles(values: np.ndarray) -> str:
    return " / ".join(f"{value:.2f}" for value in np.percentile(values, (50, 99)))


if __name__ == "__main__":
    typer.run(main)

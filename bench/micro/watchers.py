"""`python -m bench.micro.watchers`: what watching pages cost the engine and the router, in CPU seconds a token.

Streams run all the time. Each turn measures a window without watchers and one with, every other turn in reverse order,
and gives the ratio of the two. CPU time is user and system time of all threads. Nothing else may run on the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated
from urllib.parse import urlsplit

import psutil
import typer
from rich.console import Console
from rich.table import Table

from bench import BenchError
from bench.processes import spawned
from bench.systems import becomes_ready
from pagoda.aio import AsyncClient
from pagoda_server.checkpoints import DEFAULT_MODEL

PROMPT = "Write down everything that you know about pagodas."
MAX_TOKENS = 400
SETTLE_S = 2.0


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds a token."""

    engine: float
    router: float
    tokens_per_s: float


def main(
    turns: Annotated[int, typer.Option(help="Pairs of windows.")] = 9,
    seconds: Annotated[float, typer.Option(help="Length of a window.")] = 15.0,
    streams: Annotated[int, typer.Option(help="Concurrent streams.")] = 8,
    watchers: Annotated[int, typer.Option(help="Pages that watch.")] = 2,
    model: Annotated[str, typer.Option(help="As for `pagoda serve`.")] = DEFAULT_MODEL,
    step_ms: Annotated[float | None, typer.Option(help="Time of a step of the synthetic model.")] = None,
) -> None:
    options = ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--model", model]
    if step_ms is not None:
        options += ["--step-ms", str(step_ms)]
    command = [sys.executable, "-m", "pagoda_server.cli", "serve", *options]
    with tempfile.TemporaryDirectory() as folder, spawned(command, Path(folder) / "log") as server:
        assert server.stdout is not None
        url, _, address = server.stdout.readline().strip().removeprefix("starting on ").partition(" and ")
        if not becomes_ready(address, server):
            raise BenchError(f"the server ended: {(Path(folder) / 'log').read_text()[-500:]}")
        pairs = asyncio.run(_measure(psutil.Process(server.pid), url, address, turns, seconds, streams, watchers))
    Console().print(_table(pairs, watchers))


async def _measure(
    router: psutil.Process, url: str, address: str, turns: int, seconds: float, streams: int, watchers: int
) -> list[tuple[Cost, Cost]]:
    pairs = []
    async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
        asking = [group.create_task(_ask_on(client)) for _ in range(streams)]
        await asyncio.sleep(SETTLE_S)
        for turn in range(turns):
            costs = {}
            for count in (0, watchers) if turn % 2 == 0 else (watchers, 0):
                async with _watching(url, count):
                    await asyncio.sleep(SETTLE_S)
                    costs[count] = await _cost(client, router, seconds)
            pairs.append((costs[0], costs[watchers]))
            print(f"turn {turn + 1} of {turns}", file=sys.stderr)
        for task in asking:
            task.cancel()
    return pairs


async def _ask_on(client: AsyncClient) -> None:
    while True:
        async for _ in client.generate(PROMPT, max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0):
            pass


@contextlib.asynccontextmanager
async def _watching(url: str, count: int) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(_watch(urlsplit(url).netloc)) for _ in range(count)]
    try:
        yield
        assert not any(task.done() for task in tasks), "a watcher has ended"
    finally:
        for task in tasks:
            task.cancel()


async def _watch(host: str) -> None:
    reader, writer = await asyncio.open_connection(*host.rsplit(":", 1))
    try:
        writer.write(f"GET /live HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        while await reader.read(1 << 16):
            pass
    finally:
        writer.close()


async def _cost(client: AsyncClient, router: psutil.Process, seconds: float) -> Cost:
    before, tokens_before = _cpu_s(router), await _tokens(client)
    await asyncio.sleep(seconds)
    after, tokens = _cpu_s(router), await _tokens(client) - tokens_before
    engine, of_router = ((late - early) / tokens for early, late in zip(before, after, strict=True))
    return Cost(engine, of_router, tokens / seconds)


def _cpu_s(router: psutil.Process) -> tuple[float, float]:
    """CPU seconds of the engine, and of the router with its other children."""
    engine = others = 0.0
    for process in (router, *router.children(recursive=True)):
        times = process.cpu_times()
        if "pagoda_server.engine" in process.cmdline():
            engine += times.user + times.system
        else:
            others += times.user + times.system
    return engine, others


async def _tokens(client: AsyncClient) -> int:
    return sum(engine.output_tokens for engine in (await client.load()).engines)


def _table(pairs: list[tuple[Cost, Cost]], watchers: int) -> Table:
    table = Table("CPU a token", "without", f"with {watchers} pages", "ratio: median", "least", "most", box=None)
    for name in ("engine", "router"):
        costs = [(getattr(alone, name), getattr(watched, name)) for alone, watched in pairs]
        ratios = [watched / alone for alone, watched in costs]
        table.add_row(
            name,
            *(f"{1e6 * median(column):.1f} µs" for column in zip(*costs, strict=True)),
            *(f"{ratio:.4f}" for ratio in (median(ratios), min(ratios), max(ratios))),
        )
    rates = (f"{median(cost.tokens_per_s for cost in column):.0f}" for column in zip(*pairs, strict=True))
    table.add_row("tokens/s", *rates)
    return table


if __name__ == "__main__":
    typer.run(main)

"""`python -m bench.micro.telemetry`: what counting costs a router a token, and what a scrape costs its streams.

Two routers share an engine with the synthetic model: one counts for /metrics and logs its requests, the other does
neither. Half of the streams run through one and half through the other at the same time, so that both have the same
machine. The figure is the ratio of their CPU seconds a token; user and system time of all threads count. For half of
the turns the one, for the other half the other router has connected to the engine first, and gets its messages first.

Then streams run through the first router while it is scraped, and while it is not: a scrape takes so long, and delays
tokens by so much.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from statistics import median
from typing import Annotated

import numpy as np
import psutil
import typer
from rich.console import Console
from rich.table import Table

from bench.micro.router import run_clients, running_engine, running_router, within
from bench.micro.router_clients import read_streams

COUNTS = ("--http", "127.0.0.1:0")
COUNTS_NOTHING = ("--no-log-requests",)


def main(
    turns: Annotated[int, typer.Option(help="Windows.")] = 10,
    seconds: Annotated[float, typer.Option(help="Length of a window.")] = 10.0,
    streams: Annotated[int, typer.Option(help="Streams, while the router's CPU time is measured.")] = 300,
    step_ms: Annotated[float, typer.Option(help="Time of an engine step then; by default, 15,000 tokens/s.")] = 20.0,
    scraped_streams: Annotated[int, typer.Option(help="Streams, while the router is scraped.")] = 1000,
    scraped_step_ms: Annotated[float, typer.Option(help="Time of an engine step then.")] = 100.0,
) -> None:
    console = Console()
    costs: list[tuple[float, float]] = []
    rates: list[float] = []
    for is_counting_first in (True, False):
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            at = f"unix:{folder}/engine.sock"  # several routers may share one, other than by shared memory
            stack.enter_context(running_engine(at, streams + 1, step_ms))
            kinds = (COUNTS, COUNTS_NOTHING) if is_counting_first else (COUNTS_NOTHING, COUNTS)
            routers = [stack.enter_context(running_router(at, 1, *options)) for options in kinds]
            if not is_counting_first:
                routers.reverse()
            for _ in range((turns + is_counting_first) // 2):
                cost, rate = _costs([(process, address) for process, address, _ in routers], seconds, streams // 2)
                costs.append(cost)
                rates.append(rate)
                print(f"turn {len(costs)} of {turns}", file=sys.stderr)
    console.print(_told(costs, rates))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        at = f"unix:{folder}/engine.sock"
        stack.enter_context(running_engine(at, scraped_streams + 1, scraped_step_ms))
        _, address, url = stack.enter_context(running_router(at, 1, *COUNTS))
        console.print(_scrapes(address, url, seconds, scraped_streams))


def _costs(
    routers: list[tuple[psutil.Process, str]], seconds: float, streams: int
) -> tuple[tuple[float, float], float]:
    """Microseconds of CPU a token of the router that counts and of the other, and the tokens a second of both."""
    work = [(read_streams, address, streams) for _, address in routers]
    window = run_clients(work, seconds, {f"router {at}": process for at, (process, _) in enumerate(routers)})
    rates = [within([seen], window.start, window.end)[0].sum() / (window.end - window.start) for seen in window.seen]
    counting, silent = (1e6 * window.cores[f"router {at}"] / rate for at, rate in enumerate(rates))
    return (counting, silent), sum(rates)


def _told(costs: list[tuple[float, float]], rates: list[float]) -> Table:
    ratios = [counting / silent for counting, silent in costs]
    table = Table("tokens/s", "µs/token, counting", "not counting", "ratio: median", "least", "most", box=None)
    table.add_row(
        f"{median(rates):,.0f}",
        *(f"{median(cost):.2f}" for cost in zip(*costs, strict=True)),
        *(f"{ratio:.4f}" for ratio in (median(ratios), min(ratios), max(ratios))),
    )
    return table


def _scrapes(address: str, url: str, seconds: float, streams: int) -> Table:
    """How long scrapes take, and the gaps between a stream's messages with and without them."""
    gaps: list[np.ndarray] = []
    took: list[float] = []
    for is_scraped in (False, True):
        with contextlib.ExitStack() as stack:
            if is_scraped:
                took = stack.enter_context(_scraping(url))
            window = run_clients([(read_streams, address, streams)], seconds, {})
        gaps.append(within(window.seen, window.start, window.end)[1])
    table = Table("streams", "scrape p50/max ms", "ITL p50/p99.9/max ms, not scraped", "scraped", box=None)
    table.add_row(
        f"{streams:,}",
        f"{np.median(took):.1f} / {max(took):.1f}",
        *(" / ".join(f"{value:.1f}" for value in np.percentile(each, (50, 99.9, 100))) for each in gaps),
    )
    return table


@contextlib.contextmanager
def _scraping(url: str) -> Iterator[list[float]]:
    """Scrape every half a second; the list gets the milliseconds that each took."""
    times: list[float] = []
    is_over = threading.Event()

    def scrape() -> None:
        while not is_over.wait(0.5):
            began = time.perf_counter()
            with urllib.request.urlopen(f"{url}/metrics") as answer:
                answer.read()
            times.append(1e3 * (time.perf_counter() - began))

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield times
    finally:
        is_over.set()
        thread.join()


if __name__ == "__main__":
    typer.run(main)

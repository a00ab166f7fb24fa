"""`python -m bench.batching FOLDER`: ways to batch the same requests, at costs that are measured first.

Writes costs.json, batching.json and pictures into the folder. Everything but the costs is simulated, which takes some
minutes. docs/batching.md has the results.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import NormalDist, median
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from bench.batching import pictures
from bench.batching.costs import COUNT, SIZE, Measured, card, measure
from bench.batching.loops import LOOPS, Loop, Simulated, continuous, dynamic, static
from bench.batching.memory import DATASETS, MOST_AT_ONCE, NUM_SLOTS, RESERVATIONS, Use, conversations, paging, reserving
from bench.measure import Run
from bench.workloads import Request, mixed, poisson
from pagoda_server.engine.timing.cost_model import StepTimeFilter

SPREADS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0)  # standard deviation of output lengths ÷ their mean
SIZES = (4, 16, 64)
CAPS = {32: 16, 128: 12, 512: 8, 1536: 4}  # of output lengths, with the batch sizes of the published static batches
LOADS = (0.1, 0.2, 0.3, 0.6)  # arrivals ÷ what continuous batches serve when requests always wait
WAITS_S = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
NUM_CONVERSATIONS = {"ShareGPT": 600, "Alpaca": 3000}


def spread_out(spread: float, count: int = 192, mean: float = 128.0, prompt_len: int = 16) -> list[Request]:
    """Requests whose output lengths are log-normal: as many quantiles, in random order, so that the mean stays."""
    sigma = math.sqrt(math.log(1 + spread**2))
    factors = [math.exp(sigma * NormalDist().inv_cdf((index + 0.5) / count)) for index in range(count)]
    lengths = [max(1, round(mean * count * factor / sum(factors))) for factor in factors]
    random.Random(0).shuffle(lengths)
    return [Request([0] * prompt_len, length) for length in lengths]


def static_to_continuous(costs: StepTimeFilter, requests: list[Request], size: int) -> float:
    """The time of static batches ÷ that of continuous ones."""
    times = [loop(Simulated(costs), requests, size).elapsed_s for loop in (static, continuous)]
    return times[0] / times[1]


class Published(NamedTuple):
    """Output tokens a second in a published comparison that is repeated.

    whole_run  static batches, each as long as the longest output of all requests: the published baseline
    static     static batches, each as long as its longest
    reserving  continuous batches of as many sequences as have room for the longest length
    paging     continuous batches of as many as have room for their tokens
    """

    whole_run: float
    static: float
    reserving: float
    paging: float


def published(costs: StepTimeFilter, cap: int, count: int = 1000) -> Published:
    """Prompts of 512 tokens; exponential outputs with a mean of 128, drawn again if they exceed the cap."""
    draw, lengths, size = np.random.default_rng(0), list[int](), CAPS[cap]
    while len(lengths) < count:
        lengths += [length for length in [round(draw.exponential(128))] if 1 <= length <= cap]
    requests = [Request([0] * 512, length) for length in lengths]
    batch_s = static(Simulated(costs), [Request([0] * 512, max(lengths))] * size, size).elapsed_s
    runs = (
        static(Simulated(costs), requests, size),
        continuous(Simulated(costs), requests, NUM_SLOTS // (512 + cap)),
        continuous(Simulated(costs, NUM_SLOTS), requests, MOST_AT_ONCE, token_budget=4 * MOST_AT_ONCE),
    )
    return Published(sum(lengths) / (batch_s * math.ceil(count / size)), *(run.tokens_per_s for run in runs))


def by_wait(costs: StepTimeFilter, load: float, count: int = 200) -> dict[str, Run]:
    """Poisson arrivals at a part of what continuous batches serve: dynamic ones by their wait, and continuous ones."""
    full = continuous(Simulated(costs), mixed(1, count=count).requests, SIZE).requests_per_s
    requests = poisson(1, count=count, rate=load * full).requests
    tried: dict[str, Loop] = {f"{wait:g}": partial(dynamic, wait_s=wait) for wait in WAITS_S}
    return {name: loop(Simulated(costs), requests, SIZE) for name, loop in (tried | {"continuous": continuous}).items()}


def memory(costs: StepTimeFilter, name: str) -> dict[str, Use]:
    """The use of the KV memory on requests as long as those of a data set."""
    requests = conversations(name, NUM_CONVERSATIONS[name])
    found = {kind: reserving(requests, reserve) for kind, reserve in RESERVATIONS.items()}
    return {kind: Use.mean(steps) for kind, steps in (found | {"paging": paging(requests, costs)}).items()}


def main(
    folder: Annotated[Path, typer.Argument(help="Folder for the results.")],
    costs: Annotated[Path | None, typer.Option(help="costs.json of an earlier run: measure nothing.")] = None,
    turns: Annotated[int, typer.Option(help="Turns of the measurements.", min=1)] = 2,
) -> None:
    """Compare ways of batching."""
    folder.mkdir(parents=True, exist_ok=True)
    measured = Measured(**json.loads(costs.read_text())) if costs else measure(turns, typer.echo)
    (folder / "costs.json").write_text(json.dumps(asdict(measured)) + "\n")
    here, data_sheet = measured.costs(), card()
    requests = mixed(1, count=COUNT).requests
    loops = {name: loop(Simulated(here), requests, SIZE) for name, loop in LOOPS.items()}
    at_peaks = {name: loop(Simulated(data_sheet), mixed(1).requests, SIZE) for name, loop in LOOPS.items()}
    spreads = {
        f"batches of {size}, {name}": [static_to_continuous(each, spread_out(spread), size) for spread in SPREADS]
        for name, each in (("costs measured", here), ("costs of the card", data_sheet))
        for size in SIZES
    }
    repeated = {cap: published(data_sheet, cap) for cap in CAPS}
    waits = {load: by_wait(data_sheet, load) for load in LOADS}
    uses = {name: memory(here, name) for name in DATASETS}
    found: dict[str, Mapping[Any, Any]] = {
        "tokens/s by batch size": {size: size / seconds for size, seconds in measured.decode_s},
        "`mixed`: tokens/s simulated, measured; tokens a step; median TTFT in s": {
            name: [run.tokens_per_s, median(measured.loops[name]), run.mean_batch, run.ttft_ms(50) / 1e3]
            for name, run in loops.items()
        },
        "`mixed` with the costs of the card: tokens/s, tokens a step, median TTFT in s": {
            name: [run.tokens_per_s, run.mean_batch, run.ttft_ms(50) / 1e3] for name, run in at_peaks.items()
        },
        f"time, static ÷ continuous, by spread {SPREADS}": spreads,
        f"tokens/s by longest output, {Published._fields}": repeated,
        "dynamic batches by load and wait: tokens/s, tokens a step, TTFT p50 and p99 in s": {
            f"{load:.0%}, {wait}": [run.tokens_per_s, run.mean_batch, run.ttft_ms(50) / 1e3, run.ttft_ms(99) / 1e3]
            for load, by in waits.items()
            for wait, run in by.items()
        },
        f"KV memory, {Use._fields}": {f"{name}, {kind}": use for name, by in uses.items() for kind, use in by.items()},
    }
    (folder / "batching.json").write_text(json.dumps(found, indent=1) + "\n")
    for title, rows in found.items():
        typer.echo(title)
        for name, row in rows.items():
            typer.echo(
                f"    {name}: "
                + " ".join(f"{value:.4g}" for value in (row if isinstance(row, list | tuple) else [row]))
            )
    pictures.draw(folder, measured, (SPREADS, spreads), repeated, (WAITS_S, waits), uses)


if __name__ == "__main__":
    typer.run(main)

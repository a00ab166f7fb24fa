"""`python -m bench`: a workload through a Pagoda server, beside transformers' static batches, in turns."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench import pagoda
from bench.measure import Result
from bench.workloads import WORKLOADS
from checkpoints import DEFAULT_MODEL, resolve


def main(
    workload: Annotated[str, typer.Option(help=f"One of {', '.join(WORKLOADS)}.")] = "mixed",
    model: Annotated[str, typer.Option(help="What to serve.")] = DEFAULT_MODEL,
    address: Annotated[str, typer.Option(help="A server that runs already; else one is started.")] = "",
    repeat: Annotated[int, typer.Option(help="Turns; the median counts.")] = 3,
    seed: int = 0,
    peers: Annotated[bool, typer.Option(help="Run transformers beside.")] = True,
    output: Annotated[Path | None, typer.Option(help="Write every run's figures here as JSON.")] = None,
) -> None:
    """Ratios within one run are what counts: machines differ, and are shared."""
    folder = resolve(model)
    vocab_size = json.loads((folder / "config.json").read_bytes())["vocab_size"]
    load = WORKLOADS[workload](vocab_size, seed)
    console = Console(width=max(120, Console().width))
    console.print(
        f"{load.name}: {len(load.requests)} requests at once, "
        f"{load.prompt_tokens} prompt tokens, {load.output_tokens} output tokens"
    )
    ours: list[Result] = []
    theirs: list[Result] = []
    for turn in range(repeat):
        with console.status(f"turn {turn + 1} of {repeat}: pagoda"):
            if address:
                ours.append(pagoda.run(address, load))
            else:  # a server a turn: an idle engine would hold its cores' caches and memory beside the peer
                with pagoda.served("--model", model) as served_address:
                    ours.append(pagoda.run(served_address, load))
        if peers:
            from bench.transformers_static import StaticBatches

            with console.status(f"turn {turn + 1} of {repeat}: transformers"):
                theirs.append(StaticBatches(folder).run(load))
    console.print(_table(ours, theirs))
    if output:
        output.write_text(json.dumps([_record(result) for result in ours + theirs], indent=2))


def _table(ours: list[Result], theirs: list[Result]) -> Table:
    table = Table(box=None, header_style="bold")
    for heading in ("system", "output tok/s", "pagoda is … times as fast", "TTFT p50 / p99 ms", "ITL p50 / p99 ms"):
        table.add_column(heading, no_wrap=True)
    for results in filter(None, (ours, theirs)):
        ratios = sorted(mine.tokens_per_s / its.tokens_per_s for mine, its in zip(ours, results, strict=True))
        latencies = ("–", "–")
        if results[0].times:
            latencies = (
                " / ".join(f"{median(result.ttft_ms(p) for result in results):.0f}" for p in (50, 99)),
                " / ".join(f"{median(result.itl_ms(p) for result in results):.1f}" for p in (50, 99)),
            )
        table.add_row(
            results[0].system,
            f"{median(result.tokens_per_s for result in results):.0f}",
            f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})" if results is not ours else "",
            *latencies,
        )
    return table


def _record(result: Result) -> dict[str, object]:
    return {
        "system": result.system,
        "output_tokens": result.output_tokens,
        "elapsed_s": result.elapsed_s,
        "tokens_per_s": result.tokens_per_s,
        "arrivals": [times.arrivals for times in result.times],
    }


if __name__ == "__main__":
    typer.run(main)

"""The commands `compare` and `concurrency`: systems in turns, on one workload or against the number of streams."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from rich.console import Console

from bench import plots, record, report
from bench.measure import Targets, Turns
from bench.record import Setting
from bench.report import Cells
from bench.systems import System
from bench.turns import run_turns
from bench.workloads import Workload

CONCURRENCY = "concurrency"


def compare(
    systems: list[System], workload: Workload, *, repeat: int, seed: int, targets: Targets, threads: int, output: Path
) -> list[Turns]:
    """Run one workload on every system; print tables, write NAME.json, NAME.md and NAME-latency.png."""
    console = Console(width=max(130, Console().width))
    console.print(report.describe(workload))
    setting = Setting.here(threads)
    turns = run_turns(systems, [workload], repeat)[0]
    parts = report.tables(turns, targets)
    for part in parts:
        console.print(part.rich(), "")
    record.write(output, workload.name, record.document(setting, workload, seed, targets, turns))
    picture = f"{workload.name}-latency.png"
    plots.latency(turns, report.describe(workload), output / picture)
    (output / f"{workload.name}.md").write_text(
        report.page(report.describe(workload), setting, parts, turns, [picture])
    )
    console.print(f"JSON, Markdown and pictures: {output}")
    return turns


def sweep(
    systems: list[System],
    workloads: list[Workload],
    *,
    repeat: int,
    seed: int,
    targets: Targets,
    threads: int,
    output: Path,
) -> None:
    """Run workloads of one shape and growing counts; print a table, write concurrency.json, .md and .png."""
    console = Console(width=max(130, Console().width))
    setting = Setting.here(threads)
    results = run_turns(systems, workloads, repeat)
    counts = [len(workload.requests) for workload in workloads]
    parts = tables(counts, results)
    for part in parts:
        console.print(part.rich(), "")
    documents = [
        record.document(setting, workload, seed, targets, turns)
        for workload, turns in zip(workloads, results, strict=True)
    ]
    record.write(output, CONCURRENCY, {"setting": documents[0].pop("setting"), "levels": documents})
    plots.concurrency(counts, results, shape(workloads[0]), output / f"{CONCURRENCY}.png")
    page = report.page(f"Concurrency: {shape(workloads[0])}", setting, parts, results[-1], [f"{CONCURRENCY}.png"])
    (output / f"{CONCURRENCY}.md").write_text(page)
    console.print(f"JSON, Markdown and pictures: {output}")


def shape(workload: Workload) -> str:
    request = workload.requests[0]
    return f"prompts of {len(request.prompt)} tokens, outputs of {request.output_len}"


def tables(counts: list[int], results: list[list[Turns]]) -> list[Cells]:
    headings = ["system", *(str(count) for count in counts)]
    names = [turns.name for turns in results[0]]

    def rows(value: str, digits: int) -> list[list[str]]:
        return [
            [name, *(f"{median(getattr(run, value) for run in level[at].runs):.{digits}f}" for level in results)]
            for at, name in enumerate(names)
        ]

    return [Cells("Output tokens/s by number of streams, medians", headings, rows("tokens_per_s", 0))]

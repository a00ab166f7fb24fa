"""The command `compare`: systems in turns on one workload."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from bench import plots, record, report
from bench.measure import Targets, Turns
from bench.record import Setting
from bench.systems import System
from bench.turns import run_turns
from bench.workloads import Workload


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

"""`schedules`: four ways of serving, as modes of the engine's scheduler, in this process.

A table like those of the literature (requests of one length, batch sizes from 1 to 64), and a queue in which a few
outputs are much longer than the rest, where a fixed batch waits for its longest member (Orca, Yu et al., 2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console

from bench import plots, record, report, timeline
from bench.measure import Spread, Targets
from bench.record import Setting
from bench.report import Cells
from bench.stepping import Recording
from bench.stepping import record as step_through
from bench.turns import bars
from bench.workloads import Workload
from pagoda_server.engine.runners.load import InformedRunner
from pagoda_server.engine.scheduling.schedules import SCHEDULES, ScheduleName

NAME = "schedules"
BATCHED: tuple[ScheduleName, ...] = ("static", "continuous")  # the others compute one row a step, whatever the size


@dataclass(frozen=True, slots=True)
class Measured:
    """One mode at one batch size, once a turn."""

    schedule: ScheduleName
    size: int
    turns: list[Recording]

    @property
    def tokens_per_s(self) -> Spread:
        return Spread.of([recording.run.tokens_per_s for recording in self.turns])


def measure(
    runner: InformedRunner, equal: Workload, sizes: list[int], tail: Workload, tail_size: int, repeat: int
) -> tuple[list[Measured], list[Measured]]:
    """The table's cells, and the modes on the queue with a long tail, interleaved turn by turn."""
    cells = [
        Measured(schedule, size, [])
        for schedule in SCHEDULES
        for size in (sizes if schedule in BATCHED else [len(equal.requests)])
    ]
    tails = [Measured(schedule, tail_size, []) for schedule in SCHEDULES]
    parts = [(equal, cell) for cell in cells] + [(tail, cell) for cell in tails]
    with bars(repeat * sum(workload.output_tokens for workload, _ in parts)) as shown:
        for turn in range(repeat):
            for workload, cell in parts:
                description = f"turn {turn + 1} of {repeat}: {cell.schedule}, {workload.name}, batch {cell.size}"
                with shown.part(description, workload.output_tokens):
                    cell.turns.append(step_through(runner, workload, cell.schedule, cell.size, shown.add))
    return cells, tails


def classic_table(workload: Workload, sizes: list[int], cells: list[Measured]) -> Cells:
    """Rows are modes, columns are batch sizes; a mode that does not batch has one figure."""
    rows = []
    for schedule in SCHEDULES:
        found = {cell.size: cell.tokens_per_s for cell in cells if cell.schedule == schedule}
        if schedule not in BATCHED:
            found = {sizes[0]: next(iter(found.values()))}
        rows.append([schedule, *(f"{found[size].median:.0f}" if size in found else report.NONE for size in sizes)])
    requests = f"{len(workload.requests)} requests of {workload.requests[0].output_len} tokens"
    return Cells(f"Output tokens/s by batch size, {requests}", ["schedule", *map(str, sizes)], rows)


def tail_table(workload: Workload, tails: list[Measured]) -> Cells:
    continuous = next(cell for cell in tails if cell.schedule == "continuous")
    headings = ["schedule", "steps", "output tok/s", "continuous ÷ this", "rows with a token", "TTFT p50 ms", "total s"]
    rows = []
    for cell in tails:
        pairs = zip(continuous.turns, cell.turns, strict=True)
        ratio = Spread.of([best.run.tokens_per_s / other.run.tokens_per_s for best, other in pairs])
        runs = [recording.run for recording in cell.turns]
        rows.append(
            [
                cell.schedule,
                str(len(cell.turns[0].steps)),
                f"{cell.tokens_per_s.median:.0f}",
                report.NONE if cell is continuous else report.spread(ratio, 2),
                f"{100 * cell.turns[0].slot_use:.0f} %",
                f"{median(run.ttft_ms(50) for run in runs):.0f}",
                f"{median(run.elapsed_s for run in runs):.1f}",
            ]
        )
    return Cells(f"{report.describe(workload)}; batch of {tails[0].size}", headings, rows)


def schedules(
    runner: InformedRunner,
    equal: Workload,
    sizes: list[int],
    tail: Workload,
    tail_size: int,
    *,
    repeat: int,
    threads: int,
    output: Path,
) -> None:
    """Prints both tables; writes schedules.json, .md and .png and a timeline of each mode into the folder."""
    console = Console(width=max(130, Console().width))
    setting = Setting.here(threads)
    cells, tails = measure(runner, equal, sizes, tail, tail_size, repeat)
    parts = [classic_table(equal, sizes, cells), tail_table(tail, tails)]
    for part in parts:
        console.print(part.rich(), "")
    output.mkdir(parents=True, exist_ok=True)
    pictures = [f"{NAME}.png", "timeline.png"]
    plots.schedules({name: _by_size(cells, name) for name in SCHEDULES}, parts[0].title, output / pictures[0])
    last = [cell.turns[-1] for cell in tails]
    timeline.draw(last, report.describe(tail), output / pictures[1])
    for recording in last:
        pictures.append(f"timeline-{recording.schedule}.png")
        timeline.draw([recording], report.describe(tail), output / pictures[-1])
    record.write(output, NAME, _document(setting, runner, [(equal, cells), (tail, tails)]))
    (output / f"{NAME}.md").write_text(report.page("Four ways of serving", setting, parts, [], pictures))
    console.print(f"JSON, Markdown and pictures: {output}")


def _by_size(cells: list[Measured], schedule: ScheduleName) -> dict[int, Spread]:
    return {cell.size: cell.tokens_per_s for cell in cells if cell.schedule == schedule}


def _document(
    setting: Setting, runner: InformedRunner, parts: list[tuple[Workload, list[Measured]]]
) -> dict[str, object]:
    return {
        "setting": record.fields(setting),
        "model": runner.info.model,
        "workloads": [
            {
                "workload": report.describe(workload),
                "cells": [
                    {
                        "schedule": cell.schedule,
                        "batch": cell.size,
                        "turns": [record.figures(recording.run, Targets()) for recording in cell.turns],
                    }
                    for cell in cells
                ],
            }
            for workload, cells in parts
        ],
    }

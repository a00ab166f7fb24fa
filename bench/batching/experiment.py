"""`batching`: the four loops measured, in this process.

A table like those of the literature: requests of one length, batch sizes from 1 to 64. And a queue in which a few
outputs are much longer than the rest, where a static batch waits for its longest member (Orca, Yu et al., 2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console

from bench import plots, record, report
from bench.batching import timeline
from bench.batching.loops import MODES, Mode
from bench.batching.recording import Recording
from bench.batching.recording import record as serve
from bench.measure import Spread, Targets
from bench.record import Setting
from bench.report import Cells
from bench.turns import bars
from bench.workloads import Workload
from pagoda_server.engine.runners.load import InformedRunner

NAME = "batching"
BATCHED: tuple[Mode, ...] = ("static", "continuous")  # the others compute one request per step at any size


@dataclass(frozen=True, slots=True)
class Measured:
    """Recordings of one mode at one batch size, one per turn."""

    mode: Mode
    size: int
    turns: list[Recording]

    @property
    def tokens_per_s(self) -> Spread:
        return Spread.of([recording.run.tokens_per_s for recording in self.turns])


def measure(
    runner: InformedRunner, equal: Workload, sizes: list[int], tail: Workload, tail_size: int, repeat: int
) -> tuple[list[Measured], list[Measured]]:
    """Measure the table's cells, and each mode on the queue with a long tail, in turns of alternating order."""
    cells = [
        Measured(mode, size, []) for mode in MODES for size in (sizes if mode in BATCHED else [len(equal.requests)])
    ]
    tails = [Measured(mode, tail_size, []) for mode in MODES]
    parts = [(equal, cell) for cell in cells] + [(tail, cell) for cell in tails]
    with bars(repeat * sum(workload.output_tokens for workload, _ in parts)) as shown:
        for turn in range(repeat):
            for workload, cell in parts if turn % 2 == 0 else reversed(parts):
                description = f"turn {turn + 1} of {repeat}: {cell.mode}, {workload.name}, batch {cell.size}"
                with shown.part(description, workload.output_tokens):
                    recording, _ = serve(runner, workload, cell.mode, cell.size, shown.add)
                    cell.turns.append(recording)
    return cells, tails


def classic_table(workload: Workload, sizes: list[int], cells: list[Measured]) -> Cells:
    """Rows are modes, columns are batch sizes; a mode that does not batch has one figure."""
    rows = []
    for mode in MODES:
        found = _by_size(cells, mode)
        if mode not in BATCHED:
            found = {sizes[0]: next(iter(found.values()))}
        rows.append([mode, *(f"{found[size].median:.0f}" if size in found else report.NONE for size in sizes)])
    requests = f"{len(workload.requests)} requests of {workload.requests[0].output_len} tokens"
    return Cells(f"Output tokens/s by batch size, {requests}", ["mode", *map(str, sizes)], rows)


def tail_table(workload: Workload, tails: list[Measured]) -> Cells:
    continuous = next(cell for cell in tails if cell.mode == "continuous")
    headings = ["mode", "steps", "output tok/s", "continuous ÷ this", "rows with a token", "padding rows"]
    headings += ["TTFT p50 ms", "total s"]
    rows = []
    for cell in tails:
        pairs = zip(continuous.turns, cell.turns, strict=True)
        ratio = Spread.of([best.run.tokens_per_s / other.run.tokens_per_s for best, other in pairs])
        runs = [recording.run for recording in cell.turns]
        rows.append(
            [
                cell.mode,
                str(len(cell.turns[0].steps)),
                f"{cell.tokens_per_s.median:.0f}",
                report.NONE if cell is continuous else report.spread(ratio, 2),
                f"{100 * cell.turns[0].slot_use:.0f} %",
                f"{cell.turns[0].padding_rows:,}",
                f"{median(run.ttft_ms(50) for run in runs):.0f}",
                f"{median(run.elapsed_s for run in runs):.1f}",
            ]
        )
    return Cells(f"{report.describe(workload)}; batch of {tails[0].size}", headings, rows)


def compare(
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
    """Print both tables; write batching.json, .md and .png and a timeline of each mode into the folder."""
    console = Console(width=max(130, Console().width))
    setting = Setting.here(threads)
    cells, tails = measure(runner, equal, sizes, tail, tail_size, repeat)
    parts = [classic_table(equal, sizes, cells), tail_table(tail, tails)]
    for part in parts:
        console.print(part.rich(), "")
    output.mkdir(parents=True, exist_ok=True)
    pictures = [f"{NAME}.png", "timeline.png"]
    plots.modes({mode: _by_size(cells, mode) for mode in MODES}, parts[0].title, output / pictures[0])
    last = [cell.turns[-1] for cell in tails]
    timeline.draw(last, report.describe(tail), output / pictures[1])
    for recording in last:
        pictures.append(f"timeline-{recording.mode}.png")
        timeline.draw([recording], report.describe(tail), output / pictures[-1])
    record.write(output, NAME, _document(setting, runner, [(equal, cells), (tail, tails)]))
    (output / f"{NAME}.md").write_text(report.page("Four ways of serving", setting, parts, [], pictures))
    console.print(f"JSON, Markdown and pictures: {output}")


def _by_size(cells: list[Measured], mode: Mode) -> dict[int, Spread]:
    return {cell.size: cell.tokens_per_s for cell in cells if cell.mode == mode}


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
                        "mode": cell.mode,
                        "batch": cell.size,
                        "turns": [record.figures(recording.run, Targets()) for recording in cell.turns],
                    }
                    for cell in cells
                ],
            }
            for workload, cells in parts
        ],
    }

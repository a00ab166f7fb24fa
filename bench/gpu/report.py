"""Rows and breakdowns as JSON, and as tables for a terminal and a page."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.table import Table

from bench.gpu.breakdown import FILES, Breakdown
from bench.gpu.evidence import archive
from bench.gpu.rows import Row
from bench.report import NONE, Cells

HEADINGS = ["case", "µs", "rate", "of the limit", "bar", "others", "notes"]


def tables(rows: Sequence[Row]) -> list[Cells]:
    """Return one table per part, in the order in which they ran."""
    return [Cells(part, HEADINGS, [_cells(row) for row in of]) for part, of in groupby(rows, lambda row: row.part)]


def shown(cells: Cells) -> Table:
    """Return a table for a terminal, which wraps long notes."""
    table = cells.rich()
    for column in table.columns[-2:]:
        column.no_wrap = False
    return table


def summary(rows: Sequence[Row]) -> str:
    with_bar = [row for row in rows if row.bar]
    reached = sum(row.met is True for row in with_bar)
    failed = sum(row.time_us is None and row.rate is None for row in rows)
    return f"{reached} of {len(with_bar)} bars reached, {failed} rows without a measurement"


class Report:
    """The rows so far, written with every one of them: gpu.json, gpu.md, breakdown.json, and an archive of logs.

    out        folder of these files; they are all that a machine that is given back leaves
    evidence   folder of logs and breakdowns, which parts fill
    started    time.monotonic() when the benchmark began
    """

    def __init__(self, out: Path, evidence: Path, started: float) -> None:
        self._out = out
        self.evidence = evidence
        self._started = started
        self._date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.rows: list[Row] = []
        self.card: dict[str, str] = {}

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.write()

    def write_logs(self) -> None:
        self.write()
        archive(self.evidence, self._out)

    def write(self) -> None:
        breakdowns = self._breakdowns()
        record = {"card": self.card, "date": self._date, "elapsed_s": round(self.elapsed_s, 1)}
        record |= {"rows": [dataclasses.asdict(row) for row in self.rows]}
        _write_whole(self._out / "gpu.json", json.dumps(record, indent=1) + "\n")
        kernels = [dataclasses.asdict(breakdown) for breakdown in breakdowns]
        _write_whole(self._out / "breakdown.json", json.dumps(kernels, indent=1) + "\n")
        what = ", ".join(f"{name} {value}" for name, value in self.card.items())
        page = [f"# On a GPU\n\n{self._date}; {what}; {self.elapsed_s:.0f} s. {summary(self.rows)}.\n"]
        page += [table.markdown() for table in self.tables()]
        _write_whole(self._out / "gpu.md", "\n".join(page))

    def tables(self) -> list[Cells]:
        """Return a table per part, in the order in which they ran, and one per breakdown."""
        return [*tables(self.rows), *(breakdown.table() for breakdown in self._breakdowns())]

    def _breakdowns(self) -> list[Breakdown]:
        found = []
        for path in sorted(self.evidence.rglob(FILES)):
            with contextlib.suppress(ValueError):  # it is being written
                found.append(Breakdown.read(path))
        return found


def _write_whole(path: Path, text: str) -> None:
    """Write a file at once: whatever ends this process leaves the old one or the new one."""
    beside = path.with_name(f".{path.name}")
    beside.write_text(text)
    beside.replace(path)


def _cells(row: Row) -> list[str]:
    beside = [f"{name} {_number(time_us)} µs" for name, time_us in row.others.items()]
    figures = [f"{name} {_number(value)}" for name, value in row.figures.items()]
    return [
        row.case,
        NONE if row.time_us is None else _number(row.time_us),
        NONE if row.rate is None else f"{_number(row.rate)} {row.unit}",
        NONE if row.fraction is None or math.isnan(row.fraction) else f"{100 * row.fraction:.0f} %",
        row.bar + {True: " ✓", False: " ✗", None: ""}[row.met],
        ", ".join(beside),
        "; ".join([*figures, *([row.error] if row.error else [])]),
    ]


def _number(value: float) -> str:
    """Format with three significant digits and separated thousands."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"

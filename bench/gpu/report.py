"""Rows as JSON, and as tables for a terminal and a page."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.table import Table

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


def write(folder: Path, rows: Sequence[Row], card: dict[str, str], elapsed_s: float) -> None:
    """Write gpu.json and gpu.md."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    folder.mkdir(parents=True, exist_ok=True)
    record = {"card": card, "date": date, "elapsed_s": round(elapsed_s, 1)}
    record |= {"rows": [dataclasses.asdict(row) for row in rows]}
    (folder / "gpu.json").write_text(json.dumps(record, indent=1) + "\n")
    what = ", ".join(f"{name} {value}" for name, value in card.items())
    page = [f"# On a GPU\n\n{date}; {what}; {elapsed_s:.0f} s. {summary(rows)}.\n"]
    (folder / "gpu.md").write_text("\n".join([*page, *(table.markdown() for table in tables(rows))]))


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

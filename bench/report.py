"""Results as tables, for a Markdown page and for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from rich.table import Table

from bench.measure import PERCENTILES, Run, Spread, Targets, Turns
from bench.record import Setting
from bench.workloads import Workload

NONE = "–"


@dataclass(frozen=True, slots=True)
class Cells:
    """A table: title, headings, and rows of as many cells as headings."""

    title: str
    headings: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        lines = [f"**{self.title}**", "", _line(self.headings), _line(["---"] + ["---:"] * (len(self.headings) - 1))]
        return "\n".join(lines + [_line(row) for row in self.rows]) + "\n"

    def rich(self) -> Table:
        table = Table(title=self.title, title_justify="left", box=None, header_style="bold", pad_edge=False)
        for index, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if index else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        return table


def throughput(systems: list[Turns], targets: Targets) -> Cells:
    """Medians over the turns, and the first system's ratio to each other system, turn by turn."""
    first = systems[0]
    headings = ["system", first.rate, f"{first.name} ÷ this", "requests/s", "goodput/s", "mean batch"]
    rows = [
        [
            turns.name,
            spread(Spread.of(turns.rates), 0),
            NONE if turns is first else spread(first.ratios(turns), 2),
            f"{median(run.requests_per_s for run in turns.runs):.2f}",
            f"{median(run.goodput(targets) for run in turns.runs):.2f}",
            _median(turns.runs, lambda run: run.mean_batch, "{:.1f}"),
        ]
        for turns in systems
    ]
    goal = f"goodput: TTFT ≤ {targets.ttft_ms:g} ms and TPOT ≤ {targets.tpot_ms:g} ms"
    return Cells(f"Throughput: median (min–max); {goal}", headings, rows)


def against_the_best(systems: list[Turns]) -> Cells:
    """One row per Pagoda system: its rate ÷ that of the best peer in the same turn."""
    peers = [turns for turns in systems if turns.is_peer]
    ours = [turns for turns in systems if not turns.is_peer]
    best = [max(peers, key=lambda peer: peer.rates[turn]).name for turn in range(len(systems[0].runs))]
    counts = ", ".join(f"{name} in {count} of {len(best)} turns" for name, count in Counter(best).most_common())
    rows = [[turns.name, spread(turns.ratios_to_best(peers), 2), counts] for turns in ours]
    return Cells("Compared with the best peer of each turn", ["system", "÷ best peer", "best peer"], rows)


def latency(systems: list[Turns]) -> Cells:
    """One row per system, and one per kind of request that the workload separates."""
    percentiles = "/".join(f"p{p}" for p in PERCENTILES)
    headings = ["system", f"TTFT {percentiles} ms", f"ITL {percentiles} ms"]
    rows = []
    for turns in systems:
        rows.append([turns.name, _ttft(turns.runs, None), _itl(turns.runs)])
        rows += [[f"{turns.name}, {kind}", _ttft(turns.runs, kind), ""] for kind in turns.runs[0].kinds()]
    return Cells("Latency: medians over the turns", headings, rows)


def memory(systems: list[Turns]) -> Cells:
    headings = ["system", "peak memory GB", "KV blocks in use, mean", "peak", "empty slots in them"]
    rows = [
        [
            turns.name,
            _median(turns.runs, lambda run: run.peak_memory_bytes / 1e9 if run.peak_memory_bytes else None, "{:.2f}"),
            _median(turns.runs, lambda run: 100 * run.kv.occupancy if run.kv else None, "{:.0f} %"),
            _median(turns.runs, lambda run: 100 * run.kv.peak if run.kv else None, "{:.0f} %"),
            _median(turns.runs, lambda run: 100 * run.kv.waste if run.kv else None, "{:.1f} %"),
        ]
        for turns in systems
    ]
    return Cells("Memory", headings, rows)


def tables(systems: list[Turns], targets: Targets) -> list[Cells]:
    best = [against_the_best(systems)] if any(turns.is_peer for turns in systems) else []
    return [throughput(systems, targets), *best, latency(systems), memory(systems)]


def describe(workload: Workload) -> str:
    return (
        f"{workload.name}: {len(workload.requests)} requests, "
        f"{workload.prompt_tokens:,} prompt tokens, {workload.output_tokens:,} output tokens"
    )


def page(title: str, setting: Setting, parts: list[Cells], systems: list[Turns], pictures: list[str]) -> str:
    """Return a Markdown page: the command, the machine, versions, tables and pictures."""
    versions = ", ".join(f"{name} {number}" for name, number in setting.versions.items())
    lines = [
        f"# {title}",
        "",
        f"    {''.join(f'{name}={value} ' for name, value in setting.environment.items())}{setting.command}",
        "",
        f"{setting.date}, {setting.cpu}, {setting.cores} cores, {setting.threads} threads, "
        f"{setting.memory_gb:g} GB, {setting.system}; {versions}.",
        "",
        *(part.markdown() for part in parts),
    ]
    for turns in systems:
        told = ", ".join(f"{name} {value}" for name, value in turns.versions.items())
        lines.append(f"- **{turns.name}**: `{turns.command}` ({told})")
    lines += ["", *(f"![{picture}]({picture})" for picture in pictures)]
    return "\n".join(lines) + "\n"


def spread(values: Spread, digits: int) -> str:
    """Format the median, and the range unless all values are equal."""
    middle = f"{values.median:.{digits}f}"
    if values.least == values.most:
        return middle
    return f"{middle} ({values.least:.{digits}f}–{values.most:.{digits}f})"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _ttft(runs: list[Run], kind: str | None) -> str:
    return " / ".join(f"{median(run.ttft_ms(p, kind) for run in runs):.0f}" for p in PERCENTILES)


def _itl(runs: list[Run]) -> str:
    if not all(len(run.itls_ms()) for run in runs):  # no request has two tokens
        return NONE
    return " / ".join(f"{median(run.itl_ms(p) for run in runs):.1f}" for p in PERCENTILES)


def _median(runs: list[Run], value: Callable[[Run], float | None], form: str) -> str:
    known = [found for run in runs if (found := value(run)) is not None]
    return form.format(median(known)) if known else NONE

"""The command `promises`: run every scenario in turns, and compare each promise with its measurement."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console

from bench import BenchError, driver, record, report
from bench.measure import Spread
from bench.promises.fairness import Fairness
from bench.promises.interference import Interference
from bench.promises.overload import Overload
from bench.promises.prefix import SharedPrefix
from bench.promises.priority import Priorities
from bench.promises.scenario import Bound, Figures, Scenario, Turn, Variant
from bench.record import Setting
from bench.report import Cells, spread
from bench.systems import served
from pagoda.errors import PagodaError

NAME = "promises"
SCENARIOS: dict[str, type[Scenario]] = {
    "interference": Interference,
    "fairness": Fairness,
    "overload": Overload,
    "priority": Priorities,
    "prefix": SharedPrefix,
}


@dataclass(frozen=True, slots=True)
class Servers:
    """
    arguments  arguments of `pagoda serve` that all servers get
    runner     one event loop for all clients, because gRPC's poller outlives the loop that it was made for
    versions   filled with what the servers report
    """

    arguments: list[str]
    vocab_size: int
    runner: asyncio.Runner
    versions: dict[str, str]


def promises(
    names: list[str], *, arguments: list[str], vocab_size: int, repeat: int, threads: int, output: Path
) -> None:
    """Run scenarios; print tables, write promises.json and .md. Raise BenchError if a server fails a request."""
    console = Console(width=max(130, Console().width))
    setting = Setting.here(threads)
    versions: dict[str, str] = {}
    found: dict[str, list[Turn]] = {}
    bounds: list[Bound] = []
    details: list[Cells] = []
    with asyncio.Runner() as runner:
        servers = Servers(arguments, vocab_size, runner, versions)
        for name in names:
            scenario = SCENARIOS[name]()
            found[name] = []
            with console.status("") as status:
                for turn in range(repeat):
                    status.update(f"{name}, turn {turn + 1} of {repeat}")
                    found[name].append(run_turn(scenario, servers, turn))
            bounds += scenario.bounds(found[name])
            details.append(figures_table(scenario, found[name]))
            console.print(details[-1].rich(), "")
    verdicts = bounds_table(bounds)
    console.print(verdicts.rich(), "")
    record.write(
        output,
        NAME,
        {
            "setting": record.fields(setting),
            "server": versions,
            "arguments": arguments,
            "promises": [asdict(bound) | {"is_met": bound.is_met} for bound in bounds],
            "turns": found,
        },
    )
    (output / f"{NAME}.md").write_text(report.page("Promises", setting, [verdicts, *details], [], []))
    console.print(f"JSON and Markdown: {output}")


def run_turn(scenario: Scenario, servers: Servers, turn: int) -> Turn:
    """Run each variant once on a server of its own, in reverse order every other turn."""
    order = scenario.variants if turn % 2 == 0 else scenario.variants[::-1]
    return {variant.name: _run(scenario, variant, servers, turn) for variant in order}


def _run(scenario: Scenario, variant: Variant, servers: Servers, turn: int) -> Figures:
    with served([*servers.arguments, *variant.arguments]) as server:
        servers.versions.update(driver.versions(server.address))
        try:
            return servers.runner.run(scenario.run(server.address, servers.vocab_size, turn))
        except PagodaError as error:
            raise BenchError(f"{scenario.name}, {variant.name}: {error}") from error


def bounds_table(bounds: list[Bound]) -> Cells:
    rows = [
        [
            bound.promise,
            f"{'≥' if bound.is_floor else '≤'} {bound.limit:g}",
            spread(Spread.of(bound.values), bound.digits),
            "yes" if bound.is_met else "NO",
        ]
        for bound in bounds
    ]
    return Cells("Promises: median (min–max) over the turns", ["promise", "bound", "measured", "met"], rows)


def figures_table(scenario: Scenario, turns: list[Turn]) -> Cells:
    """A row per figure, a column per variant."""
    names = [variant.name for variant in scenario.variants]
    rows = []
    for figure in turns[0][names[0]]:
        values = [Spread.of([turn[name][figure] for turn in turns]) for name in names]
        digits = _digits(median(value.median for value in values))
        rows.append([figure, *(spread(value, digits) for value in values)])
    return Cells(f"{scenario.name}: median (min–max) over the turns", ["figure", *names], rows)


def _digits(value: float) -> int:
    """Digits after the point that give about three significant ones."""
    return 0 if value >= 100 or value == int(value) else 1 if value >= 10 else 3

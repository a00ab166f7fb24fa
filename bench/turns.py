"""Run systems in turns, each once per turn, so that a disturbance of the machine affects all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from bench.measure import Run, Turns
from bench.systems import OnTokens, Started, System
from bench.workloads import Workload


class Bars:
    """A progress bar over the output tokens of all turns, with a description of the current run."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task
        self._aim = 0.0

    @contextmanager
    def part(self, description: str, tokens: int) -> Iterator[None]:
        """One run. The sum of `add` need not equal `tokens`: some systems report only now and then."""
        self._aim += tokens
        self._progress.update(self._task, description=description)
        yield
        self._progress.update(self._task, completed=self._aim)

    def add(self, tokens: int) -> None:
        self._progress.advance(self._task, tokens)

    def note(self, line: str) -> None:
        """Print a line that stays, above the bar."""
        self._progress.console.print(line, soft_wrap=True)


@contextmanager
def bars(total_tokens: int) -> Iterator[Bars]:
    columns = (
        TextColumn("{task.description:<48}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield Bars(progress, progress.add_task("", total=total_tokens))


def run_turns(systems: list[System], workloads: list[Workload], repeat: int) -> list[list[Turns]]:
    """Return a list per workload with an entry per system. A system is started once per turn."""
    results = [
        [Turns(system.name, system.command, is_peer=system.is_peer, rate=workload.rate) for system in systems]
        for workload in workloads
    ]
    with bars(repeat * len(systems) * sum(workload.output_tokens for workload in workloads)) as shown:
        for turn in range(repeat):
            # Every other turn runs in reverse order, so that a machine that grows hotter or busier favours no system.
            order = range(len(systems)) if turn % 2 == 0 else reversed(range(len(systems)))
            for at in order:
                name = systems[at].name
                with shown.part(f"turn {turn + 1} of {repeat}: {name} starts", 0), systems[at].start() as started:
                    for number, workload in enumerate(workloads):
                        with shown.part(f"turn {turn + 1} of {repeat}: {name}", workload.output_tokens):
                            results[number][at].runs.append(_run(started, workload, shown.add))
                            results[number][at].versions = started.versions
    return results


def _run(started: Started, workload: Workload, on_tokens: OnTokens) -> Run:
    if not workload.one_at_a_time:
        return started.run(workload, on_tokens)
    return Run.in_sequence(
        [started.run(replace(workload, requests=[request]), on_tokens) for request in workload.requests]
    )

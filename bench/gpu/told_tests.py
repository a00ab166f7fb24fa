"""A pytest plug-in that writes each test's result to a file at once, so that an interrupted run keeps its results."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TOLD_FILE = "PAGODA_TOLD_TESTS"  # the environment variable that names the file
CHOICE_FILE = "PAGODA_CHOSEN_TESTS"  # and one that names the file of a Choice
STARTED, FAILED = "started", "failed"
IMPORT = "its import"  # stands for a test of a file that fails when it is imported
MOST = 160  # characters of a reason


@dataclass(frozen=True, slots=True)
class Told:
    """What is known of a test: that it has started, or its outcome. A test that fails twice has two."""

    file: str
    test: str
    outcome: str
    reason: str = ""

    @property
    def id(self) -> str:
        return f"{self.file}::{self.test}"

    def add_to(self, path: Path) -> None:
        with path.open("a") as told:
            told.write(json.dumps(asdict(self)) + "\n")


def read_told(path: Path) -> list[Told]:
    return [Told(**json.loads(line)) for line in path.read_text().splitlines()]


@dataclass(frozen=True, slots=True)
class Choice:
    """Which of the tests to run.

    only          this one; empty: all
    without       not these
    one_per_file  the first of each file
    """

    only: str = ""
    without: Sequence[str] = ()
    one_per_file: bool = False

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    def of(self, items: Sequence[Any]) -> list[Any]:
        without = set(self.without)
        chosen = [item for item in items if item.nodeid not in without and self.only in ("", item.nodeid)]
        if self.one_per_file:
            return list({item.nodeid.partition("::")[0]: item for item in reversed(chosen)}.values())
        return chosen


class _Teller:
    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        file, _, test = nodeid.partition("::")
        Told(file, test, STARTED).add_to(self._path)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            file, _, test = report.nodeid.partition("::")
            self._tell(file, test, report)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._tell(report.nodeid, IMPORT, report)

    def _tell(self, file: str, test: str, report: Any) -> None:
        reason = _reason(report.longreprtext) if report.failed else ""
        Told(file, test, report.outcome, reason).add_to(self._path)


def pytest_configure(config: Any) -> None:
    if TOLD_FILE in os.environ and not hasattr(config, "workerinput"):  # xdist workers report to the controller
        config.pluginmanager.register(_Teller(Path(os.environ[TOLD_FILE])))


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    if CHOICE_FILE in os.environ:
        chosen = Choice(**json.loads(Path(os.environ[CHOICE_FILE]).read_text())).of(items)
        kept = {id(item) for item in chosen}
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
        items[:] = [item for item in items if id(item) in kept]


def _reason(text: str) -> str:
    """Return the first line that pytest marks as the error, else the last line."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (errors or lines[-1:] or ["no reason given"])[0][:MOST]

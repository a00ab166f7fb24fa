"""A pytest plug-in that writes each test's result to a file at once, so that an interrupted run keeps its results."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

TOLD_FILE = "PAGODA_TOLD_TESTS"  # the environment variable that names the file
MOST = 160  # characters of a reason


class _Teller:
    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            file, _, test = report.nodeid.partition("::")
            self._tell(file, test, report)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._tell(report.nodeid, "its import", report)

    def _tell(self, file: str, test: str, report: Any) -> None:
        reason = _reason(report.longreprtext) if report.failed else ""
        line = json.dumps({"file": file, "test": test, "outcome": report.outcome, "reason": reason})
        with self._path.open("a") as told:
            told.write(line + "\n")


def pytest_configure(config: Any) -> None:
    if TOLD_FILE in os.environ and not hasattr(config, "workerinput"):  # xdist workers report to the controller
        config.pluginmanager.register(_Teller(Path(os.environ[TOLD_FILE])))


def _reason(text: str) -> str:
    """Return the first line that pytest marks as the error, else the last line."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (errors or lines[-1:] or ["no reason given"])[0][:MOST]

"""The tests that need a GPU, run before anything is timed: what is fast and wrong is worth nothing."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from bench.gpu.rows import Bench, Row
from bench.gpu.told_tests import TOLD_FILE

ROOT = Path(__file__).parent.parent.parent
KERNELS = ["tests/kernels/triton"]
RUNNER = ["tests/engine/test_device_runner.py", "tests/engine/test_on_gpu.py"]
SERVER = ["tests/end_to_end/test_on_gpu.py"]
SMOKE = ["tests/kernels/triton/test_silu_and_mul.py"]
MOST_PROCESSES = 12  # of those that compile kernels at once; each has a context of its own on the GPU
TEST_TIMEOUT_S = 120
POLL_S = 0.2
MARGIN_S = 3.0  # before this process's own end, to tell what was found
MOST_TOLD = 3  # failures of a file that its row names


@dataclass(slots=True)
class _File:
    """What became of the tests of one file. `failures`: their names and the last line of what they said."""

    passed: int = 0
    skipped: int = 0
    failures: dict[str, str] = field(default_factory=dict)


def kernel_rows(bench: Bench) -> Iterator[Row]:
    """Every kernel against its reference. Most of the time goes into compiling, so by several processes."""
    yield from _rows("tests of kernels", KERNELS, bench, in_parallel=not bench.is_small)


def runner_rows(bench: Bench) -> Iterator[Row]:
    """Graphs, overlap, memory, transformers' tokens. One by one: some measure what memory is free."""
    if not bench.is_small:
        yield from _rows("tests of the runner", RUNNER, bench)


def server_rows(bench: Bench) -> Iterator[Row]:
    """A whole server, through gRPC."""
    if not bench.is_small:
        yield from _rows("tests of the server", SERVER, bench)


def _rows(part: str, paths: Sequence[str], bench: Bench, in_parallel: bool = False) -> Iterator[Row]:
    """One row a file. What the limit cuts off is told of, and what was found until then is kept."""
    ends = time.monotonic() + bench.limit_s - MARGIN_S
    with TemporaryDirectory() as folder:
        told = Path(folder) / "told"
        log = Path(folder) / "log"
        told.touch()
        with log.open("w") as output:
            process = subprocess.Popen(
                _command(SMOKE if bench.is_small else paths, in_parallel),
                cwd=ROOT,
                env=os.environ | {TOLD_FILE: str(told)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            while process.poll() is None and time.monotonic() < ends:
                time.sleep(POLL_S)
            is_cut = process.poll() is None
        finally:
            _kill(process)
            code = process.wait()
        yield from _files(part, told.read_text().splitlines())
        if is_cut:
            yield Row(part, "all", error=f"what is missing here had not run after {bench.limit_s - MARGIN_S:.0f} s")
        elif code not in (0, 1):  # neither passed nor failed: pytest itself did not work
            lines = [line for line in log.read_text().splitlines() if line.strip()]
            yield Row(part, "all", error=f"pytest ended with {code}: {' | '.join(lines[-3:])[-300:]}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """And those that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()


def _command(paths: Sequence[str], in_parallel: bool) -> list[str]:
    """Without the options of pyproject.toml: the plug-ins that they belong to may not be there."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        "-p",
        "bench.gpu.told_tests",
    ]
    if importlib.util.find_spec("pytest_timeout"):
        command.append(f"--timeout={TEST_TIMEOUT_S}")
    processes = min(MOST_PROCESSES, (os.cpu_count() or 1) - 2)
    if in_parallel and processes > 1 and importlib.util.find_spec("xdist"):
        command += ["-n", str(processes)]
    return [*command, "-m", "not slow", "--continue-on-collection-errors", *paths]


def _files(part: str, lines: Sequence[str]) -> Iterator[Row]:
    told = sorted((json.loads(line) for line in lines), key=lambda one: str(one["file"]))
    for name, tests in groupby(told, key=lambda one: str(one["file"])):
        file = _File()
        for test in tests:
            match test["outcome"]:
                case "passed":
                    file.passed += 1
                case "skipped":
                    file.skipped += 1
                case _:
                    file.failures[test["test"]] = test["reason"]
        yield Row(
            part,
            name,
            rate=float(file.passed),
            unit="passed",
            bar="all",
            met=not file.failures and file.passed > 0,
            figures={"failed": float(len(file.failures)), "skipped": float(file.skipped)},
            error="; ".join(f"{test}: {reason}" for test, reason in list(file.failures.items())[:MOST_TOLD]),
        )

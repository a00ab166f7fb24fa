"""The tests that need a GPU, run before anything is timed: a fast wrong result is worth nothing."""

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
MOST_PROCESSES = 12  # that compile kernels at once; each has its own context on the GPU
TEST_TIMEOUT_S = 120
POLL_S = 0.2
MARGIN_S = 3.0  # before this process's own limit, to report results
MOST_TOLD = 3  # failures that the row of a file names


@dataclass(slots=True)
class _File:
    """Results of one test file. `failures`: the names of failed tests, and a line with the reason."""

    passed: int = 0
    skipped: int = 0
    failures: dict[str, str] = field(default_factory=dict)


def kernel_rows(bench: Bench) -> Iterator[Row]:
    """Test every kernel against its reference, in several processes, since compiling takes most of the time."""
    yield from _rows("tests of kernels", KERNELS, bench, in_parallel=not bench.is_small)


def runner_rows(bench: Bench) -> Iterator[Row]:
    """Test graphs, overlap, memory and transformers' tokens, one by one, since some tests measure free memory."""
    if not bench.is_small:
        yield from _rows("tests of the runner", RUNNER, bench)


def server_rows(bench: Bench) -> Iterator[Row]:
    """Test a whole server through gRPC."""
    if not bench.is_small:
        yield from _rows("tests of the server", SERVER, bench)


def _rows(part: str, paths: Sequence[str], bench: Bench, in_parallel: bool = False) -> Iterator[Row]:
    """Yield one row per file, also for files done before the limit, and one if the limit cut tests off."""
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
            yield Row(part, "all", error=f"tests missing here had not run after {bench.limit_s - MARGIN_S:.0f} s")
        elif code not in (0, 1):  # neither passed nor failed: pytest itself broke
            lines = [line for line in log.read_text().splitlines() if line.strip()]
            yield Row(part, "all", error=f"pytest ended with {code}: {' | '.join(lines[-3:])[-300:]}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()


def _command(paths: Sequence[str], in_parallel: bool) -> list[str]:
    """Return pytest's command line, without the options of pyproject.toml, whose plug-ins may be missing."""
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

"""The tests that need a GPU: a fast wrong result is worth nothing.

A part runs pytest in processes that a fault may end. Each test is tried once, whatever the tests before it did to their
process. The first failure is tried again with one launch at a time, so that the traceback names the launch. All that
pytest prints goes to the folder of evidence.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from tempfile import NamedTemporaryFile

import psutil

from bench.gpu.device_faults import tells_of_lost_device
from bench.gpu.rows import Bench, Row
from bench.gpu.told_tests import CHOICE_FILE, FAILED, IMPORT, STARTED, TOLD_FILE, Choice, Told, read_told

ROOT = Path(__file__).parent.parent.parent
KERNELS = ["tests/kernels/triton"]
RUNNER = ["tests/engine/test_device_runner.py", "tests/engine/test_on_gpu.py"]
SERVER = ["tests/end_to_end/test_on_gpu.py"]
# A rehearsal runs these, which need no GPU.
SMALL_KERNELS = ["tests/kernels/triton/test_silu_and_mul.py"]
SMALL_RUNNER = ["tests/engine/test_device_runner_simulated.py::test_launching_waits_for_nothing"]
SMALL_SERVER = ["tests/end_to_end/test_generate.py::test_tokens_and_text_are_those_computed_by_hand"]
MOST_PROCESSES = 12  # that compile kernels at once; each has its own context on the GPU
TEST_TIMEOUT_S = 120
POLL_S = 0.2
MARGIN_S = 3.0  # before this process's own limit, to report results
AGAIN_S = 40.0  # at most, for the first failure's second run: other tests end so much earlier …
AGAIN_SHARE = 0.25  # … or by this part of the limit
BLOCKING = {"CUDA_LAUNCH_BLOCKING": "1"}
SANITIZER = "compute-sanitizer"
SANITIZED = (SANITIZER, "--tool=memcheck", "--target-processes=all", "--error-exitcode=86")
SANITIZED_AT_ONCE = 4
MOST_TOLD = 3  # failures that the row of a file names


@dataclass(slots=True)
class _File:
    """Results of one test file. `failures`: the names of failed tests, and a line with the first reason."""

    passed: int = 0
    skipped: int = 0
    failures: dict[str, str] = field(default_factory=dict)


def kernel_rows(bench: Bench) -> Iterator[Row]:
    """Test every kernel against its reference, in several processes, since compiling takes most of the time."""
    groups = [SMALL_KERNELS if bench.is_small else KERNELS]
    yield from _rows("tests of kernels", groups, bench, in_parallel=not bench.is_small)


def runner_rows(bench: Bench) -> Iterator[Row]:
    """Test graphs, overlap, memory and transformers' tokens, one by one, since some tests measure free memory."""
    groups = [SMALL_RUNNER] if bench.is_small else [[path] for path in RUNNER]
    yield from _rows("tests of the runner", groups, bench)


def server_rows(bench: Bench) -> Iterator[Row]:
    """Test a whole server through gRPC."""
    yield from _rows("tests of the server", [SMALL_SERVER if bench.is_small else SERVER], bench)


def sanitizer_rows(bench: Bench) -> Iterator[Row]:
    """Run one test of each kernel's file under compute-sanitizer, which reports every access out of bounds.

    A rehearsal runs one without it.
    """
    if bench.is_small:
        yield from _sanitized(SMALL_KERNELS, bench, program=())
        return
    if shutil.which(SANITIZER) is None:
        yield Row(SANITIZER, "all", error=f"{SANITIZER} is not installed")
        return
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / KERNELS[0]).glob("test_*.py"))
    yield from _sanitized(files, bench)


def _rows(part: str, groups: Sequence[Sequence[str]], bench: Bench, in_parallel: bool = False) -> Iterator[Row]:
    """Yield one row per file, also for files done before the limit, and one if the limit cut tests off.

    groups  paths of tests; no process runs tests of two groups
    """
    tests = _Tests(part, bench)
    problems = []
    for paths in groups:
        problems += tests.run(paths, in_parallel)
    yield from _files(part, tests.told())
    yield from (Row(part, "all", error=problem) for problem in problems)
    if (first := _first_failure(tests.told())) is not None:
        outcome = tests.run_again(first, groups)
        yield Row(part, "the first failure again, with CUDA_LAUNCH_BLOCKING=1", error=f"{first.test}: {outcome}")


class _Tests:
    """The tests of a part: what is known of them is in `told`, and what pytest prints in a log beside it."""

    def __init__(self, part: str, bench: Bench) -> None:
        self._told = bench.evidence / f"{part}.jsonl"
        self._log = bench.evidence / f"{part}.log"
        self._again = bench.evidence / f"{part}, first failure.log"
        self._limit_s = bench.limit_s - MARGIN_S
        self._ends = time.monotonic() + self._limit_s
        self._told.unlink(missing_ok=True)
        self._told.touch()

    def told(self) -> list[Told]:
        return read_told(self._told)

    def run(self, paths: Sequence[str], in_parallel: bool) -> list[str]:
        """Run these tests, in another process each time that a fault has ended one. Return what was wrong with it."""
        while True:
            before = self.told()
            done = {one.id for one in before if one.outcome != STARTED}
            choice, environment = Choice(without=sorted(done)), {TOLD_FILE: str(self._told)}
            code = _run_to_end(_command(paths, in_parallel), choice, environment, self._log, self._seconds_left)
            if code is None:
                running = sorted(_unfinished(self.told()))
                at_work = f"; at work on {', '.join(running[:MOST_TOLD])}" if running else ""
                return [f"tests missing here had not run after {self._limit_s:.0f} s{at_work}"]
            unfinished = _unfinished(self.told())
            for one in unfinished.values():
                Told(one.file, one.test, FAILED, f"its process ended with {code}").add_to(self._told)
            if code in (0, 1) and not unfinished:
                return []
            if len(self.told()) == len(before):  # neither passed nor failed: pytest itself broke
                has_run_all = code == 5 and bool(before)
                return [] if has_run_all else [f"pytest ended with {code}: {_last_lines(self._log)}"]

    def run_again(self, test: Told, groups: Sequence[Sequence[str]]) -> str:
        """Run a test alone, with one launch at a time; return what became of it."""
        ends = min(self._ends, time.monotonic() + AGAIN_S)
        told = self._again.with_suffix(".jsonl")
        told.touch()
        code = _run_to_end(
            _command([path for paths in groups for path in paths], in_parallel=False),
            Choice(only=test.id),
            {TOLD_FILE: str(told)} | BLOCKING,
            self._again,
            lambda: ends - time.monotonic(),
        )
        failures = [one.reason for one in read_told(told) if one.outcome == FAILED]
        told.unlink()
        if failures:
            return failures[0]
        return "it passes" if code == 0 else "it did not end in time" if code is None else f"pytest ended with {code}"

    def _seconds_left(self) -> float:
        has_failed = any(one.outcome == FAILED for one in self.told())
        reserved_s = min(AGAIN_S, AGAIN_SHARE * self._limit_s) if has_failed else 0.0
        return self._ends - reserved_s - time.monotonic()


def _run_to_end(
    command: list[str], choice: Choice, environment: Mapping[str, str], log: Path, seconds_left: Callable[[], float]
) -> int | None:
    """Append a pytest's output to a log; return its exit code, or None if it was killed because its time was over."""
    with NamedTemporaryFile() as chosen, log.open("a") as output:
        choice.write(Path(chosen.name))
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | environment | {CHOICE_FILE: chosen.name},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            while process.poll() is None and seconds_left() > 0:
                time.sleep(POLL_S)
            return process.poll()
        finally:
            _kill(process)
            process.wait()


def _unfinished(told: Sequence[Told]) -> dict[str, Told]:
    """Tests that have started and have no outcome, by id."""
    unfinished: dict[str, Told] = {}
    for one in told:
        if one.outcome == STARTED:
            unfinished[one.id] = one
        else:
            unfinished.pop(one.id, None)
    return unfinished


def _first_failure(told: Sequence[Told]) -> Told | None:
    """The first test that lost the GPU or, if none did, the first that failed. An import is not a test."""
    failures = [one for one in told if one.outcome == FAILED and one.test != IMPORT]
    return next((one for one in failures if tells_of_lost_device(one.reason)), failures[0] if failures else None)


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
        *(sys.executable, "-m", "pytest", "-v", "-o", "addopts=", "-p", "no:cacheprovider"),
        *("-p", "bench.gpu.told_tests", "-p", "bench.gpu.device_faults"),
    ]
    if importlib.util.find_spec("pytest_timeout"):  # a thread also ends a test that waits for the GPU for ever
        command += [f"--timeout={TEST_TIMEOUT_S}", "--timeout-method=thread"]
    processes = min(MOST_PROCESSES, (os.cpu_count() or 1) - 2)
    if in_parallel and processes > 1 and importlib.util.find_spec("xdist"):
        command += ["-n", str(processes)]
    return [*command, "-m", "not slow", "--continue-on-collection-errors", *paths]


def _last_lines(log: Path) -> str:
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-300:]


def _files(part: str, told: Sequence[Told]) -> Iterator[Row]:
    for name, tests in groupby(sorted(told, key=lambda one: one.file), key=lambda one: one.file):
        file = _File()
        for test in tests:
            match test.outcome:
                case "started":
                    pass
                case "passed":
                    file.passed += 1
                case "skipped":
                    file.skipped += 1
                case _:
                    file.failures.setdefault(test.test, test.reason)
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


def _sanitized(files: Sequence[str], bench: Bench, program: Sequence[str] = SANITIZED) -> Iterator[Row]:
    """Run a test of each file under a program; yield one row per file, as its test ends."""
    ends = time.monotonic() + bench.limit_s - MARGIN_S

    def sanitize(file: str) -> Row:
        log = bench.evidence / f"{SANITIZER}, {Path(file).stem}.log"
        command = [*program, *_command([file], in_parallel=False)]
        code = _run_to_end(command, Choice(one_per_file=True), {}, log, lambda: ends - time.monotonic())
        errors = [line.strip("= ") for line in log.read_text().splitlines() if "Invalid __" in line]
        if code == 0:
            return Row(SANITIZER, file, rate=1.0, unit="passed", bar="all", met=True)
        found = errors[0] if errors else "its time was over" if code is None else f"{code}: {_last_lines(log)}"
        return Row(SANITIZER, file, rate=0.0, unit="passed", bar="all", met=False, error=found)

    with ThreadPoolExecutor(SANITIZED_AT_ONCE) as threads:
        yield from threads.map(sanitize, files)

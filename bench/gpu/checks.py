"""The tests that need a GPU: a fast wrong result is worth nothing.

A part runs pytest once. A worker of pytest-xdist whose card is lost is replaced (device_faults.py), so that one fault
fails one test. All that pytest prints goes to the folder of evidence, and the rows are read from there.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.gpu import ROOT
from bench.gpu.rows import Bench, Row
from bench.processes import kill_tree

KERNELS = ["tests/kernels/triton"]
RUNNER = ["tests/engine/test_device_runner.py", "tests/engine/test_on_gpu.py", "tests/engine/test_batches_on_gpu.py"]
SERVER = ["tests/end_to_end/test_on_gpu.py"]
# A rehearsal runs these, which need no GPU.
SMALL_KERNELS = ["tests/kernels/triton/test_activate.py"]
SMALL_RUNNER = ["tests/engine/test_device_runner_simulated.py::test_launching_waits_for_nothing"]
SMALL_SERVER = ["tests/end_to_end/test_generate.py::test_tokens_and_text_are_those_computed_by_hand"]
MOST_PROCESSES = 12  # that compile kernels at once; each has its own context on the GPU
TEST_TIMEOUT_S = 120
MARGIN_S = 3.0  # before this process's own limit, to report results
AGAIN_SHARE = 0.2  # of the limit, to run the first failure again with one launch at a time
MOST_NAMED = 3  # failures that the row of a file names
_OUTCOME = re.compile(r"(?:\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED) )?(\S+\.py)::(.*)")
_LAST_WORD = re.compile(r"(.*?) (PASSED|FAILED|ERROR|SKIPPED)\b.*")
_REASON = re.compile(r"(?:FAILED|ERROR) (\S+\.py(?:::.*?)?) - (.*)")


def kernel_rows(bench: Bench) -> Iterator[Row]:
    """Test every kernel against its reference, in several processes, since compiling takes most of the time."""
    processes = 1 if bench.is_small else max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) - 2))
    yield from _rows("tests of kernels", SMALL_KERNELS if bench.is_small else KERNELS, bench, processes)


def runner_rows(bench: Bench) -> Iterator[Row]:
    """Test graphs, overlap, memory and transformers' tokens, one by one, since some tests measure free memory."""
    yield from _rows("tests of the runner", SMALL_RUNNER if bench.is_small else RUNNER, bench)


def server_rows(bench: Bench) -> Iterator[Row]:
    """Test a whole server through gRPC."""
    yield from _rows("tests of the server", SMALL_SERVER if bench.is_small else SERVER, bench)


def _rows(part: str, paths: Sequence[str], bench: Bench, processes: int = 1) -> Iterator[Row]:
    """Yield one row per file, and others if the limit cut tests off, pytest broke, or a test failed."""
    log, limit_s = bench.evidence / f"{part}.log", bench.limit_s - MARGIN_S
    code = _pytest(paths, processes, (1 - AGAIN_SHARE) * limit_s, log)
    outcomes, reasons = read_log(log.read_text(errors="replace"))
    failures: dict[str, list[str]] = {}
    for test, outcome in outcomes.items():
        file, _, name = test.partition("::")
        failures.setdefault(file, [])
        if outcome in ("FAILED", "ERROR"):
            failures[file].append(f"{name}: {reasons.get(test, 'see the log')}")
    for file, failed in failures.items():
        found = [outcome for test, outcome in outcomes.items() if test.partition("::")[0] == file]
        passed = found.count("PASSED")
        yield Row(
            part,
            file,
            rate=float(passed),
            unit="passed",
            bar="all",
            met=not failed and passed > 0,
            figures={"failed": float(len(failed)), "skipped": float(found.count("SKIPPED"))},
            error="; ".join(failed[:MOST_NAMED]),
        )
    if code is None:
        yield Row(part, "all", error="the limit of time has cut off the tests that are missing here")
    elif code not in (0, 1):
        yield Row(part, "all", error=f"pytest ended with {code}: {_last_lines(log)}")
    if first := next((test for test, outcome in outcomes.items() if outcome == "FAILED"), None):
        again = bench.evidence / f"{part}, first failure.log"
        code = _pytest([first], 1, AGAIN_SHARE * limit_s, again, {"CUDA_LAUNCH_BLOCKING": "1"})
        other = "the limit of time has cut it off" if code is None else "it passes" if code == 0 else _last_lines(again)
        reason = next(iter(read_log(again.read_text(errors="replace"))[1].values()), other)
        yield Row(part, "the first failure again, with CUDA_LAUNCH_BLOCKING=1", error=f"{first}: {reason}")


def read_log(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return each test's outcome, "" if it has begun and not ended, and the reasons of failures, both by test."""
    outcomes: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for line in text.splitlines():
        if found := _REASON.match(line):
            reasons[found[1]] = found[2]
        elif found := _OUTCOME.match(line):
            outcome, file, rest = found.groups()
            if outcome is None and (last := _LAST_WORD.fullmatch(rest)):
                rest, outcome = last.groups()
            outcomes[f"{file}::{rest.strip()}"] = outcome or ""
    return outcomes, reasons


def _pytest(
    paths: Sequence[str], processes: int, limit_s: float, log: Path, environment: Mapping[str, str] | None = None
) -> int | None:
    """Run pytest into a log; return its exit code, or None if it was killed because its time was over.

    The options of pyproject.toml are left out: their plug-ins may be missing.
    """
    command = [
        *(sys.executable, "-m", "pytest", "-v", "-o", "addopts=", "-p", "no:cacheprovider", "-m", "not slow"),
        *("-p", "bench.gpu.device_faults", "--continue-on-collection-errors", *paths),
    ]
    if importlib.util.find_spec("pytest_timeout"):  # a thread also ends a test that waits for the GPU for ever
        command += [f"--timeout={TEST_TIMEOUT_S}", "--timeout-method=thread"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(processes), "--max-worker-restart", "100"]
    ends = time.monotonic() + limit_s
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "COLUMNS": "300", **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            return process.wait(max(0.0, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        finally:
            kill_tree(process.pid)
            process.wait()


def _last_lines(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-300:]

"""The GPU benchmark's tests: a fault of one test leaves the others, and what pytest prints is kept."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu import checks
from bench.gpu.rows import Bench, Ceilings, Row

ROOT = Path(__file__).parent.parent.parent


def bench(evidence: Path, limit_s: float = 60.0) -> Bench:
    evidence.mkdir(exist_ok=True)
    device, unknown = torch.device("cpu"), Ceilings(math.nan, math.nan)
    return Bench(device, lambda calls: 0.0, unknown, is_small=False, evidence=evidence, limit_s=limit_s)


def rows_of(folder: Path, limit_s: float = 60.0, in_parallel: bool = False, **files: str) -> list[Row]:
    """Run these files, by name, each in processes of its own; the evidence is in the folder's "evidence"."""
    paths = [folder / f"test_{name}.py" for name in files]
    for path, text in zip(paths, files.values(), strict=True):
        path.write_text(text)
    groups = [[str(path) for path in paths]] if in_parallel else [[str(path)] for path in paths]
    return list(checks._rows("tests", groups, bench(folder / "evidence", limit_s), in_parallel))


SOME = """
import pytest, time

@pytest.mark.parametrize("number", range(3))
def test_good(number): pass

def test_bad(): assert 1 + 1 == 3, "sums"

@pytest.mark.skip
def test_skipped(): pass

def test_endless(): time.sleep(1000)
"""


@pytest.mark.simulated
def test_tests_are_told_of_by_file_and_those_that_the_limit_cuts_off_are_missed(tmp_path: Path) -> None:
    some, missing, again = rows_of(tmp_path, 16.0, some=SOME)
    assert (some.rate, some.met, some.figures) == (3.0, False, {"failed": 1.0, "skipped": 1.0})
    assert some.error == "test_bad: AssertionError: sums"
    assert re.fullmatch(
        r"tests missing here had not run after 13 s; at work on (\S*/)?test_some.py::test_endless", missing.error
    )
    assert again.error.startswith("test_bad: ")


def test_a_file_that_cannot_be_imported_is_told_of(tmp_path: Path) -> None:
    (broken,) = rows_of(tmp_path, broken="import nothing_of_that_name")
    assert (broken.rate, broken.met) == (0.0, False)
    assert broken.error == "its import: ModuleNotFoundError: No module named 'nothing_of_that_name'"


def test_a_pytest_that_does_not_work_is_told_of(tmp_path: Path) -> None:
    (row,) = checks._rows("tests", [[str(tmp_path / "absent.py")]], bench(tmp_path))
    assert row.error.startswith("pytest ended with 4: ")
    assert "absent.py" in row.error


FAULTY = """
import os
import pytest

lost = []

def synchronize():
    if lost:
        where = ", in this launch" if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1" else ""
        raise RuntimeError("CUDA error: an illegal memory access was encountered" + where)

@pytest.mark.parametrize("number", range(3))
def test_before(number): synchronize()

def test_out_of_bounds():
    lost.append(True)
    synchronize()

@pytest.mark.parametrize("number", range(3))
def test_after(number): synchronize()
"""


@pytest.mark.parametrize("in_parallel", [False, pytest.param(True, marks=pytest.mark.simulated)])
def test_an_illegal_access_fails_its_own_test_alone_and_runs_again_with_one_launch_at_a_time(
    tmp_path: Path, in_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a card, the fault stays: in the same process every later test would fail."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    faulty, again = rows_of(tmp_path, in_parallel=in_parallel, faulty=FAULTY)
    assert (faulty.rate, faulty.figures["failed"]) == (6.0, 1.0), faulty.error
    assert faulty.error == "test_out_of_bounds: RuntimeError: CUDA error: an illegal memory access was encountered"
    assert again.error.startswith("test_out_of_bounds: ")
    assert again.error.endswith("an illegal memory access was encountered, in this launch")
    for log in ("tests.log", "tests, first failure.log"):
        assert 'raise RuntimeError("CUDA error: an' in (tmp_path / "evidence" / log).read_text(), "the whole traceback"


SIMULATED = """
import pytest
import torch
from bench.gpu.simulated_cuda import SimulatedCuda

@pytest.fixture(scope="module")
def card():
    with pytest.MonkeyPatch.context() as patch, SimulatedCuda().in_place_of_cuda(patch) as card:
        yield card

def test_before(card): torch.zeros(2, device="cuda")

def test_out_of_bounds(card):
    card.is_broken = True
    torch.zeros(2, device="cuda")

def test_after(card): torch.zeros(2, device="cuda")
"""


@pytest.mark.simulated
def test_without_workers_a_fault_of_the_card_ends_pytest_with_a_line_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "test_faulty.py").write_text(SIMULATED)
    command = [sys.executable, "-m", "pytest", "-p", "bench.gpu.device_faults", "-o", "addopts=", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == pytest.ExitCode.INTERRUPTED
    assert "test_faulty.py::test_out_of_bounds lost the GPU of this process; the tests after it" in result.stdout
    assert "1 failed, 1 passed" in result.stdout


DYING = """
import os, signal, sys

def test_before(): sys.another_file_was_here = True
def test_killed(): os.kill(os.getpid(), signal.SIGKILL)
def test_after(): pass
"""
ALONE = """
import sys

def test_alone(): assert not hasattr(sys, "another_file_was_here")
"""


@pytest.mark.simulated
def test_a_process_that_dies_in_a_test_fails_that_test_alone_and_other_files_have_processes_of_their_own(
    tmp_path: Path,
) -> None:
    alone, dying, again = rows_of(tmp_path, dying=DYING, alone=ALONE)
    assert (dying.rate, dying.error) == (2.0, "test_killed: its process ended with -9")
    assert again.error == "test_killed: pytest ended with -9"
    assert alone.met


SANITIZER = """#!/bin/sh
echo "told to $1 $2 $3"
shift 3
case "$*" in *bad*) echo "========= Invalid __global__ read of size 4 bytes"; exit 86;; esac
exec "$@"
"""


def test_one_test_of_a_file_runs_under_compute_sanitizer_and_what_it_finds_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(SANITIZER)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    files = [tmp_path / f"test_{name}.py" for name in ("good", "bad")]
    for file in files:
        file.write_text("def test_one(): pass\ndef test_two(): raise AssertionError")
    good, bad = checks._sanitized([str(file) for file in files], bench(tmp_path))
    assert (good.met, bad.met) == (True, False)
    assert bad.error == "Invalid __global__ read of size 4 bytes"
    log = (tmp_path / "compute-sanitizer, test_good.log").read_text()
    assert "told to --tool=memcheck --target-processes=all" in log
    assert "1 passed, 1 deselected" in log


def test_without_compute_sanitizer_a_row_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (row,) = checks.sanitizer_rows(bench(tmp_path))
    assert row.error == "compute-sanitizer is not installed"

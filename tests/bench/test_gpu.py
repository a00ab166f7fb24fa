"""The GPU benchmark: rehearsed on a simulated card, with parts that fail, and what it leaves behind."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.gpu import checks, evidence
from bench.gpu.__main__ import LEAST_S, LIMIT_S, PARTS, run, seconds_for
from bench.gpu.breakdown import Breakdown, Kernel, Span
from bench.gpu.random_model import write_model
from bench.gpu.report import Report
from bench.gpu.rows import Bar, Bench, Ceilings, Row, Work, measure
from bench.gpu.worker import Part, Settings
from pagoda_server.checkpoints import resolve
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.kernels.triton.inputs import ModelShape
from pagoda_server.settings.engine import EngineConfig

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parent.parent.parent
TINY = ModelShape("tiny", 2, 4, 2, 16, 32, 48, 99)


ARTEFACTS = {"gpu.json", "gpu.md", "breakdown.json", "logs.tar.gz"}


def command(out: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "bench.gpu", "--rehearse", "--out", str(out), *arguments]


def logs(out: Path) -> dict[str, str]:
    with tarfile.open(out / "logs.tar.gz") as tar:
        return {name: tar.extractfile(name).read().decode() for name in tar.getnames()}  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_rehearsal_runs_parts_on_a_simulated_card_and_leaves_what_a_run_on_a_card_leaves(tmp_path: Path) -> None:
    """`make rehearse-gpu` runs all parts."""
    result = subprocess.run(
        command(tmp_path, "--parts", "decode step 1B,layers"), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr + result.stdout
    assert "tiny, decode of 3, context 24" in result.stdout
    assert {path.name for path in tmp_path.iterdir()} == ARTEFACTS
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert record["card"]["gpu"] == "simulated"
    rows = [Row(**row) for row in record["rows"]]
    kernels = {"residual + RMSNorm", "SiLU · mul", "RoPE + KV write"}
    assert {row.part for row in rows} == {"ceilings", "decode step", "step by kernel"} | kernels
    assert [row.error for row in rows if row.error] == []
    assert all(row.fraction is not None for row in rows if row.part not in ("ceilings", "step by kernel"))
    page = (tmp_path / "gpu.md").read_text()
    assert "bars reached, 0 rows without a measurement" in page
    assert all(f"| {row.case} |" in page for row in rows)
    prefill, *decodes = json.loads((tmp_path / "breakdown.json").read_text())
    assert ("prefill of 3 × 24" in prefill["what"], len(decodes)) == (True, 2)
    for breakdown in decodes:
        (attention,) = (kernel for kernel in breakdown["kernels"] if kernel["name"] == "paged_attention")
        assert attention["calls"] == pytest.approx(2 * breakdown["steps"], abs=4), "one a layer; a step may be cut"
    assert "| paged_attention |" in page
    assert "| no kernel |" in page
    assert "torch==" in logs(tmp_path)["machine.txt"]
    assert '"case": "tiny, 2 rows"' in logs(tmp_path)["layers/worker-1.log"]


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    for name, value in evidence.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (tmp_path / "logs").mkdir()
    return Report(tmp_path, tmp_path / "logs", time.monotonic())


def planted(function: str, result: Report, limit_s: float = 60.0) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Run a part that fails as planned; return cases and errors, and the logs by name."""
    part = Part("planted part", 1.0, "tests.bench.planted_parts", function)
    rows = list(run(part, True, limit_s, result))
    result.write_logs()
    return [(row.case, row.error) for row in rows], logs(result._out)


def test_tracebacks_of_a_failing_case_and_of_a_failing_part_are_in_the_archive(result: Report) -> None:
    rows, files = planted("raises", result)
    bad = ("bad", "ZeroDivisionError: integer division or modulo by zero")
    assert rows == [("good", ""), bad, ("", "LookupError: planted in the part")]
    log = files["planted-part/worker-1.log"]
    assert "Traceback" in log
    assert 'yield measure(_work("bad", lambda: 1 // 0), bench)' in log
    assert 'raise LookupError("planted in the part")' in log


@pytest.mark.simulated
def test_a_worker_that_dies_leaves_the_place_where_it_did(result: Report) -> None:
    rows, files = planted("dies", result)
    assert rows[0] == ("good", "")
    assert rows[1][1].startswith(f"the process died with {-signal.SIGSEGV}: ")
    assert 'planted_parts.py", line ' in files["planted-part/worker-1.log"]
    assert " in dies" in files["planted-part/worker-1.log"]


@pytest.mark.simulated
def test_a_part_that_takes_too_long_is_ended_and_leaves_the_place_where_it_was(
    result: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.gpu.__main__.LEAST_S", 8.0)
    rows, files = planted("hangs", result, 8.0)
    assert rows == [("good", ""), ("", "the process was ended after 8 s")]
    assert " in hangs" in files["planted-part/worker-1.log"]


def test_a_part_that_loses_the_card_goes_on_in_a_new_process(result: Report) -> None:
    rows, files = planted("loses_the_card", result)
    fault = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert rows == [("first", ""), ("out of bounds", fault), ("third", "")]
    assert "in _fault" in files["planted-part/worker-1.log"]
    assert '"case": "third"' in files["planted-part/worker-2.log"]


@pytest.mark.simulated
def test_a_benchmark_that_is_terminated_leaves_its_report_and_its_logs(tmp_path: Path) -> None:
    with subprocess.Popen(command(tmp_path, "--parts", "serving"), cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "gpu.json").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert {path.name for path in tmp_path.iterdir()} == ARTEFACTS
    assert '"case": "copy' in logs(tmp_path)["ceilings/worker-1.log"]


def test_an_archive_of_long_logs_is_small_and_keeps_their_ends(tmp_path: Path) -> None:
    folder, out = tmp_path / "logs", tmp_path / "out"
    folder.mkdir()
    out.mkdir()
    noise = np.random.default_rng(0).integers(33, 127, 5 << 20, dtype=np.uint8).tobytes()
    for at in range(10):
        (folder / f"{at}.log").write_bytes(b"begin" + noise + b"end")
        os.utime(folder / f"{at}.log", (at, at))
    evidence.archive(folder, out)
    assert (out / "logs.tar.gz").stat().st_size <= 16 << 20
    files = logs(out)
    assert set(files) == {f"{at}.log" for at in range(3, 10)} | {"left-out.txt"}, "the newest are kept"
    assert files["9.log"].startswith("begin")
    assert files["9.log"].endswith("end")
    assert " bytes are left out here" in files["9.log"]
    assert "0.log: 5242888 bytes" in files["left-out.txt"]


def test_no_process_of_the_benchmark_waits_for_a_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--dest", str(tmp_path), "no-such-package"]
    environment = os.environ | evidence.environment()
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert "Ignoring indexes" in result.stdout or "No matching distribution" in result.stderr
    assert "Retrying" not in result.stderr


def test_wheels_that_a_machine_lacks_are_found_by_this_run_alone(tmp_path: Path) -> None:
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "HERE = True")
        wheel.writestr("carried-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n")
        wheel.writestr("carried-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("carried-1.0.dist-info/RECORD", "")
    evidence.install(wheels, site, tmp_path / "log")
    environment = os.environ | evidence.environment(site)
    subprocess.run([sys.executable, "-c", "import carried; assert carried.HERE"], env=environment, check=True)


@pytest.mark.parametrize("limit_s", [LIMIT_S, 600.0, 1000.0])
def test_parts_that_need_all_of_their_time_leave_the_later_ones_their_share(limit_s: float) -> None:
    left_s, given = limit_s, []
    for at in range(len(PARTS)):
        given.append(seconds_for(PARTS[at:], left_s))
        left_s -= given[-1]
    everything = sum(part.share_s for part in PARTS)
    assert given == pytest.approx([limit_s * part.share_s / everything for part in PARTS])


def test_what_a_part_leaves_over_is_there_for_the_next() -> None:
    assert seconds_for(PARTS[1:], LIMIT_S) > seconds_for(PARTS[1:], LIMIT_S - PARTS[0].share_s)
    assert seconds_for(PARTS[-1:], 100.0) == 100.0


def test_with_little_time_the_first_parts_run_and_the_last_ones_do_not() -> None:
    assert [seconds_for(PARTS, left_s) for left_s in (50.0, 25.0, 5.0)] == [LEAST_S, LEAST_S, 5.0]


@pytest.mark.simulated
def test_a_worker_whose_parent_is_gone_ends() -> None:
    part = Part("waits", 1.0, "tests.bench.planted_parts", "hangs")
    command = [sys.executable, "-m", "bench.gpu.worker", Settings(part, is_small=True, evidence="").line()]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
    )
    assert result.returncode == 128 + signal.SIGTERM


LOG = """
tests/a/test_one.py::test_good[1 - 2] PASSED                     [ 10%]
tests/a/test_one.py::test_bad FAILED [ 20%]
tests/a/test_one.py::test_skipped SKIPPED (why) [ 30%]
[gw1] [ 40%] PASSED tests/b/test_two.py::test_far
[gw0] [ 50%] FAILED tests/b/test_two.py::test_lost[a b]
tests/b/test_two.py::test_endless
=========================== short test summary info ============================
FAILED tests/a/test_one.py::test_bad - AssertionError: sums
ERROR tests/c/test_three.py - ModuleNotFoundError: No module named 'absent'
"""


def test_what_pytest_printed_says_which_tests_passed_failed_and_did_not_end() -> None:
    outcomes, reasons = checks.read_log(LOG)
    assert outcomes == {
        "tests/a/test_one.py::test_good[1 - 2]": "PASSED",
        "tests/a/test_one.py::test_bad": "FAILED",
        "tests/a/test_one.py::test_skipped": "SKIPPED",
        "tests/b/test_two.py::test_far": "PASSED",
        "tests/b/test_two.py::test_lost[a b]": "FAILED",
        "tests/b/test_two.py::test_endless": "",
    }
    assert reasons["tests/a/test_one.py::test_bad"] == "AssertionError: sums"
    assert reasons["tests/c/test_three.py"] == "ModuleNotFoundError: No module named 'absent'"


SOME = """
import os, pytest

@pytest.mark.parametrize("number", range(3))
def test_good(number): pass
def test_bad(): assert 1 + 1 == 3, "sums"
def test_lost():
    if os.environ.get("CUDA_LAUNCH_BLOCKING") != "1": os._exit(1)
def test_after(): pass
"""


def checked(folder: Path, text: str, limit_s: float) -> list[Row]:
    (folder / "test_some.py").write_text(text)
    ceilings = Ceilings(1.0, 1.0)
    bench = Bench(torch.device("cpu"), lambda calls: 0.0, ceilings, is_small=False, evidence=folder, limit_s=limit_s)
    return list(checks._rows("tests", [str(folder / "test_some.py")], bench))


@pytest.mark.simulated
def test_a_test_that_ends_its_process_fails_alone_and_the_first_failure_runs_again(tmp_path: Path) -> None:
    some, again = checked(tmp_path, SOME, 300.0)
    assert (some.rate, some.met, some.figures["failed"]) == (4.0, False, 2.0), some
    assert "test_bad: AssertionError: sums" in some.error
    assert "test_bad: AssertionError: sums" in again.error


@pytest.mark.simulated
def test_the_limit_ends_tests_that_hang(tmp_path: Path) -> None:
    *_, cut = checked(tmp_path, "import time\ndef test_good(): pass\ndef test_endless(): time.sleep(1000)", 18.0)
    assert "cut off" in cut.error


def work(
    error: Callable[[], float], bar: Bar | None = None, **others: Callable[[], list[Callable[[], object]]]
) -> Work:
    return Work("part", "case", 1000.0, 0.0, lambda: [int], error, 0.1, dict(others), bar)


def bench(time_us: float) -> Bench:
    return Bench(
        torch.device("cpu"), lambda calls: time_us, Ceilings(1e9, 1e12), is_small=True, evidence=Path("absent")
    )


@pytest.mark.parametrize(("error", "told"), [(0.2, "wrong by 0.2, more than 0.1"), (math.nan, "wrong by nan")])
def test_a_wrong_result_is_not_timed(error: float, told: str) -> None:
    row = measure(work(lambda: error), bench(1.0))
    assert row.time_us is None
    assert told in row.error


def test_a_kernel_that_fails_is_a_row_that_says_so() -> None:
    row = measure(work(lambda: 1 // 0), bench(1.0))
    assert (row.time_us, row.error) == (None, "ZeroDivisionError: integer division or modulo by zero")


def test_a_rival_that_fails_leaves_the_measurement() -> None:
    def absent() -> list[Callable[[], object]]:
        raise NotImplementedError("not in this release. See elsewhere")

    row = measure(work(lambda: 0.0, other=lambda: [int], absent=absent), bench(2.0))
    assert (row.time_us, row.fraction) == (2.0, 0.5)
    assert row.others == {"other": 2.0}
    assert row.error == "absent: NotImplementedError: not in this release"


@pytest.mark.parametrize(
    ("bar", "met"),
    [
        (Bar(fraction=0.5), True), (Bar(fraction=0.6), False),
        (Bar(time_us=2.0), True), (Bar(time_us=1.9), False),
        (Bar(tflops=400), False), (None, None),
    ],
)  # fmt: skip
def test_bars_are_judged(bar: Bar | None, met: bool | None) -> None:
    assert measure(work(lambda: 0.0, bar), bench(2.0)).met is met


def test_time_in_which_two_kernels_run_counts_once_and_gaps_are_found() -> None:
    spans = [Span("a", 2.5, 6.0), Span("b", 0.0, 4.0), Span("a", 1.0, 2.0), Span("c", 8.0, 9.0), Span("c", 9.5, 10.0)]
    found = Breakdown.of("steps", 2, spans)
    assert (found.window_us, found.busy_us, found.longest_gap_us, found.idle_fraction) == (10.0, 7.5, 2.0, 0.25)
    assert found.kernels == [Kernel("a", 2, 4.5), Kernel("b", 1, 4.0), Kernel("c", 2, 1.5)]
    assert found.table().rows[0] == ["a", "1.0", "2.2", "45.0 %"]
    assert found.table().rows[-1] == ["no kernel", "", "1.2", "25.0 %"]


def test_a_profiler_that_saw_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="saw no kernel"):
        Breakdown.of("steps", 2, [])


def test_a_model_of_random_weights_is_served_from_its_configuration_alone(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", TINY, max_positions=64)
    assert resolve(str(folder)) == folder
    runner = ModelRunner(EngineConfig(str(folder), dtype="float32", kv_cache_gb=0.001, quantization="none"))
    assert runner.info.vocab_size == 99
    parameters = 2 * 99 * 32 + 2 * (32 * (4 + 2 * 2) * 16 + 32 * 4 * 16 + 3 * 32 * 48 + 2 * 32) + 32
    assert runner.info.weight_bytes == 4 * parameters

"""A rehearsal of the GPU benchmark: every part on the CPU, with interpreted kernels and tiny shapes."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench.gpu.__main__ import LEAST_S, LIMIT_S, run, seconds_for
from bench.gpu.random_model import write_model
from bench.gpu.rows import Bar, Bench, Ceilings, Row, Work, measure
from bench.gpu.step import busy
from bench.gpu.worker import PARTS, Settings
from pagoda_server.checkpoints import resolve
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.kernels.triton.inputs import ModelShape
from pagoda_server.settings.engine import EngineConfig

ROOT = Path(__file__).parent.parent.parent
UNKNOWN = Ceilings(math.nan, math.nan)
TINY = ModelShape("tiny", 2, 4, 2, 16, 32, 48, 99)


def test_a_rehearsal_measures_every_part_and_writes_json_and_a_page(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu", "--smoke", "--out", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    rows = [Row(**row) for row in json.loads((tmp_path / "gpu.json").read_text())["rows"]]
    parts = {"ceilings", "decode attention", "prefill attention", "residual + RMSNorm", "SiLU · mul", "RoPE + KV write"}
    assert {row.part for row in rows} == parts | {"sampling", "projections", "decode step", "serving"}
    assert [row for row in rows if row.rate is None] == []
    assert all(row.fraction is not None for row in rows if row.part not in ("ceilings", "serving"))
    page = (tmp_path / "gpu.md").read_text()
    assert "bars reached, 0 rows without a measurement" in page
    assert all(f"| {row.case} |" in page for row in rows)


def test_a_part_that_takes_too_long_is_ended_and_told_of() -> None:
    (row,) = run(["serving"], True, UNKNOWN, 0.5, {})
    assert row == Row("serving", "", error="the process was ended after 0 s")


@pytest.mark.parametrize("limit_s", [LIMIT_S, 600.0, 1000.0])
def test_parts_that_need_all_of_their_time_leave_the_later_ones_their_share(limit_s: float) -> None:
    limits = [part.limit_s for part in PARTS]
    left_s, given = limit_s, []
    for at in range(len(PARTS)):
        given.append(seconds_for([part.name for part in PARTS[at:]], left_s))
        left_s -= given[-1]
    share = min(1.0, limit_s / sum(limits))
    assert given == pytest.approx([share * limit for limit in limits])


def test_what_a_part_leaves_over_is_there_for_the_next() -> None:
    first, second = (part.limit_s for part in PARTS[:2])
    everything = sum(part.limit_s for part in PARTS)
    assert seconds_for([part.name for part in PARTS[1:]], everything - first) == pytest.approx(second)
    assert seconds_for([PARTS[-1].name], 10_000.0) == PARTS[-1].limit_s


def test_with_little_time_the_first_parts_run_and_the_last_ones_do_not() -> None:
    names = [part.name for part in PARTS]
    assert [seconds_for(names, left_s) for left_s in (50.0, 25.0, 5.0)] == [LEAST_S, LEAST_S, 5.0]


def test_a_worker_whose_parent_is_gone_ends() -> None:
    line = Settings(["nothing"], is_small=True, evidence="").line()
    told = "import threading; rows = lambda settings: iter(threading.Event().wait, True); "
    script = f"import bench.gpu.worker as worker; {told} worker.rows = rows; worker.main({line!r})"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.DEVNULL, timeout=60, check=False)
    assert result.returncode == 128 + signal.SIGTERM


def test_a_process_that_dies_is_told_of() -> None:
    (row,) = run(["nothing"], True, UNKNOWN, 60.0, {})
    assert row.error == "the process died with 1: ValueError: there is no part 'nothing'"


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


def test_time_in_which_two_kernels_run_counts_once() -> None:
    assert busy([(0.0, 4.0), (1.0, 2.0), (3.0, 6.0), (8.0, 9.0)]) == 7.0


def test_a_model_of_random_weights_is_served_from_its_configuration_alone(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", TINY, max_positions=64)
    assert resolve(str(folder)) == folder
    runner = ModelRunner(EngineConfig(str(folder), dtype="float32", kv_cache_gb=0.001, quantization="none"))
    assert runner.info.vocab_size == 99
    parameters = 2 * 99 * 32 + 2 * (32 * (4 + 2 * 2) * 16 + 32 * 4 * 16 + 3 * 32 * 48 + 2 * 32) + 32
    assert runner.info.weight_bytes == 4 * parameters

"""`python -m bench` and its driver, with real servers of the synthetic model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from matplotlib.image import imread

from bench import BenchError, driver
from bench.systems import parse_system, served
from bench.workloads import Request, Workload, uniform
from tests.engine.harness import VOCAB_SIZE
from tests.servers import ROOT, Server

pytestmark = pytest.mark.thorough


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_the_driver_counts_every_token_and_every_step(synthetic_server: Server) -> None:
    heard: list[int] = []
    run = driver.run(synthetic_server.address, uniform(VOCAB_SIZE, 0, 8, 20, 300), heard.append)
    assert [len(times.arrivals) for times in run.times] == [300] * 8
    assert sum(heard) >= run.output_tokens == 2400
    assert run.steps is not None
    assert 300 <= run.steps <= 600  # steps of 2 ms; most have all eight sequences
    assert run.mean_batch is not None
    assert 4 <= run.mean_batch <= 8
    assert all(times.arrivals == sorted(times.arrivals) for times in run.times)


def test_requests_are_sent_when_they_are_due(synthetic_server: Server) -> None:
    requests = [Request([1, 2, 3], 2, arrival_s=at, kind="late" if at else "") for at in (1.5, 0.0)]
    run = driver.run(synthetic_server.address, Workload("two", requests), lambda count: None)
    late, early = run.times
    assert late.kind == "late"
    assert early.arrivals[0] < 1.5 <= late.arrivals[0]
    assert late.ttft_s < 1.5


def test_the_cache_is_seen_to_fill(synthetic_server: Server) -> None:
    run = driver.run(synthetic_server.address, uniform(VOCAB_SIZE, 0, 16, 100, 150), lambda count: None)
    assert run.kv is not None
    assert 0 < run.kv.occupancy <= run.kv.peak
    assert 0 < run.kv.waste < 16 / 116  # less than a block for each sequence


def test_a_server_that_fails_a_request_fails_the_run(synthetic_server: Server) -> None:
    too_long = Workload("too long", [Request([1], 1_000_000)])
    with pytest.raises(BenchError, match="INVALID_ARGUMENT"):
        driver.run(synthetic_server.address, too_long, lambda count: None)


def test_compare_is_the_default_and_writes_what_it_measured(tmp_path: Path) -> None:
    result = bench(
        *("--workload", "mixed", "--count", "6", "--model", "synthetic", "--repeat", "2", "--output", str(tmp_path)),
        *("--serve-args", "--step-ms 1", "--system", "wide", "--system", "narrow:--max-num-seqs 2"),
    )
    assert result.returncode == 0, result.stderr
    record = json.loads((tmp_path / "mixed.json").read_text())
    assert [system["name"] for system in record["systems"]] == ["wide", "narrow"]
    assert "--max-num-seqs 2" in record["systems"][1]["command"]
    for system in record["systems"]:
        assert len(system["turns"]) == 2
        for turn in system["turns"]:
            assert turn["output_tokens"] == record["workload"]["output_tokens"]
            assert sum(len(arrivals) for _, _, arrivals in turn["times"]) == turn["output_tokens"]
            assert turn["peak_memory_bytes"] > 50e6
    assert record["setting"]["command"].startswith("python -m bench --workload mixed")
    assert "| narrow |" in (tmp_path / "mixed.md").read_text()
    assert imread(tmp_path / "mixed-latency.png").shape[0] > 100


def test_prefill_runs_its_requests_one_after_the_other(tmp_path: Path) -> None:
    result = bench(
        *("--workload", "prefill", "--count", "3", "--model", "synthetic", "--repeat", "1", "--output", str(tmp_path)),
        *("--serve-args", "--step-ms 20"),
    )
    assert result.returncode == 0, result.stderr
    record = json.loads((tmp_path / "prefill.json").read_text(), parse_constant=pytest.fail)  # NaN is not JSON
    [turn] = record["systems"][0]["turns"]
    assert turn["itl_ms"] is None
    ends = [arrivals[-1] for _, _, arrivals in turn["times"]]
    assert [due for _, due, _ in turn["times"]] == [0.0, *ends[:-1]]
    [rate] = record["systems"][0]["rates"]
    assert rate == pytest.approx(512e3 / turn["ttft_ms"]["p50"])
    assert "prompt tok/s" in (tmp_path / "prefill.md").read_text()
    assert imread(tmp_path / "prefill-latency.png").shape[0] > 100


def test_a_system_may_have_environment_variables_of_its_own() -> None:
    system = parse_system("narrow:FORCED=avx2 EMPTY= --step-ms 1 --max-num-seqs 2", ["--model", "synthetic"])
    assert system.command == "FORCED=avx2 EMPTY='' pagoda serve --model synthetic --step-ms 1 --max-num-seqs 2"
    with served(["--model", "synthetic"], {"FORCED": "avx2"}) as server:
        router = psutil.Process(server.pid)
        for process in (router, *router.children(recursive=True)):
            assert process.environ()["FORCED"] == "avx2"
            assert process.environ()["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workload", "nothing"), "mixed, chat, rag"),
        (("--peers", "nobody-knows"), "openvino-genai"),
        (("--workload", "single", "--rate", "3"), "rate"),
    ],
)
def test_a_mistake_is_one_line_of_standard_error(arguments: tuple[str, ...], message: str) -> None:
    result = bench("--model", "synthetic", *arguments)
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_benchmark_leaves_no_process_behind(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "--model", "synthetic", "--workload", "single", "--output", str(tmp_path)]
    process = subprocess.Popen([*command, "--serve-args", "--step-ms 500"], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    # A router, its engine and the process that renders its chats.
    while len(children := psutil.Process(process.pid).children(recursive=True)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(30) == 128 + number
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []

"""Scenarios of `bench promises`: figures from a real server, and bounds from figures made by hand."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from bench.promises.interference import PACED, TARGET_ITL_MS, WHOLE, Interference
from bench.promises.priority import Priorities
from bench.promises.run import SCENARIOS
from tests.bench.test_command import bench
from tests.engine.harness import VOCAB_SIZE
from tests.servers import Server, running_server

pytestmark = pytest.mark.thorough


def test_a_high_priority_passes_the_crowd_and_a_low_one_waits_no_longer_than_its_bound() -> None:
    scenario = Priorities(num_clients=24, num_high=2, settle_s=0.6)
    with running_server("--model", "synthetic", "--step-ms", "5", *scenario.variants[0].arguments) as server:
        figures = asyncio.run(scenario.run(server.address, VOCAB_SIZE, 0))
    assert figures["TTFT, high priority ms"] < 0.5 * figures["TTFT p50, crowd ms"]
    assert figures["requests that passed it"] > 24, "every request that arrives within a step of ageing passes it"
    assert (
        0.3 * figures["bound of that wait s"] < figures["wait, low priority s"] <= 1.5 * figures["bound of that wait s"]
    ), "on a busy machine too"


def test_priority_is_compared_with_first_come_first_served() -> None:
    of_priority = {"TTFT, high priority ms": 50.0, "wait, low priority s": 6.0, "bound of that wait s": 8.0}
    of_fcfs = {"TTFT, high priority ms": 400.0, "wait, low priority s": 1.0, "bound of that wait s": 8.0}
    faster, waits = Priorities().bounds([{"priority": of_priority, "fcfs": of_fcfs}])
    assert (faster.values, faster.is_met) == ([8.0], True)
    assert (waits.values, waits.is_met) == ([0.75], True)


def test_gaps_beside_a_prompt_are_told_from_those_before_and_after_it(synthetic_server: Server) -> None:
    scenario = Interference(prompt_len=2000, stream_len=600, alone_s=0.3)
    figures = asyncio.run(scenario.run(synthetic_server.address, VOCAB_SIZE, 0))
    alone, before, after = (figures[f"ITL p99 {when} ms"] for when in ("alone", "before the prompt", "after it"))
    assert 0.9 * min(before, after) <= alone <= 1.1 * max(before, after), "the gaps before and after are one set"
    assert figures["longest with the prompt ms"] >= figures["ITL p50 with the prompt ms"] > 0.0
    assert figures["longest with the prompt ms"] >= 2.0, "a step takes 2 ms"


def test_the_target_is_compared_with_itself_and_with_whole_prompts() -> None:
    p99_ms = float(TARGET_ITL_MS)
    figures = {
        "ITL p99 with the prompt ms": p99_ms,
        "longest with the prompt ms": 50.0,
    }
    whole = figures | {"ITL p99 with the prompt ms": 10 * p99_ms, "longest with the prompt ms": 5000.0}
    held, p99, longest = Interference().bounds([{PACED: figures, WHOLE: whole}])
    assert [bound.values for bound in (held, p99, longest)] == [[1.0], [10.0], [100.0]]
    assert all(bound.is_met for bound in (held, p99, longest))


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_is_told_by_its_name(name: str) -> None:
    scenario = SCENARIOS[name]()
    assert scenario.name == name
    assert len({variant.name for variant in scenario.variants}) == len(scenario.variants)


def test_an_unknown_scenario_is_told_in_one_line(tmp_path: Path) -> None:
    result = bench("promises", "--only", "nothing", "--model", "synthetic", "--output", str(tmp_path))
    assert result.returncode == 1
    assert "fairness" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_run_writes_its_figures_and_its_verdicts(tmp_path: Path) -> None:
    arguments = ("--only", "prefix", "--model", "synthetic", "--serve-args", "--step-ms 1", "--repeat", "1")
    result = bench("promises", *arguments, "--output", str(tmp_path))
    assert result.returncode == 0, result.stderr
    record = json.loads((tmp_path / "promises.json").read_text())
    assert [promise["limit"] for promise in record["promises"]] == [0.15]
    assert record["turns"]["prefix"][0]["as served"]["TTFT, first request ms"] > 1.0
    assert "second ÷ first" in (tmp_path / "promises.md").read_text()

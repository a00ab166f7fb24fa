from __future__ import annotations

import math

import pytest
from rich.console import Console

from bench import report
from bench.driver import kv_use
from bench.measure import PROMPT_RATE, KVUse, RequestTimes, Run, Spread, Targets, Turns
from pagoda.v1 import control_pb2

# Due at 0 s: tokens at 0.1, 0.2, 0.4 s. Due at 0.5 s: tokens at 1.0 and 2.0 s.
RUN = Run(
    [RequestTimes(0.0, [0.1, 0.2, 0.4], "short"), RequestTimes(0.5, [1.0, 2.0], "long")],
    steps=4,
    kv=KVUse(0.25, 0.5, 0.125),
    peak_memory_bytes=1_500_000_000,
)


def test_throughput_counts_from_the_first_arrival_to_the_last_token() -> None:
    assert RUN.output_tokens == 5
    assert RUN.elapsed_s == pytest.approx(2.0)
    assert RUN.tokens_per_s == pytest.approx(2.5)
    assert RUN.requests_per_s == pytest.approx(1.0)
    assert RUN.mean_batch == pytest.approx(1.25)


def test_time_to_first_token_counts_from_when_the_request_was_due() -> None:
    assert RUN.ttft_ms(50) == pytest.approx(300)  # of 100 and 500
    assert RUN.ttft_ms(50, "long") == pytest.approx(500)
    assert RUN.kinds() == ["short", "long"]


def test_inter_token_latency_is_over_every_gap_of_every_request() -> None:
    assert sorted(RUN.itls_ms()) == pytest.approx([100, 200, 1000])
    assert RUN.itl_ms(50) == pytest.approx(200)
    assert math.isnan(Run([RequestTimes(0.0, [1.0])]).itl_ms(50))


def test_goodput_takes_requests_that_met_both_targets() -> None:
    # TTFT 100 and 500 ms, TPOT 150 and 1000 ms.
    assert RUN.goodput(Targets(ttft_ms=500.1, tpot_ms=1000.1)) == pytest.approx(1.0)
    assert RUN.goodput(Targets(ttft_ms=499, tpot_ms=2000)) == pytest.approx(0.5)
    assert RUN.goodput(Targets(ttft_ms=1000, tpot_ms=999)) == pytest.approx(0.5)
    assert RUN.goodput(Targets(ttft_ms=99, tpot_ms=149)) == 0


def test_runs_in_sequence_are_one_run_without_the_time_between_them() -> None:
    runs = [Run([RequestTimes(0.5, [1.5, 2.0])], 2, peak_memory_bytes=5), Run([RequestTimes(0.0, [0.25])], 1, None, 7)]
    joined = Run.in_sequence(runs)
    assert joined.times == [RequestTimes(0.0, [1.0, 1.5]), RequestTimes(1.5, [1.75])]
    assert (joined.steps, joined.peak_memory_bytes) == (3, 7)
    assert joined.elapsed_s == pytest.approx(1.75)


def test_prompt_tokens_per_second_are_those_of_the_median_request() -> None:
    times = [RequestTimes(0.0, [ttft_s], prompt_len=512) for ttft_s in (0.5, 2.0, 8.0)]
    assert Run(times).prompt_tokens_per_s == pytest.approx(256)


def turns(name: str, *tokens_per_s: float, is_peer: bool = False) -> Turns:
    runs = [Run([RequestTimes(0.0, [1 / rate])]) for rate in tokens_per_s]
    return Turns(name, f"run {name}", {"version": "1"}, runs, is_peer)


def test_ratios_are_taken_within_a_turn() -> None:
    ratios = turns("ours", 100, 10, 40).ratios(turns("theirs", 50, 10, 10))
    assert ratios == Spread(pytest.approx(1.0), pytest.approx(2.0), pytest.approx(4.0))


def test_the_best_peer_is_chosen_anew_in_every_turn() -> None:
    ours = turns("ours", 100, 60, 20)
    peers = [turns("one", 50, 40, 5, is_peer=True), turns("two", 40, 10, 10, is_peer=True)]
    assert ours.ratios_to_best(peers) == Spread(pytest.approx(1.5), pytest.approx(2.0), pytest.approx(2.0))
    cells = report.against_the_best([ours, turns("variant", 50, 40, 10), *peers])
    told = "one in 2 of 3 turns, two in 1 of 3 turns"
    assert cells.rows == [["ours", "2.00 (1.50–2.00)", told], ["variant", "1.00", told]]


def test_a_workload_of_prompts_compares_prompt_tokens() -> None:
    def prompts(name: str, ttft_s: float, is_peer: bool) -> Turns:
        return Turns(name, "", {}, [Run([RequestTimes(0.0, [ttft_s], prompt_len=512)])], is_peer, PROMPT_RATE)

    throughput, best, latency, _ = report.tables([prompts("ours", 0.5, False), prompts("theirs", 2.0, True)], Targets())
    assert throughput.headings[1] == "prompt tok/s"
    assert [row[1:3] for row in throughput.rows] == [["1024", "–"], ["256", "4.00"]]
    assert best.rows == [["ours", "4.00", "theirs in 1 of 1 turns"]]
    assert [row[2] for row in latency.rows] == ["–", "–"]  # one token per request has no gap


def test_kv_use_counts_only_samples_with_running_sequences() -> None:
    samples = [
        control_pb2.EngineLoad(blocks_total=100),
        control_pb2.EngineLoad(blocks_total=100, blocks_referenced=10, kv_slots_unused=16),
        control_pb2.EngineLoad(blocks_total=100, blocks_referenced=30, kv_slots_unused=48),
    ]
    assert kv_use(samples, block_size=16) == KVUse(pytest.approx(0.2), pytest.approx(0.3), pytest.approx(64 / 640))
    assert kv_use(samples[:1], block_size=16) is None


def test_the_page_has_a_row_for_each_system_with_the_medians() -> None:
    systems = [Turns("ours", "pagoda serve", {}, [RUN]), turns("theirs", 1.25)]
    cells = report.throughput(systems, Targets(500.1, 1000.1))
    assert cells.rows == [
        ["ours", "2", "–", "1.00", "1.00", "1.2"],
        ["theirs", "1", "2.00", "1.25", "0.00", "–"],
    ]
    markdown = cells.markdown().splitlines()
    assert markdown[-1] == "| theirs | 1 | 2.00 | 1.25 | 0.00 | – |"
    assert {line.count("|") for line in markdown[2:]} == {7}


def test_latencies_are_told_apart_by_kind_and_unknown_memory_is_a_dash() -> None:
    systems = [Turns("ours", "pagoda serve", {}, [RUN]), turns("theirs", 1.0)]
    assert [row[0] for row in report.latency(systems).rows] == ["ours", "ours, short", "ours, long", "theirs"]
    assert report.latency(systems).rows[2][1] == "500 / 500 / 500"
    ours, theirs = report.memory(systems).rows
    assert ours == ["ours", "1.50", "25 %", "50 %", "12.5 %"]
    assert theirs[1:] == ["–"] * 4


def test_a_spread_shows_its_range_only_where_there_is_one() -> None:
    assert report.spread(Spread(1.0, 2.0, 3.0), 1) == "2.0 (1.0–3.0)"
    assert report.spread(Spread(2.0, 2.0, 2.0), 0) == "2"


def test_a_terminal_shows_the_same_cells() -> None:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.memory([Turns("ours", "pagoda serve", {}, [RUN])]).rich())
    assert "12.5 %" in console.export_text()

"""The simulator: times computed by hand, one end per request, and the same figures for the same seed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench.measure import Targets
from bench.simulate import report
from bench.simulate.arrivals import HOSTILE, HUGE_PROMPT, Arrivals, draw
from bench.simulate.simulator import Outcome, Server, System, simulate
from bench.simulate.step_times import DEFAULT
from pagoda_server.engine.runners.synthetic import StepTime
from pagoda_server.engine.scheduling.policies import POLICIES

ONE_SECOND_A_TOKEN = Server(StepTime(base_s=10.0, per_token_s=1.0), timeout_s=1e6)
FCFS = System("fcfs")


def run(system: System, server: Server, *requests: tuple[float, int, int]) -> Outcome:
    at, prompts, outputs = (list(column) for column in zip(*requests, strict=True))
    return simulate(system, server, Arrivals(at, prompts, outputs, [""] * len(at), [0] * len(at)), Targets())


def test_one_request_takes_its_steps() -> None:
    outcome = run(FCFS, ONE_SECOND_A_TOKEN, (5.0, 20, 3))
    assert outcome.ttft_s.tolist() == [30.0]  # a step of 10 + 20 s
    assert outcome.tpot_s.tolist() == [11.0]  # two steps of 10 + 1 s
    assert (outcome.span_s, outcome.steps, outcome.output_tokens) == (52.0, 3, 3)


def test_a_prompt_in_chunks_lets_a_stream_go_on() -> None:
    server = ONE_SECOND_A_TOKEN
    requests = ((1.0, 10, 4), (2.0, 300, 1))
    cut = run(System("cut", token_budget=101), server, *requests)
    # The first prompt until 21; then three steps of 111 s, with 100 tokens of the second prompt and a decode each.
    assert cut.ttft_s.tolist() == [20.0, 21.0 + 3 * 111.0 - 2.0]
    assert cut.tpot_s.tolist() == [111.0, 0.0]
    whole = run(System("whole", token_budget=None), server, *requests)
    assert whole.ttft_s.tolist() == [20.0, 21.0 + 311.0 - 2.0]
    assert whole.tpot_s.tolist() == [pytest.approx((311.0 + 2 * 11.0) / 3), 0.0]


def test_who_waits_longer_than_its_client_leaves_and_costs_nothing() -> None:
    server = Server(StepTime(base_s=10.0), max_num_seqs=1, timeout_s=25.0)
    outcome = run(FCFS, server, (1.0, 10, 2), (2.0, 10, 5), (3.0, 10, 5), (4.0, 10, 5))
    assert outcome.ends == {"length": 1, "deadline": 3}
    assert np.isnan(outcome.ttft_s[2])


def test_more_than_are_admitted_are_refused() -> None:
    server = Server(StepTime(base_s=10.0), max_requests=2, timeout_s=1e6)
    outcome = run(FCFS, server, *[(1.0, 10, 2)] * 5)
    assert outcome.ends == {"length": 2, "refused": 3}


@pytest.mark.parametrize(
    "system",
    [
        System("whole", token_budget=None),
        *(System(policy, policy=policy) for policy in POLICIES),
        System("paced", policy="deadline", target_itl_ms=60.0),
    ],
    ids=lambda system: system.name,
)
def test_every_request_ends_once_and_a_seed_gives_the_same_run(system: System) -> None:
    server = Server(DEFAULT, num_blocks=1024, timeout_s=20.0)  # few enough blocks for preemptions, and for rejections
    outcomes = [simulate(system, server, draw(300, 1.2, DEFAULT, 64, seed=3), Targets()) for _ in range(2)]
    for outcome in outcomes:
        assert outcome.ends.total() == 300
        assert outcome.ends["length"] == np.count_nonzero(~np.isnan(outcome.ttft_s))
    first, second = (json.dumps(report.figures(outcome, Targets())) for outcome in outcomes)
    assert first == second
    np.testing.assert_array_equal(outcomes[0].ttft_s, outcomes[1].ttft_s)


def test_gaps_between_tokens_are_counted_all() -> None:
    server = Server(DEFAULT)
    outcome = simulate(FCFS, server, draw(200, 0.5, DEFAULT, 64, seed=1), Targets())
    assert outcome.gaps.counts.sum() == outcome.output_tokens - outcome.ends["length"] == outcome.output_tokens - 200
    assert outcome.gaps.percentile_s(0) == pytest.approx(0.0061, rel=0.05)  # one sequence, one token


def test_arrivals_have_the_load_they_are_drawn_for_and_heavy_tails() -> None:
    arrivals = draw(60_000, 0.5, DEFAULT, 64, seed=0)
    assert arrivals.at == sorted(arrivals.at)
    prompts = np.array(arrivals.prompt_len)
    assert 0 < np.count_nonzero(prompts == HUGE_PROMPT) < 12
    usual = prompts[prompts < HUGE_PROMPT]
    work = usual.mean() * 0.00045 + np.mean(arrivals.output_len) * (0.0055 / 64 + 0.00056)
    first_third = 20_000 * work / arrivals.at[19_999]
    assert first_third == pytest.approx(0.5, rel=0.25)  # bursts: a third of the run is few of them
    hostile = [at for at, tenant in enumerate(arrivals.tenant) if tenant == HOSTILE]
    assert min(hostile) >= 20_000
    assert max(hostile) < 40_000
    assert len(hostile) == pytest.approx(12_000, rel=0.05)

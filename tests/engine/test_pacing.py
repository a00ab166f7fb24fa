"""Bounded interference: what a step may take beside decodes, and what every prompt gets all the same."""

from __future__ import annotations

import random

import pytest

from engine.pacing import ADVANCE_EVERY, MIN_PREFILL
from engine.step_time_model import StepLoad, StepTimeModel
from engine.synthetic import StepTime
from tests.engine.harness import SteppedEngine
from tests.engine.test_scheduler import prompt

STEP_TIME = StepTime(0.005, 0.0001, 0.0001)


def decoding_engine(target_itl_s: float | None) -> SteppedEngine:
    """Eight streams that decode; a step of a full budget takes 57 ms beside them."""
    engine = SteppedEngine(
        num_blocks=4000, token_budget=512, max_num_seqs=16, max_model_len=9000,
        target_itl_s=target_itl_s, step_time=STEP_TIME,
    )  # fmt: skip
    for at in range(8):
        engine.add(prompt(20, at), max_tokens=2000)
    for _ in range(20):
        engine.step()
    return engine


def step_times_beside(engine: SteppedEngine, prompt_len: int) -> list[float]:
    """Of the steps until a prompt that arrives now has its first token."""
    seq = engine.add(prompt(prompt_len, 99), max_tokens=2, bypass=True)
    times = []
    while seq.first_token is None:
        started = engine.now
        engine.step()
        times.append(engine.now - started)
    return times


def test_steps_beside_decodes_hold_the_target_once_their_time_has_been_seen() -> None:
    engine = decoding_engine(0.020)
    step_times_beside(engine, 600)
    times = step_times_beside(engine, 4096)
    assert max(times) <= 1.02 * 0.020
    assert sum(times) <= 1.1 * 4096 * 0.020 / 141, "and they use what the target allows: 141 prompt tokens a step"


def test_without_a_target_the_token_budget_is_the_bound() -> None:
    times = step_times_beside(decoding_engine(None), 4096)
    assert max(times) == pytest.approx(0.005 + 9 * 0.0001 + 512 * 0.0001)


def test_a_target_that_decodes_alone_exceed_still_lets_prompts_advance() -> None:
    engine = decoding_engine(0.001)
    step_times_beside(engine, 600)
    engine.step()  # in which that prompt's sequence ends
    times = step_times_beside(engine, 640)
    assert max(times) == pytest.approx(0.005 + 9 * 0.0001 + (8 + MIN_PREFILL) * 0.0001)
    assert len(times) == 640 // MIN_PREFILL


def test_a_step_without_decodes_has_the_whole_budget() -> None:
    engine = SteppedEngine(
        num_blocks=4000, token_budget=512, max_model_len=9000, target_itl_s=0.001, step_time=STEP_TIME
    )
    assert len(step_times_beside(engine, 4096)) == 8


def test_every_admitted_prompt_advances_in_any_eight_steps_however_many_pass_it() -> None:
    engine = SteppedEngine(num_blocks=400, max_num_seqs=8, token_budget=16, max_model_len=500)
    low = engine.add(prompt(200), max_tokens=2)
    engine.step()
    waited, longest = 0, 0
    for at in range(80):
        engine.add(prompt(16, at), max_tokens=1, priority=1)  # takes a whole step
        before = low.num_computed
        engine.step()
        waited = 0 if low.num_computed > before else waited + 1
        longest = max(longest, waited)
        assert low.preemptions == 0
    assert 0 < longest < ADVANCE_EVERY


def test_the_model_recovers_the_parts_of_a_step_time_and_follows_when_they_change() -> None:
    rng, model = random.Random(1), StepTimeModel()

    def load() -> StepLoad:
        return StepLoad.of(rng.randrange(64), rng.randrange(64_000), rng.randrange(512), rng.randrange(500_000))

    for parts in ((0.004, 0.002, 0.003, 0.03, 0.0), (0.010, 0.002, 0.003, 0.06, 0.01)):
        for _ in range(1500):
            at = load()
            seconds = sum(part * x for part, x in zip(parts, at, strict=True))
            model.observe(at, seconds * rng.uniform(0.95, 1.05))
        assert model.parts == pytest.approx(parts, rel=0.15, abs=0.0008)


def test_one_step_that_met_something_else_does_not_ruin_the_model() -> None:
    model = StepTimeModel()
    for at in range(200):
        model.observe(StepLoad.of(8, 800, at % 5 * 100, 0), 0.005 + 0.0001 * (at % 5 * 100))
    model.observe(StepLoad.of(8, 800, 0, 0), 30.0)
    assert model.predict(StepLoad.of(8, 800, 0, 0)) < 0.006

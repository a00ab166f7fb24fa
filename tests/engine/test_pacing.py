"""Bounded interference: how long prompts may make a step with decodes, and what every prompt gets in any case."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest

from pagoda_server.engine.core.sequence import Request, SamplingParams, Sequence
from pagoda_server.engine.core.step import Chunk, StepPlan
from pagoda_server.engine.runners.synthetic import StepTime
from pagoda_server.engine.scheduling.pacing import ADVANCE_EVERY, LEAST_GROWTH, MIN_PREFILL
from pagoda_server.engine.timing.cost_model import CostModel, RunningQuantile, StepLoad, StepTimeFilter
from pagoda_server.settings import EngineConfig, SettingError
from tests.engine.harness import SteppedEngine, TakesTime
from tests.engine.test_scheduler import prompt

pytestmark = pytest.mark.thorough


class DearKeys:
    """The time of steps on a slow machine: 1,024 keys double the time of a prompt token."""

    def of(self, plan: StepPlan) -> float:
        return sum(0.1 * chunk.length * (1 + (chunk.start + chunk.length / 2) / 1024) for chunk in plan.chunks)


STEP_TIME = StepTime(0.005, 0.0001, 0.0001)
DEFAULT_TARGET_S = EngineConfig("any").target_itl_s


def decoding_engine(target_itl_s: float | None) -> SteppedEngine:
    """Return an engine with eight decoding streams, beside which a step of the full budget takes 57 ms."""
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
    """Add a prompt; return how long each step takes until its first token."""
    seq = engine.add(prompt(prompt_len, 99), max_tokens=2, bypass=True)
    times = []
    while seq.account.first_token is None:
        started = engine.now
        engine.step()
        times.append(engine.now - started)
    return times


def test_steps_beside_decodes_hold_the_target_once_their_time_has_been_seen() -> None:
    engine = decoding_engine(0.020)
    step_times_beside(engine, 600)
    times = step_times_beside(engine, 4096)
    assert max(times) <= 1.02 * 0.020
    assert sum(times) <= 1.25 * 4096 * 0.020 / 141, "and they use what the target allows: 141 prompt tokens a step"


def test_a_prompt_that_is_alone_makes_no_step_as_long_as_a_hang() -> None:
    """A chunk of the whole budget takes 51 s at the prompt's start, and 460 s at its end."""
    engine = SteppedEngine(
        num_blocks=4000, token_budget=512, max_num_seqs=16, max_model_len=9000, longest_step_s=15.0,
        step_time=DearKeys(),
    )  # fmt: skip
    first, *times = step_times_beside(engine, 8192)
    assert first < 1.1 * 6.4, "64 tokens, as nothing was known yet"
    assert max(times) <= 1.1 * 15
    assert sum(times) / len(times) > 0.8 * 15, "and steps use what they may"


def test_a_gpus_default_budget_is_cut_to_the_default_target_from_the_first_long_prompt_on() -> None:
    """A step of the whole budget would take 338 ms."""
    limits = EngineConfig("any").step_limits("cuda")
    engine = SteppedEngine(
        num_blocks=4000, block_size=16, token_budget=limits.token_budget, max_num_seqs=limits.max_num_seqs,
        max_model_len=40_000, target_itl_s=DEFAULT_TARGET_S, step_time=StepTime(0.008, 0.00001, 0.00004),
    )  # fmt: skip
    for at in range(64):
        engine.add(prompt(20, at), max_tokens=2000)
    for _ in range(20):
        engine.step()
    times = step_times_beside(engine, 30_000)
    assert max(times) <= 1.02 * 0.100
    assert len(times) <= 1.15 * 30_000 * 0.00004 / (0.100 - 0.008 - 64 * 0.00005), "and they use what the target allows"


def test_without_a_target_the_token_budget_is_the_bound() -> None:
    times = step_times_beside(decoding_engine(None), 4096)
    assert max(times) == pytest.approx(0.005 + 9 * 0.0001 + 512 * 0.0001)


@pytest.mark.parametrize(("num_prompts", "growth"), [(1, 1.5), (4, 2.0), (8, 1 + math.sqrt(2))])
def test_a_target_that_decodes_alone_exceed_leaves_prompts_a_share_that_grows_with_their_number(
    num_prompts: int, growth: float
) -> None:
    engine = decoding_engine(0.001)
    step_times_beside(engine, 600)
    engine.step()  # in which that prompt's sequence ends
    alone = 0.005 + 8 * 0.0001 + 8 * 0.0001
    for at in range(1, num_prompts):
        engine.add(prompt(640, at), max_tokens=2, bypass=True)
    times = step_times_beside(engine, 640)
    assert sorted(times)[-2] <= 1.05 * growth * alone, "all but the first, from which the time of a chunk is learned"
    assert times[1] >= 0.9 * growth * alone, "and they have that share while all of them are there"


def test_many_decodes_leave_a_prompt_a_quarter_of_their_time_whatever_the_target() -> None:
    engine = SteppedEngine(
        num_blocks=4000, token_budget=512, max_num_seqs=33, max_model_len=9000,
        target_itl_s=0.001, step_time=STEP_TIME,
    )  # fmt: skip
    for at in range(32):
        engine.add(prompt(20, at), max_tokens=2000)
    for _ in range(20):
        engine.step()
    step_times_beside(engine, 300)
    alone = 0.005 + 32 * 0.0002
    times = step_times_beside(engine, 640)
    assert max(times) <= 1.04 * LEAST_GROWTH * alone
    assert len(times) <= 1.3 * 640 / ((LEAST_GROWTH - 1) * alone / 0.0001)


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
        assert low.account.preemptions == 0
    assert 0 < longest < ADVANCE_EVERY


@dataclass(frozen=True, slots=True)
class Crowd:
    """What 48 requests meet that come at once to an engine that has computed nothing before."""

    seconds: float
    median_ttft_s: float
    p99_gap_s: float
    chunks: list[list[tuple[int, int, int]]]


def crowd(step_time: TakesTime, target_itl_s: float | None) -> Crowd:
    engine = SteppedEngine(
        num_blocks=4000, token_budget=512, max_num_seqs=32, max_model_len=500,
        target_itl_s=target_itl_s, step_time=step_time,
    )  # fmt: skip
    rng = random.Random(9)
    seqs = [engine.add(prompt(rng.randrange(8, 240), at), max_tokens=rng.randrange(8, 100)) for at in range(48)]
    gaps, chunks = [], []
    while not (plan := engine.step()).is_empty:
        chunks.append([(chunk.seq.id, chunk.start, chunk.length) for chunk in plan.chunks])
        gaps += [step_time.of(plan)] * sum(chunk.start >= chunk.seq.request.prompt_len for chunk in plan.chunks)
    ttfts = sorted(seq.account.first_token - seq.request.arrived for seq in seqs if seq.account.first_token is not None)
    return Crowd(engine.now, ttfts[len(ttfts) // 2], sorted(gaps)[int(0.99 * len(gaps))], chunks)


@pytest.mark.parametrize(
    "step_time",
    [
        StepTime(0.025, 0.0005, 0.005),
        StepTime(0.050, 0.003, 0.020),
        StepTime(0.060, 0.001, 0.006),
        StepTime(0.4, 0.004, 0.03),
    ],
    ids=["slow tokens", "slower tokens", "slow weights", "slower weights"],
)
def test_the_default_target_keeps_a_slow_machine_busy_and_shortens_its_gaps(step_time: StepTime) -> None:
    before, after = crowd(step_time, None), crowd(step_time, DEFAULT_TARGET_S)
    assert after.seconds <= before.seconds / 0.88
    assert after.median_ttft_s <= before.median_ttft_s
    assert after.p99_gap_s <= before.p99_gap_s / 4


def test_the_default_target_is_held_by_a_machine_that_can() -> None:
    step_time = StepTime(0.0055, 0.00011, 0.00045)
    before, after = crowd(step_time, None), crowd(step_time, DEFAULT_TARGET_S)
    assert after.seconds <= before.seconds / 0.98
    assert after.p99_gap_s <= 0.105
    assert before.p99_gap_s >= 0.2


@pytest.mark.parametrize("step_time", [StepTime(0.0), StepTime(0.005, 0.00001, 0.00002), StepTime(0.020, 0.0, 0.0001)])
def test_the_default_target_changes_no_step_of_a_machine_whose_full_steps_are_shorter(step_time: StepTime) -> None:
    assert crowd(step_time, DEFAULT_TARGET_S).chunks == crowd(step_time, None).chunks


def test_a_target_of_zero_is_none() -> None:
    assert EngineConfig("any").target_itl_s == 0.1
    assert EngineConfig("any", target_itl_ms=0).target_itl_s is None
    with pytest.raises(SettingError, match="--target-itl-ms must be at least 0, not -1"):
        EngineConfig("any", target_itl_ms=-1)


@dataclass
class Machine:
    """A step reads the keys before each of its chunks once, and each prompt token reads those before it.

    At 4,000 tokens of context a prompt token takes nearly four times as long as the first one. `noise` makes a step
    faster or slower by up to this. `slowdown` may change during a run.
    """

    random: random.Random
    noise: float = 0.0
    slowdown: float = 1.0

    def of(self, plan: StepPlan) -> float:
        seconds = 0.008 + 0.0002 * len(plan.chunks)
        for chunk in plan.chunks:
            seconds += chunk.start * 4e-7  # fetches
            if chunk.length > 1:
                seconds += 0.001 + chunk.length * (0.0003 + 2e-7 * (chunk.start + chunk.length / 2))
        return seconds * self.slowdown * self.random.uniform(1 - self.noise, 1 + self.noise)

    def decodes(self, count: int, context_len: int) -> float:
        return self.slowdown * (0.008 + count * (0.0002 + context_len * 4e-7))


def fresh_engine(machine: Machine, target_itl_s: float | None = None) -> SteppedEngine:
    """Return an engine that decoded eight short prompts for 300 steps, and has not seen a chunk beside decodes."""
    engine = SteppedEngine(
        num_blocks=4000, token_budget=512, max_num_seqs=64, max_model_len=9000,
        target_itl_s=target_itl_s, step_time=machine,
    )  # fmt: skip
    for at in range(8):
        engine.add(prompt(64, at), max_tokens=5000, bypass=True)
    for _ in range(300):
        engine.step()
    return engine


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_the_target_is_held_from_the_first_long_prompt_on_though_its_context_costs_more_and_more(noise: float) -> None:
    machine = Machine(random.Random(1), noise)
    engine = fresh_engine(machine, target_itl_s=0.025)
    times = sorted(step_times_beside(engine, 4096))
    assert times[int(0.99 * len(times))] <= 1.05 * 0.025
    assert times[-1] <= 1.3 * 0.025
    assert sum(times) / len(times) >= (0.8 - noise) * 0.025, "and what the target leaves is used"


def test_the_target_is_held_again_soon_after_the_machine_has_slowed_down() -> None:
    machine = Machine(random.Random(2), 0.1)
    engine = fresh_engine(machine, target_itl_s=0.040)
    step_times_beside(engine, 1024)
    machine.slowdown = 1.7
    times = step_times_beside(engine, 4096)
    assert sum(time > 1.05 * 0.040 for time in times) <= 0.05 * len(times)
    assert max(times[20:]) <= 1.25 * 0.040


def test_a_server_that_has_long_only_decoded_still_knows_what_a_prompt_takes() -> None:
    rng, model, machine = random.Random(5), StepTimeFilter(), Machine(random.Random(5), 0.1)
    seqs = [Sequence(id, [1], Request(1), SamplingParams()) for id in range(9)]

    def plan(context_len: int, start: int, length: int) -> StepPlan:
        decodes = [Chunk(seq, context_len, 1, True) for seq in seqs[:8]]
        return StepPlan([*decodes, Chunk(seqs[8], start, length, False)] if length else decodes)

    for step in range(3000):
        length = rng.randrange(10, 100) if step < 60 else 0
        made = plan(64 + step, 30 * step, length)
        model.observe(load_of(made), machine.of(made))
    machine.noise = 0.0
    for start, length in ((0, 100), (1000, 50)):
        expected = model.predict(load_of(made := plan(3064, start, length)))
        assert expected == pytest.approx(machine.of(made), rel=0.2)


class SlowPrompts:
    """A step whose prompt tokens take ten times as long each as all its decodes together."""

    def of(self, plan: StepPlan) -> float:
        return 0.010 + sum(0.1 * chunk.length for chunk in plan.chunks if chunk.length > 1)


def test_a_prompt_gets_a_few_tokens_of_every_step_however_long_they_take() -> None:
    engine = SteppedEngine(
        num_blocks=4000, token_budget=512, max_num_seqs=16, max_model_len=9000,
        target_itl_s=0.020, step_time=SlowPrompts(),
    )  # fmt: skip
    engine.add(prompt(20), max_tokens=2000)
    for _ in range(20):
        engine.step()
    assert len(step_times_beside(engine, 640)) <= 640 // MIN_PREFILL


def load_of(plan: StepPlan) -> StepLoad:
    return StepLoad.of_chunks(plan.chunks, plan.num_tokens)


def random_load(rng: random.Random) -> StepLoad:
    decodes, chunks = rng.randrange(64), rng.randrange(1, 4)
    tokens, start = rng.randrange(512), rng.randrange(2000)
    return StepLoad.of(decodes, decodes * rng.randrange(1000), chunks, tokens, tokens * start, chunks * start)


def test_the_model_recovers_the_parts_of_a_step_time_and_follows_when_they_change() -> None:
    rng, model = random.Random(1), StepTimeFilter()
    for parts in ((0.004, 0.002, 0.003, 0.004, 0.03, 0.0, 0.02), (0.010, 0.002, 0.003, 0.004, 0.06, 0.01, 0.02)):
        for _ in range(1500):
            at = random_load(rng)
            seconds = sum(part * x for part, x in zip(parts, at, strict=True))
            model.observe(at, seconds * rng.uniform(0.95, 1.05))
        off = []
        for _ in range(200):
            at = random_load(rng)
            off.append(model.predict(at) / sum(part * x for part, x in zip(parts, at, strict=True)))
        assert 0.9 <= min(off) <= max(off) <= 1.1


def test_one_step_that_met_something_else_does_not_ruin_the_model() -> None:
    model = StepTimeFilter()
    for at in range(200):
        model.observe(StepLoad.of(8, 800, 1, at % 5 * 100), 0.005 + 0.0001 * (at % 5 * 100))
    model.observe(StepLoad.of(8, 800, 1), 30.0)
    assert model.predict(StepLoad.of(8, 800, 1)) < 0.006


def test_a_model_that_has_seen_little_says_so_and_one_that_has_seen_enough_says_by_how_much_it_was_exceeded() -> None:
    model, load = StepTimeFilter(), StepLoad.of(decodes=8, decode_keys=800)
    assert model.observe(StepLoad.of(chunks=4, prompt_tokens=512), 0.250) is None
    assert model.observe(load, 0.010) is None
    for _ in range(20):
        model.observe(load, 0.010)
    assert model.observe(load, 0.030) == pytest.approx(3.0, rel=0.01)


def test_a_step_that_prepared_those_of_its_shape_teaches_nothing() -> None:
    now = 0.0
    costs = CostModel(512, lambda: now)
    seq = Sequence(0, [1] * 500, Request(10), SamplingParams())

    def step(rows: int, seconds: float, *, is_first: bool = False) -> None:
        nonlocal now
        costs.scheduled(after_idle=False)
        now += seconds
        costs.committed(StepPlan([Chunk(seq, 499, 1, samples=True)] * rows), is_first=is_first)

    for rows in (1, 2, 4, 2, 1, 3, 8, 1) * 3:
        step(rows, 0.002 + 0.001 * rows)
    step(9, 5.0, is_first=True)
    assert costs.decodes_s(9, 9 * 500) == pytest.approx(0.011, rel=0.05)
    step(9, 0.011)
    assert costs.decodes_s(9, 9 * 500) == pytest.approx(0.011, rel=0.05), "the next step began where this one ended"


def test_no_part_is_negative_and_the_others_make_up_for_it() -> None:
    rng, model = random.Random(7), StepTimeFilter()
    for _ in range(500):
        at = random_load(rng)
        model.observe(at, max(0.001, 0.010 + 0.020 * at.prompt_tokens - 0.002 * at.decodes))
        assert min(model.parts) >= 0
    assert model.predict(StepLoad.of(32, prompt_tokens=256)) == pytest.approx(0.019, rel=0.15)


def test_a_quantile_is_that_of_the_last_values_alone() -> None:
    rng, quantile = random.Random(8), RunningQuantile(0.9, 50)
    assert quantile.value(7.0) == 7.0
    values = [rng.random() for _ in range(300)]
    for at, value in enumerate(values, 1):
        quantile.add(value)
        last = sorted(values[max(0, at - 50) : at])
        assert quantile.value(0.0) == last[min(len(last) - 1, int(0.9 * len(last)))]

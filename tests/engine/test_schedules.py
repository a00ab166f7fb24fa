"""The four ways of serving: their steps counted by hand, and what holds in all of them."""

from __future__ import annotations

from typing import get_args

import pytest

from pagoda_server.engine.core.sequence import EndReason, Sequence, State, StepPlan
from pagoda_server.engine.scheduling.schedules import SCHEDULES, ScheduleName
from tests.engine.harness import SteppedEngine

ALL = get_args(ScheduleName)


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + 7 * at) % 256 for at in range(length)]


def plans_until_idle(engine: SteppedEngine) -> list[StepPlan]:
    plans = []
    while not (plan := engine.step()).is_empty:
        plans.append(plan)
    return plans


def rows(plan: StepPlan) -> dict[int, int]:
    return {chunk.seq.id: chunk.length for chunk in plan.chunks}


def test_every_name_has_its_mode() -> None:
    assert set(ALL) == SCHEDULES.keys()


@pytest.mark.parametrize(
    ("schedule", "steps", "computed"),
    [
        ("sequential", 10, 16),  # 6 + 2 + 2 steps; 3 + 5, 3 + 1 and 3 + 1 tokens
        ("interleaved", 10, 16),
        ("static", 8, 20),  # the first two for 6 steps, the third for 2; four rows of a member that has finished
        ("continuous", 6, 16),  # the third takes the place of the second
    ],
)
def test_steps_and_rows_of_two_places_and_outputs_of_6_2_and_2(
    schedule: ScheduleName, steps: int, computed: int
) -> None:
    engine = SteppedEngine(max_num_seqs=2, schedule=schedule)
    seqs = [engine.add(prompt(3, at), max_tokens=length) for at, length in enumerate((6, 2, 2))]
    plans = plans_until_idle(engine)
    assert (len(plans), sum(plan.num_tokens for plan in plans)) == (steps, computed)
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in seqs)


@pytest.mark.parametrize("schedule", ALL)
def test_no_mode_changes_a_token_even_when_blocks_run_out(schedule: ScheduleName) -> None:
    engine = SteppedEngine(num_blocks=12, block_size=4, schedule=schedule, prefix_caching=False)
    seqs = [engine.add(prompt(1 + 3 * at, at), max_tokens=24 - at) for at in range(8)]
    engine.run()
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in seqs)
    assert engine.pool.num_referenced == 0


@pytest.mark.parametrize("schedule", ALL)
def test_a_shared_prefix_is_taken_from_the_cache_in_every_mode(schedule: ScheduleName) -> None:
    engine = SteppedEngine(block_size=4, token_budget=64, schedule=schedule)
    engine.add(prompt(18), max_tokens=3)
    engine.run()
    again, other = engine.add(prompt(18), max_tokens=3), engine.add(prompt(30, 5), max_tokens=5)
    engine.run()
    assert again.cached_tokens == 16
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in (again, other))


def test_sequential_starts_nothing_while_one_runs() -> None:
    engine = SteppedEngine(schedule="sequential")
    seqs = [engine.add(prompt(3, at), max_tokens=4) for at in range(3)]
    order = [chunk.seq.id for plan in plans_until_idle(engine) for chunk in plan.chunks]
    assert order == [seq.id for seq in seqs for _ in range(4)]


def test_interleaved_gives_each_its_step_in_turn_and_newcomers_theirs_in_the_next_round() -> None:
    engine = SteppedEngine(schedule="interleaved")
    first, second = (engine.add(prompt(3, at), max_tokens=4) for at in range(2))
    order = [*rows(engine.step())]
    third = engine.add(prompt(3, 2), max_tokens=2)
    order += [id for plan in plans_until_idle(engine) for id in rows(plan)]
    a, b, c = first.id, second.id, third.id
    assert order == [a, b, a, b, c, a, b, c, a, b]


def test_interleaved_starves_nobody_while_short_requests_keep_coming() -> None:
    engine = SteppedEngine(max_num_seqs=2, schedule="interleaved")
    long = engine.add(prompt(3), max_tokens=10)
    for at in range(40):
        engine.add(prompt(3, at), max_tokens=1)
    for _ in range(20):
        engine.step()
    assert long.state is State.FINISHED


def test_static_computes_padding_to_the_longest_prompt_before_the_prompts() -> None:
    engine = SteppedEngine(token_budget=16, schedule="static")
    short, long = engine.add(prompt(3), max_tokens=1), engine.add(prompt(10, 1), max_tokens=1)
    padding, prompts = plans_until_idle(engine)
    assert padding.num_tokens == 10 - 3
    assert {short.id, long.id}.isdisjoint(rows(padding))
    assert rows(prompts) == {short.id: 3, long.id: 10}
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in (short, long))


def test_padding_is_never_written_over_a_cached_prefix() -> None:
    engine = SteppedEngine(block_size=4, token_budget=64, schedule="static")
    engine.add(prompt(18), max_tokens=1)
    engine.run()
    longer = engine.add(prompt(26), max_tokens=1)
    engine.add(prompt(30, 5), max_tokens=1)
    engine.run()
    reader = engine.add(prompt(6), max_tokens=3)
    engine.run()
    assert (longer.cached_tokens, reader.cached_tokens) == (18, 4)
    assert engine.outputs[reader.id] == engine.expected(reader)


def test_static_decodes_nobody_until_every_prompt_is_computed() -> None:
    engine = SteppedEngine(token_budget=9, schedule="static")
    seqs = [engine.add(prompt(8, at), max_tokens=3) for at in range(3)]
    lengths = [sorted(rows(plan).values()) for plan in plans_until_idle(engine)]
    assert lengths == [[1, 8], [2, 7], [6], [1, 1, 1], [1, 1, 1]]
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in seqs)


def started_batch() -> tuple[SteppedEngine, Sequence, Sequence, Sequence]:
    """A static batch of three: one that has finished, two that decode. A fourth waits."""
    engine = SteppedEngine(schedule="static")
    finished, *going = (engine.add(prompt(4, at), max_tokens=length) for at, length in enumerate((1, 20, 20)))
    engine.step()
    engine.add(prompt(4, 9), max_tokens=2)
    assert (finished.state, engine.pool.num_referenced) == (State.FINISHED, 3)
    return engine, finished, *going


def test_a_finished_member_keeps_its_row_and_blocks_until_the_static_batch_ends() -> None:
    engine, finished, *_ = started_batch()
    for _ in range(19):
        assert rows(engine.step())[finished.id] == 1
    assert len(engine.outputs[finished.id]) == 1, "what is computed in its place is dropped"
    assert not finished.blocks
    assert engine.pool.num_referenced == 0, "the batch has ended"
    assert list(rows(engine.step())) == [3], "and the next one begins"


def test_a_finished_member_is_the_first_to_give_up_its_blocks() -> None:
    engine = SteppedEngine(num_blocks=5, block_size=4, schedule="static", prefix_caching=False)
    finished, going = engine.add(prompt(6), max_tokens=1, priority=1), engine.add(prompt(6, 1), max_tokens=13)
    engine.run()
    assert (finished.preemptions, going.preemptions) == (0, 0)
    assert engine.outputs[going.id] == engine.expected(going)


def test_an_aborted_member_of_a_static_batch_gives_its_blocks_back_and_nobody_takes_its_place() -> None:
    engine, finished, going, aborted = started_batch()
    engine.abort(aborted.id)
    assert not aborted.blocks
    assert rows(engine.step()).keys() == {finished.id, going.id}


def test_a_static_batch_whose_last_active_member_is_aborted_ends_with_it() -> None:
    engine, finished, *going = started_batch()
    engine.abort(*(seq.id for seq in going))
    assert not finished.blocks
    assert engine.pool.num_referenced == 0
    assert list(rows(engine.step())) == [3]


def test_a_deadline_inside_a_static_batch_ends_its_sequence_at_once() -> None:
    engine = SteppedEngine(schedule="static")
    late = engine.add(prompt(4), max_tokens=20, timeout_s=3.0)
    other = engine.add(prompt(9, 1), max_tokens=20)
    engine.run()
    assert engine.ended[late.id].reason is EndReason.DEADLINE
    assert engine.ended[late.id].at == 3.0
    assert engine.outputs[other.id] == engine.expected(other)


def test_an_abort_while_padding_is_computed_disturbs_nobody() -> None:
    engine = SteppedEngine(token_budget=9, schedule="static")
    long, *short = (engine.add(prompt(length, length), max_tokens=3) for length in (20, 2, 3))
    assert {long.id, *(seq.id for seq in short)}.isdisjoint(rows(engine.step()))
    engine.abort(long.id)
    engine.run()
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in short)
    assert engine.pool.num_referenced == 0


def test_a_budget_that_holds_the_prompt_computes_it_in_one_step_beside_the_decodes() -> None:
    engine = SteppedEngine(num_blocks=100, token_budget=200)
    stream = engine.add(prompt(2), max_tokens=5)
    engine.step()
    long = engine.add(prompt(150, 3), max_tokens=2)
    assert rows(engine.step()) == {stream.id: 1, long.id: 150}
    engine.run()
    assert engine.outputs[long.id] == engine.expected(long)

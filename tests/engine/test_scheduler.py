from __future__ import annotations

import pytest

from pagoda_server.engine.core.sequence import EndReason, State
from tests.engine.harness import SteppedEngine


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + 7 * at) % 256 for at in range(length)]


def test_tokens_are_those_computed_by_hand_in_a_mixed_batch() -> None:
    engine = SteppedEngine()
    seqs = [engine.add(prompt(length, length), max_tokens=length) for length in (1, 3, 4, 5, 17, 40)]
    engine.run()
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in seqs)
    assert engine.pool.num_referenced == 0


def test_a_step_never_exceeds_its_token_budget_or_its_sequence_limit() -> None:
    engine = SteppedEngine(num_blocks=200, max_num_seqs=5, token_budget=7)
    for at in range(20):
        engine.add(prompt(1 + 5 * at, at), max_tokens=6)
    while not (plan := engine.step()).is_empty:
        assert plan.num_tokens <= 7
        assert len(plan.chunks) <= 5
        assert len({chunk.seq.id for chunk in plan.chunks}) == len(plan.chunks)


def test_a_long_prompt_delays_no_decode_and_still_advances_every_step() -> None:
    engine = SteppedEngine(num_blocks=200, max_num_seqs=4, token_budget=8, max_model_len=500)
    streams = [engine.add(prompt(2, at), max_tokens=60) for at in range(3)]
    engine.step()
    long = engine.add(prompt(100, 9), max_tokens=4)
    while long.num_computed < 100:
        plan = engine.step()
        lengths = {chunk.seq.id: chunk.length for chunk in plan.chunks}
        assert all(lengths[seq.id] == 1 for seq in streams), "every stream gets its token in every step"
        assert lengths[long.id] == min(8 - len(streams), lengths[long.id])
        assert lengths[long.id] > 0
    engine.run()
    assert engine.outputs[long.id] == engine.expected(long)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_what_paging_wastes_is_less_than_a_block_a_sequence_also_while_a_long_prompt_is_computed(
    lookahead: int,
) -> None:
    engine = SteppedEngine(num_blocks=200, block_size=4, token_budget=8, max_model_len=500, lookahead=lookahead)
    engine.add(prompt(101), max_tokens=10)
    engine.step()
    assert engine.scheduler.num_slots_unused == 3, "101 tokens in 26 blocks, 8 of them computed"
    engine.add(prompt(6, 1), max_tokens=40)
    while not engine.step().is_empty:
        assert engine.scheduler.num_slots_unused < 4 * max(1, len(engine.scheduler.running))


def test_a_sequence_that_resumes_has_one_block_more() -> None:
    engine = SteppedEngine(num_blocks=10, block_size=4, prefix_caching=False)
    for at in range(5):
        engine.add(prompt(6, at), max_tokens=20)
    while not engine.step().is_empty:
        most = sum(4 * (1 + bool(seq.account.preemptions)) - 1 for seq in engine.scheduler.running)
        assert engine.scheduler.num_slots_unused <= most
    assert engine.scheduler.counters.preemptions > 0


def test_decodes_come_before_prefill_chunks() -> None:
    engine = SteppedEngine(token_budget=9)
    engine.add(prompt(30), max_tokens=4)
    engine.step()
    engine.add(prompt(2, 1), max_tokens=20)
    for _ in range(10):
        lengths = [chunk.length for chunk in engine.step().chunks]
        assert lengths == sorted(lengths, key=lambda length: length > 1)


def test_preemption_changes_no_token() -> None:
    engine = SteppedEngine(num_blocks=10, block_size=4, prefix_caching=False)
    seqs = [engine.add(prompt(6, at), max_tokens=20) for at in range(5)]
    engine.run()
    assert engine.scheduler.counters.preemptions > 0, "the pool is too small for all of them"
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in seqs)
    assert sum(engine.ended[seq.id].seq.account.recomputed_tokens for seq in seqs) > 0


def test_the_last_admitted_of_the_lowest_priority_is_preempted() -> None:
    engine = SteppedEngine(num_blocks=9, block_size=4, prefix_caching=False)
    important = engine.add(prompt(7), max_tokens=25, priority=1)
    first, last = (engine.add(prompt(7, at), max_tokens=25) for at in (1, 2))
    while engine.scheduler.counters.preemptions == 0:
        engine.step()
    assert last.state is State.WAITING
    assert important.state is first.state is State.RUNNING


def test_higher_priority_is_admitted_first_and_equals_in_order_of_arrival() -> None:
    engine = SteppedEngine(max_num_seqs=1)
    order = [engine.add(prompt(3, at), max_tokens=2, priority=priority) for at, priority in enumerate((0, 5, 0, 5))]
    engine.run()
    by_end = sorted(order, key=lambda seq: engine.ended[seq.id].at)
    assert [seq.id for seq in by_end] == [1, 3, 0, 2]


def test_of_a_repeated_prompt_only_the_last_token_is_computed() -> None:
    engine = SteppedEngine(block_size=8, token_budget=64)
    first = engine.add(prompt(22), max_tokens=3)
    engine.run()
    again = engine.add(prompt(22), max_tokens=3)
    (chunk,) = engine.step().chunks
    assert (chunk.start, chunk.length) == (21, 1)
    engine.run()
    assert engine.outputs[again.id] == engine.outputs[first.id]
    assert (first.account.cached_tokens, again.account.cached_tokens) == (0, 21)


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    engine = SteppedEngine(block_size=8, token_budget=64)
    first = engine.add(prompt(16), max_tokens=2)
    engine.run()
    again = engine.add(prompt(16), max_tokens=2)
    engine.run()
    assert again.account.cached_tokens == 15
    assert engine.outputs[again.id] == engine.outputs[first.id]


@pytest.mark.parametrize("second", [{"salt": "other"}, {"bypass": True}])
def test_another_salt_or_bypass_shares_nothing(second: dict[str, str | bool]) -> None:
    engine = SteppedEngine()
    engine.add(prompt(20), max_tokens=2)
    engine.run()
    again = engine.add(prompt(20), max_tokens=2, **second)  # type: ignore[arg-type]
    engine.run()
    assert again.account.cached_tokens == 0
    assert engine.outputs[again.id] == engine.expected(again)


def test_output_is_cached_too_for_the_next_turn_of_a_conversation() -> None:
    engine = SteppedEngine(block_size=4, token_budget=64)
    turn = engine.add(prompt(8), max_tokens=8)
    engine.run()
    following = engine.add(turn.tokens + prompt(3), max_tokens=2)
    engine.run()
    assert following.account.cached_tokens >= 12


def test_abort_frees_blocks_at_once_in_every_state() -> None:
    engine = SteppedEngine(num_blocks=30, max_num_seqs=2, token_budget=8)
    decoding, prefilling, waiting = (engine.add(prompt(n, n), max_tokens=50) for n in (2, 40, 5))
    engine.step()
    assert (decoding.state, prefilling.state, waiting.state) == (State.RUNNING, State.RUNNING, State.WAITING)
    engine.abort(waiting.id, prefilling.id, decoding.id)
    engine.abort(decoding.id, 12345)
    assert engine.pool.num_referenced == 0
    assert {engine.ended[seq.id].reason for seq in (decoding, prefilling, waiting)} == {EndReason.ABORTED}
    assert engine.step().is_empty


def test_a_queued_sequence_whose_deadline_passes_costs_no_step() -> None:
    engine = SteppedEngine(max_num_seqs=1)
    engine.add(prompt(4), max_tokens=20)
    late = engine.add(prompt(4, 1), max_tokens=20, timeout_s=3.0)
    ran = set()
    while not (plan := engine.step()).is_empty:
        ran |= {chunk.seq.id for chunk in plan.chunks}
    assert engine.ended[late.id].reason is EndReason.DEADLINE
    assert late.id not in ran


def test_a_sequence_that_can_never_fit_is_rejected_and_disturbs_no_other() -> None:
    engine = SteppedEngine(num_blocks=10, block_size=4, max_model_len=100)
    fine = engine.add(prompt(4), max_tokens=4)
    too_large = engine.add(prompt(30), max_tokens=20)
    too_long = engine.add(prompt(100), max_tokens=1)
    engine.run()
    assert engine.ended[too_large.id].reason is EndReason.REJECTED
    assert "the KV cache holds 40" in engine.ended[too_large.id].detail
    assert engine.ended[too_long.id].reason is EndReason.REJECTED
    assert engine.outputs[fine.id] == engine.expected(fine)


def test_a_stop_id_ends_the_sequence_and_is_its_last_token() -> None:
    engine = SteppedEngine()
    unstopped = engine.add(prompt(5), max_tokens=10)
    engine.run()
    fourth = engine.outputs[unstopped.id][3]
    stopped = engine.add(prompt(5), max_tokens=10, stop_token_ids=frozenset({fourth}))
    engine.run()
    assert engine.ended[stopped.id].reason is EndReason.STOP
    assert engine.ended[stopped.id].matched == fourth
    assert engine.outputs[stopped.id] == engine.outputs[unstopped.id][: engine.outputs[unstopped.id].index(fourth) + 1]


def test_the_context_limit_ends_a_sequence_with_length() -> None:
    engine = SteppedEngine(max_model_len=12)
    seq = engine.add(prompt(8), max_tokens=100)
    engine.run()
    assert engine.ended[seq.id].reason is EndReason.LENGTH
    assert len(engine.outputs[seq.id]) == 4


def test_a_fault_ends_its_own_sequence_only() -> None:
    engine = SteppedEngine()
    seqs = [engine.add(prompt(3, at), max_tokens=5) for at in range(3)]
    plan = engine.scheduler.schedule()
    sampled = engine.runner.launch(plan).result()
    sampled.faults[1] = "a bad logit"
    engine.scheduler.commit(plan, sampled)
    engine.run()
    assert engine.ended[seqs[1].id].reason is EndReason.FAILED
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in (seqs[0], seqs[2]))


def test_a_block_is_shared_only_behind_the_same_prefix() -> None:
    engine = SteppedEngine(block_size=4, token_budget=64)
    a, b, c, d = ([first] * 4 for first in (1, 2, 3, 4))
    for cached in (a + b + [9], c + d + [9]):
        engine.add(cached, max_tokens=1)
        engine.run()
    mixed = engine.add(a + d + [9], max_tokens=6)
    engine.run()
    assert mixed.account.cached_tokens == 4, "block d was computed behind c, not behind a"
    assert engine.outputs[mixed.id] == engine.expected(mixed)


def test_a_newcomer_leaves_a_block_for_each_that_runs() -> None:
    engine = SteppedEngine(num_blocks=9, block_size=4, prefix_caching=False)
    running = [engine.add(prompt(4, at), max_tokens=6) for at in range(3)]
    engine.step()
    newcomer = engine.add(prompt(9, 5), max_tokens=3)  # 3 blocks: as many as are left, and those will be wanted
    engine.step()
    assert newcomer.state is State.WAITING
    engine.run()
    assert engine.scheduler.counters.preemptions == 0
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in [*running, newcomer])


def test_the_preempted_does_not_come_straight_back() -> None:
    engine = SteppedEngine(num_blocks=10, block_size=4)
    for at in range(4):
        engine.add(prompt(7, at), max_tokens=20)
    preemptions = 0
    while not (plan := engine.step()).is_empty:
        if engine.scheduler.counters.preemptions > preemptions:
            preemptions = engine.scheduler.counters.preemptions
            assert engine.scheduler.waiting
            assert not any(chunk.seq.account.preemptions and chunk.start == 0 for chunk in plan.chunks)
    assert 0 < preemptions < 12


def test_a_short_prompt_does_not_wait_until_long_ones_are_computed() -> None:
    """It takes at most half a step, so the long prompts lose no more than that."""
    engine = SteppedEngine(token_budget=16, num_blocks=200, max_model_len=300)
    long = [engine.add(list(range(100, 220)), max_tokens=4) for _ in range(2)]
    engine.step()
    short = [engine.add([7, 8, at], max_tokens=1) for at in range(3)]
    plan = engine.step()
    assert [(chunk.seq, chunk.length) for chunk in plan.chunks] == [(short[0], 3), (short[1], 3), (long[0], 10)]
    assert [chunk.seq for chunk in engine.step().chunks] == [short[2], long[0]]
    assert long[1].num_computed == 0  # long prompts keep their order


def test_short_prompts_without_end_at_most_double_a_long_prompt_s_time() -> None:
    engine = SteppedEngine(token_budget=16, num_blocks=200, max_model_len=300)
    long = engine.add(list(range(160)), max_tokens=1)
    steps = 0
    while long.account.first_token is None:
        engine.add([1, 2, steps % 50], max_tokens=1)
        engine.add([3, 4, steps % 50], max_tokens=1)
        engine.add([5, 6, steps % 50], max_tokens=1)
        engine.step()
        steps += 1
    assert steps <= 2 * 160 / 16


def test_a_short_prompt_overtakes_no_sequence_of_higher_priority() -> None:
    engine = SteppedEngine(token_budget=16, num_blocks=200, max_model_len=300)
    engine.add(list(range(100)), max_tokens=1, priority=1)
    engine.step()
    engine.add(list(range(50, 150)), max_tokens=1, priority=1)
    low = engine.add([1, 2], max_tokens=1)
    engine.step()
    assert low.account.first_scheduled is None


def test_a_budget_that_holds_the_prompt_computes_it_in_one_step_beside_the_decodes() -> None:
    engine = SteppedEngine(num_blocks=100, token_budget=200)
    stream = engine.add(prompt(2), max_tokens=5)
    engine.step()
    long = engine.add(prompt(150, 3), max_tokens=2)
    assert {chunk.seq.id: chunk.length for chunk in engine.step().chunks} == {stream.id: 1, long.id: 150}
    engine.run()
    assert engine.outputs[long.id] == engine.expected(long)

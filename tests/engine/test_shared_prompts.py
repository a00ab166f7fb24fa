"""Requests of several sequences: their prompt is computed once and stored once."""

from __future__ import annotations

import pytest

from pagoda_server.engine.core.sequence import EndReason
from tests.engine.harness import SteppedEngine
from tests.engine.test_scheduler import prompt


def run_and_count(engine: SteppedEngine) -> tuple[int, int]:
    """Run to the end; return the tokens computed and the largest number of blocks in use."""
    tokens = blocks = 0
    for _ in range(10_000):
        if not (engine.scheduler.num_waiting or engine.scheduler.running or engine.steps):
            return tokens, blocks
        tokens += engine.step().num_tokens
        blocks = max(blocks, engine.pool.num_referenced)
    raise AssertionError("it does not come to an end")


@pytest.mark.parametrize("lookahead", [0, 1])
def test_eight_sequences_hold_their_prompt_once(lookahead: int) -> None:
    blocks = {}
    for count in (1, 8):
        engine = SteppedEngine(num_blocks=600, block_size=16, token_budget=256, max_model_len=2000, lookahead=lookahead)
        seqs = engine.add_siblings(count, prompt(1000), max_tokens=40)
        tokens, blocks[count] = run_and_count(engine)
        assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in seqs)
        assert tokens == 1000 + 39 * count + count - 1, "each but the first computes the prompt's last token again"
    outputs = 8 * 3  # blocks of 40 tokens, less what fits behind the prompt
    assert blocks[8] < 1.3 * blocks[1] + outputs
    assert blocks[8] <= 63 + 8 * 3 + 1


@pytest.mark.parametrize("rules", [{}, {"bypass": True}])
@pytest.mark.parametrize("length", [1, 16, 17, 18])
def test_tokens_are_right_whatever_part_of_a_block_is_shared(rules: dict[str, bool], length: int) -> None:
    engine = SteppedEngine(block_size=4, max_num_seqs=3)
    seqs = engine.add_siblings(5, prompt(length), max_tokens=7, **rules)  # type: ignore[arg-type]
    engine.run()
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in seqs)
    assert engine.pool.num_referenced == 0


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_prompt_is_held_until_the_last_has_started_though_the_first_has_ended(lookahead: int) -> None:
    engine = SteppedEngine(max_num_seqs=1, prefix_caching=False, lookahead=lookahead)
    seqs = engine.add_siblings(6, prompt(30), max_tokens=1)
    tokens, _ = run_and_count(engine)
    assert tokens == 30 + 5
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in seqs)
    assert engine.pool.num_referenced == 0


def test_a_sequence_that_waits_for_its_prompt_holds_up_no_other() -> None:
    engine = SteppedEngine(num_blocks=200, token_budget=16, max_model_len=300)
    first, *others = engine.add_siblings(4, prompt(120), max_tokens=2)
    short = engine.add(prompt(5, 1), max_tokens=2)
    engine.step()
    engine.step()
    assert short.account.first_token is not None
    assert engine.scheduler.num_waiting == 3
    assert first.account.first_token is None
    engine.run()
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in others)


def test_if_the_first_is_cancelled_the_next_computes_the_prompt() -> None:
    engine = SteppedEngine(token_budget=16)
    first, second, *others = engine.add_siblings(4, prompt(60), max_tokens=5)
    engine.step()
    engine.abort(first.id)
    engine.abort(others[0].id)
    tokens, _ = run_and_count(engine)
    assert tokens == (60 - 16 + 4) + (1 + 4), "what the first had computed was cached"
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in (second, others[1]))
    assert {id: ended.reason for id, ended in engine.ended.items()} == {
        first.id: EndReason.ABORTED,
        others[0].id: EndReason.ABORTED,
        second.id: EndReason.LENGTH,
        others[1].id: EndReason.LENGTH,
    }


def test_a_deadline_ends_those_that_wait_for_their_prompt() -> None:
    engine = SteppedEngine(num_blocks=200, token_budget=16, max_model_len=300)
    seqs = engine.add_siblings(3, prompt(200), max_tokens=5, timeout_s=4.0)
    engine.run()
    assert [engine.ended[seq.id].reason for seq in seqs] == [EndReason.DEADLINE] * 3
    assert engine.pool.num_referenced == 0


def test_a_prompt_that_is_held_makes_way_before_a_sequence_is_preempted() -> None:
    engine = SteppedEngine(num_blocks=10, block_size=4, max_num_seqs=2, max_model_len=40, prefix_caching=False)
    growing = engine.add(prompt(4, 9), max_tokens=34)
    seqs = engine.add_siblings(4, prompt(17), max_tokens=1, priority=-1)
    engine.step()
    engine.step()
    assert seqs[0].id in engine.ended
    engine.scheduler.max_num_seqs = 1  # the others have to wait while the pool fills up
    engine.run()
    assert engine.scheduler.counters.preemptions == 0
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in [growing, *seqs])


def test_a_prompt_that_is_held_cannot_keep_all_others_out() -> None:
    """It fills the pool, and its sequences wait behind one of higher priority."""
    engine = SteppedEngine(num_blocks=8, block_size=4, max_num_seqs=1, max_model_len=32, prefix_caching=False)
    seqs = engine.add_siblings(3, prompt(29), max_tokens=1)
    engine.step()
    urgent = engine.add(prompt(28, 5), max_tokens=3, priority=1)
    engine.run()
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in [urgent, *seqs])


def test_what_is_shared_within_a_request_is_no_cache_hit() -> None:
    engine = SteppedEngine(block_size=8)
    first = engine.add_siblings(3, prompt(30), max_tokens=4)
    engine.run()
    again = engine.add_siblings(3, prompt(30), max_tokens=4)
    engine.run()
    assert [seq.account.cached_tokens for seq in first] == [0, 0, 0]
    assert [seq.account.cached_tokens for seq in again] == [29, 29, 29]
    counters = engine.scheduler.counters
    assert (counters.prompt_tokens, counters.cached_tokens) == (60, 29)


def test_siblings_that_bypass_the_cache_share_only_with_each_other() -> None:
    engine = SteppedEngine(block_size=4)
    engine.add(prompt(30), max_tokens=4)
    engine.run()
    seqs = engine.add_siblings(3, prompt(30), max_tokens=4, bypass=True)
    tokens, _ = run_and_count(engine)
    assert tokens == 30 + 2 + 3 * 3
    assert [seq.account.cached_tokens for seq in seqs] == [0, 0, 0]


def test_preempted_siblings_lose_no_token() -> None:
    engine = SteppedEngine(num_blocks=12, block_size=4, prefix_caching=False, lookahead=1)
    seqs = engine.add_siblings(6, prompt(11), max_tokens=25)
    engine.run()
    assert engine.scheduler.counters.preemptions > 0, "the pool is too small for all of them"
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in seqs)

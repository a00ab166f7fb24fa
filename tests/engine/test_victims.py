"""Preemption wastes least, is counted, and cannot chase admission."""

from __future__ import annotations

import pytest

from pagoda_server.engine.core.sequence import State
from pagoda_server.engine.runners.synthetic import expected_tokens
from pagoda_server.settings.engine import PolicyName
from tests.engine.harness import VOCAB_SIZE, SteppedEngine
from tests.engine.test_scheduler import prompt


def test_the_sequence_that_computed_least_for_its_blocks_gives_them_up() -> None:
    engine = SteppedEngine(num_blocks=47, block_size=4, token_budget=16, max_num_seqs=4, prefix_caching=False)
    decoding = [engine.add(prompt(8, at), max_tokens=30) for at in range(2)]
    engine.step()
    prefilling = engine.add(prompt(140, 5), max_tokens=2)
    last = engine.add(prompt(5, 7), max_tokens=30)
    while not engine.scheduler.counters.preemptions:
        engine.step()
    assert last.state is State.RUNNING, "it was admitted last, but has nothing to compute again for its blocks"
    assert [seq.account.preemptions for seq in (*decoding, prefilling)] == [0, 0, 1]


def test_what_others_share_is_neither_freed_nor_wasted() -> None:
    engine = SteppedEngine(num_blocks=17, block_size=4, token_budget=64, max_num_seqs=4)
    shared = prompt(32)
    engine.add([*shared, 1], max_tokens=1)
    engine.run()
    sharing = [engine.add([*shared, at], max_tokens=20) for at in (1, 2)]
    alone = engine.add(prompt(9, 77), max_tokens=20)
    while not engine.scheduler.counters.preemptions:
        engine.step()
    assert alone.account.preemptions + sum(seq.account.preemptions for seq in sharing) == 1
    engine.run()
    assert all(seq.account.recomputed_tokens <= 20 for seq in sharing), "the shared prefix was found again"
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in (*sharing, alone))


def test_what_was_given_up_and_computed_again_is_counted_for_each_and_for_all() -> None:
    engine = SteppedEngine(num_blocks=10, block_size=4, prefix_caching=False)
    seqs = [engine.add(prompt(6, at), max_tokens=20) for at in range(5)]
    engine.run()
    counters = engine.scheduler.counters
    assert counters.preemptions == sum(seq.account.preemptions for seq in seqs) > 0
    assert counters.preempted_tokens == sum(seq.account.preempted_tokens for seq in seqs) > 0
    assert counters.recomputed_tokens == sum(seq.account.recomputed_tokens for seq in seqs) == counters.preempted_tokens


def test_rows_of_sequences_that_have_ended_are_counted_as_dropped() -> None:
    engine = SteppedEngine(lookahead=1)
    stop = expected_tokens(prompt(4), 3, VOCAB_SIZE)[2]
    engine.add(prompt(4), max_tokens=8, stop_token_ids=frozenset({stop}))
    engine.run()
    assert engine.scheduler.counters.dropped_tokens == 1, "a step was launched before the stop token was known"


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "deadline"])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_equals_preempt_each_other_once_and_then_once_a_block_of_output(policy: PolicyName, lookahead: int) -> None:
    """The cache holds two of eight sequences at their full length."""
    engine = SteppedEngine(
        num_blocks=24, block_size=4, max_num_seqs=8, policy=policy, prefix_caching=False, lookahead=lookahead
    )
    seqs = [engine.add(prompt(4, at), max_tokens=40, tenant=str(at % 3)) for at in range(16)]
    engine.run()
    assert engine.scheduler.counters.preemptions > 0
    assert all(seq.account.preemptions <= 1 + seq.output_len // 4 for seq in seqs)
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in seqs)

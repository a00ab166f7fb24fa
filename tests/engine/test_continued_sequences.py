"""Sequences that arrive with output and continue it, as those that are resumed do."""

from __future__ import annotations

import pytest

from pagoda_server.engine.core.sequence import EndReason
from pagoda_server.engine.runners.synthetic import expected_tokens
from pagoda_server.settings.engine import PolicyName
from tests.engine.harness import VOCAB_SIZE, SteppedEngine
from tests.engine.test_scheduler import prompt


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("block_size", [4, 16])
def test_it_goes_on_as_if_it_had_never_stopped(lookahead: int, block_size: int) -> None:
    whole = expected_tokens(prompt(21), 12, VOCAB_SIZE)
    engine = SteppedEngine(lookahead=lookahead, block_size=block_size)
    for count in range(12):
        seq = engine.add(prompt(21), 12, output=whole[:count])
        engine.run()
        assert engine.outputs[seq.id] == whole[count:], "only what is new is told"
        assert engine.ended[seq.id].reason is EndReason.LENGTH


def test_its_output_counts_towards_min_tokens() -> None:
    whole = expected_tokens(prompt(21), 12, VOCAB_SIZE)
    engine = SteppedEngine()
    stops = frozenset(whole[5:6])
    early = engine.add(prompt(21), 12, output=whole[:2], stop_token_ids=stops, min_tokens=5)
    engine.run()
    assert engine.outputs[early.id] == whole[2:6]
    assert engine.ended[early.id].reason is EndReason.STOP


def test_without_room_for_one_more_token_it_is_rejected() -> None:
    engine = SteppedEngine(max_model_len=30)
    full = [engine.add(prompt(9), 5, output=[1] * 5), engine.add(prompt(9), 50, output=[1] * 21)]
    fits = engine.add(prompt(9), 50, output=[1] * 20)
    engine.run()
    assert [engine.ended[seq.id].reason for seq in full] == [EndReason.REJECTED] * 2
    assert engine.ended[full[0].id].detail == "prompt of 14 tokens, the limit is 13"
    assert engine.outputs[fits.id] == engine.expected(fits)[:1]


def test_neither_prompt_nor_output_is_counted_again() -> None:
    engine = SteppedEngine(token_budget=64)
    first = engine.add(prompt(32), 1, tenant="a")
    engine.run()
    output = engine.outputs[first.id]
    (before,) = engine.scheduler.tenants.table([]).listed
    second = engine.add(prompt(32), 2, output=output, tenant="a")
    engine.run()
    (after,) = engine.scheduler.tenants.table([]).listed
    assert after.service - before.service == 2, "one token of output"
    counters = engine.scheduler.counters
    assert (counters.prompt_tokens, counters.cached_tokens, counters.output_tokens) == (32, 0, 2)
    assert second.account.cached_tokens == 32


@pytest.mark.parametrize("block_size", [2, 4, 16])
def test_it_computes_nothing_that_the_one_before_has_computed(block_size: int) -> None:
    """The begun block of a sequence that has ended is found too, and copied; its last token was never computed."""
    engine = SteppedEngine(num_blocks=128, block_size=block_size, token_budget=64)
    for length in range(1, 34):
        first = engine.add(prompt(length, 50 + length), 4)
        engine.run()
        second = engine.add(prompt(length, 50 + length), 5, output=engine.outputs[first.id])
        assert engine.step().num_tokens == 1
        engine.run()
        assert engine.outputs[second.id] == engine.expected(second)
        other = engine.add(prompt(length, 50 + length), 8, output=[*engine.outputs[first.id][:3], 7], salt="other")
        assert engine.step().num_tokens == length + 4, "not under another salt"
        engine.run()
        assert engine.outputs[other.id] == engine.expected(other)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_its_age_is_its_place_in_line(policy: PolicyName) -> None:
    engine = SteppedEngine(max_num_seqs=1, policy=policy)
    running = engine.add(prompt(5), 6)
    engine.step()
    newcomer = engine.add(prompt(5, 1), 6)
    old = engine.add(prompt(5, 2), 6, output=[7], age_s=2.0)
    engine.run()
    ends = [engine.ended[seq.id].at for seq in (running, old, newcomer)]
    assert ends == sorted(ends)


def test_its_next_token_is_due_after_those_that_it_has() -> None:
    """If only its first token counted, it would be late and wait behind all sequences that are not."""
    engine = SteppedEngine(max_num_seqs=1, policy="deadline")
    running = engine.add(prompt(5), 3)
    engine.step()
    urgent = engine.add(prompt(5, 1), 6, ttft_s=9.0)
    old = engine.add(prompt(5, 2), 8, output=[7] * 6, age_s=12.0, ttft_s=10.0, tpot_s=1.5)
    engine.run()
    ends = [engine.ended[seq.id].at for seq in (running, old, urgent)]
    assert ends == sorted(ends)

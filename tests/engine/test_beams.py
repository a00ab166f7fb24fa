"""Beam searches among other sequences: as the book says, whatever becomes of their blocks."""

from __future__ import annotations

import pytest

from engine.beam_search import BeamParams
from engine.schedules import SCHEDULES, ScheduleName
from engine.sequence import EndReason, Sequence
from tests.engine.beam_reference import Expected, expected_beams
from tests.engine.harness import VOCAB_SIZE, Rules, SteppedEngine
from tests.engine.test_scheduler import prompt

STOPS = frozenset(range(0, VOCAB_SIZE, 9))


def found(engine: SteppedEngine, rows: list[Sequence]) -> list[Expected]:
    ends = [engine.ended[row.id] for row in rows]
    assert all((end.reason is EndReason.STOP) == (end.matched is not None) for end in ends)
    assert all(end.reason in (EndReason.STOP, EndReason.LENGTH) for end in ends)
    return [Expected(engine.outputs[end.seq.id], end.score or 0.0, end.matched) for end in ends]


def expected(rows: list[Sequence], max_len: int = 10_000) -> list[Expected]:
    first = rows[0]
    params = first.params
    assert params.beams is not None
    prompt = first.tokens[: first.prompt_len]
    max_tokens = min(params.max_tokens, max_len - len(prompt))
    return expected_beams(prompt, max_tokens, params.beams, VOCAB_SIZE, params.stop_token_ids, params.min_tokens)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 18])
@pytest.mark.parametrize("rules", [{}, {"bypass": True}, {"stop_token_ids": STOPS, "min_tokens": 3}])
def test_a_search_finds_what_the_book_says_wherever_its_prompt_leaves_a_block(
    schedule: ScheduleName, lookahead: int, length: int, rules: Rules
) -> None:
    if lookahead and schedule != "continuous":
        pytest.skip("only continuous batches are launched ahead")
    engine = SteppedEngine(schedule=schedule, lookahead=lookahead, token_budget=11)
    searches = [
        engine.add_search(BeamParams(width, penalty), prompt(length), max_tokens=14, **rules)
        for width, penalty in ((3, 1.0), (4, 0.0), (2, -1.0))
    ]
    other = engine.add(prompt(20, 3), max_tokens=9)
    engine.run()
    for rows in searches:
        assert found(engine, rows) == expected(rows)
    assert engine.outputs[other.id] == engine.expected(other)
    assert engine.pool.num_referenced == 0

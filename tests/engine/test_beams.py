"""Beam searches among other sequences: what the reference finds, whatever becomes of their blocks."""

from __future__ import annotations

import pytest

from pagoda_server.engine.core.beam_search import BeamParams
from pagoda_server.engine.core.sequence import EndReason, Sequence, State, StepPlan
from pagoda_server.engine.loop.steps_in_flight import Computed, Runner, StepsInFlight
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
@pytest.mark.parametrize("length", [1, 15, 16, 17, 18])
@pytest.mark.parametrize("rules", [{}, {"bypass": True}, {"stop_token_ids": STOPS, "min_tokens": 3}])
def test_a_search_finds_what_the_reference_does_wherever_its_prompt_leaves_a_block(
    lookahead: int, length: int, rules: Rules
) -> None:
    engine = SteppedEngine(lookahead=lookahead, token_budget=11)
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


@pytest.mark.parametrize("lookahead", [0, 1])
def test_it_computes_its_prompt_once_and_holds_it_once(lookahead: int) -> None:
    blocks: dict[int, int] = {}
    for width in (1, 4):
        engine = SteppedEngine(num_blocks=600, block_size=16, token_budget=256, max_model_len=2000, lookahead=lookahead)
        rows = engine.add_search(BeamParams(width), prompt(1000), max_tokens=40)
        tokens = blocks[width] = 0
        while engine.scheduler.running or engine.scheduler.num_waiting:
            tokens += engine.step().num_tokens
            blocks[width] = max(blocks[width], engine.pool.num_referenced)
        assert found(engine, rows) == expected(rows)
        assert tokens == 1000 + 39 * width, "a row each step for each beam, and none that is dropped"
        assert engine.pool.num_referenced == 0
    outputs = 3 * 4  # blocks of 40 tokens behind the prompt's last one, were nothing of them shared
    assert blocks[4] <= blocks[1] + outputs


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("rules", [{}, {"bypass": True}])
def test_it_may_be_preempted_at_any_step(lookahead: int, rules: Rules) -> None:
    for at in range(1, 22):
        engine = SteppedEngine(token_budget=11, lookahead=lookahead)
        rows = engine.add_search(BeamParams(4), prompt(21), max_tokens=16, stop_token_ids=STOPS, min_tokens=9, **rules)
        other = engine.add(prompt(9, 5), max_tokens=30)
        for _ in range(at):
            engine.step()
        if rows[0].state is not State.FINISHED:
            engine.scheduler._preempt(rows[at % 4])
            assert not any(row.blocks for row in rows)
            engine.scheduler.check_integrity()
        engine.run()
        assert found(engine, rows) == expected(rows)
        assert engine.outputs[other.id] == engine.expected(other)
        lost = sum(row.preempted_tokens for row in rows)
        assert lost <= 21 + 4 * 16, "what all rows share is given up once"


@pytest.mark.parametrize("lookahead", [0, 1])
def test_whenever_it_is_cancelled_all_of_it_ends_and_its_blocks_come_back(lookahead: int) -> None:
    for at in range(18):
        engine = SteppedEngine(num_blocks=24, token_budget=11, lookahead=lookahead)
        rows = engine.add_search(BeamParams(3), prompt(21), max_tokens=14)
        for _ in range(at):
            engine.step()
        is_over = rows[0].id in engine.ended
        engine.abort(rows[at % 3].id)
        assert engine.pool.num_referenced == 0 or len(engine.steps) > 0
        engine.run()
        assert engine.pool.num_referenced == 0
        if not is_over:
            assert {engine.ended[row.id].reason for row in rows} == {EndReason.ABORTED}
            assert not any(engine.outputs[row.id] for row in rows), "nothing is told of a search that has not ended"


def test_a_deadline_ends_all_of_it() -> None:
    engine = SteppedEngine(num_blocks=200, token_budget=16, max_model_len=300)
    waiting = engine.add_search(BeamParams(3), prompt(200), max_tokens=5, timeout_s=4.0)
    running = engine.add_search(BeamParams(3), prompt(5), max_tokens=100, timeout_s=9.0)
    engine.run()
    assert {engine.ended[row.id].reason for row in (*waiting, *running)} == {EndReason.DEADLINE}
    assert engine.pool.num_referenced == 0


class FaultyRunner:
    """Finds fault with one sequence from its so-manieth sampled row on."""

    def __init__(self, runner: Runner, id: int, after: int) -> None:
        self.lookahead = runner.lookahead
        self._runner, self._id, self._left = runner, id, after

    def recover(self) -> None:
        self._runner.recover()

    def launch(self, plan: StepPlan) -> Computed:
        sampled = self._runner.launch(plan).result()
        for at, chunk in enumerate(plan.chunks):
            if chunk.seq.id == self._id and chunk.samples:
                self._left -= 1
                if self._left < 0:
                    sampled.faults[at] = "not a number"
        return Computed(sampled)


@pytest.mark.parametrize("after", [0, 3])
def test_a_fault_of_one_beam_fails_its_search_and_nobody_else(after: int) -> None:
    engine = SteppedEngine(token_budget=32, max_num_seqs=12)
    failing, fine = (engine.add_search(BeamParams(3), prompt(9, at), max_tokens=12) for at in range(2))
    other = engine.add(prompt(9, 5), max_tokens=12)
    engine.steps = StepsInFlight(engine.scheduler, FaultyRunner(engine.runner, failing[0].id, after))
    engine.run()
    assert {(engine.ended[row.id].reason, engine.ended[row.id].detail) for row in failing} == {
        (EndReason.FAILED, "not a number")
    }
    assert found(engine, fine) == expected(fine)
    assert engine.outputs[other.id] == engine.expected(other)
    assert engine.pool.num_referenced == 0


def test_what_could_never_run_is_rejected_and_says_why() -> None:
    engine = SteppedEngine(num_blocks=20, block_size=4, max_num_seqs=4)
    wide = engine.add_search(BeamParams(5), prompt(5), max_tokens=5)
    long = engine.add_search(BeamParams(4), prompt(8), max_tokens=12 + 8 + 1)
    fits = engine.add_search(BeamParams(4), prompt(8), max_tokens=12 + 4)
    engine.run()
    assert {engine.ended[row.id].detail for row in wide} == {"5 beams, the engine runs 4 sequences at once"}
    assert {engine.ended[row.id].detail for row in long} == {"4 beams of up to 29 tokens, the KV cache holds 80"}
    assert found(engine, fits) == expected(fits)


def test_a_higher_priority_displaces_a_whole_search_and_a_search_displaces_lower_ones() -> None:
    engine = SteppedEngine(num_blocks=22, block_size=4, max_num_seqs=4, token_budget=64, prefix_caching=False)
    search = engine.add_search(BeamParams(4), prompt(40), max_tokens=12)
    for _ in range(4):
        engine.step()
    urgent = engine.add(prompt(44, 3), max_tokens=4, priority=1)
    engine.step()
    assert urgent.state is State.RUNNING, "what the beams share is free once they have gone"
    assert {row.state for row in search} == {State.WAITING}
    engine.run()
    low = [engine.add(prompt(9, at), max_tokens=30) for at in range(4)]
    for _ in range(4):
        engine.step()
    higher = engine.add_search(BeamParams(3), prompt(6), max_tokens=5, priority=1)
    engine.step()
    assert {row.state for row in higher} == {State.RUNNING}
    assert sum(seq.preemptions for seq in low) == 3, "three places, and no more"
    engine.run()
    assert found(engine, search) == expected(search)
    assert found(engine, higher) == expected(higher)
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in low)


def test_rows_that_wait_for_the_first_leave_the_rest_of_a_step_to_others() -> None:
    engine = SteppedEngine(token_budget=16)
    search = engine.add_search(BeamParams(4), prompt(30), max_tokens=5)
    engine.step()
    other = engine.add(prompt(10, 3), max_tokens=5)
    plan = engine.step()
    assert {chunk.seq.id: chunk.length for chunk in plan.chunks} == {search[0].id: 14, other.id: 2}


def test_a_tenant_is_charged_for_the_prompt_once_and_for_every_beams_tokens() -> None:
    engine = SteppedEngine(token_budget=64)
    engine.add_search(BeamParams(4), prompt(30), max_tokens=10, tenant="a")
    engine.run()
    (load,) = engine.scheduler.tenants.table([]).listed
    assert load.service == 30 + 2 * 4 * 10
    counters = engine.scheduler.counters
    assert (counters.prompt_tokens, counters.output_tokens) == (30, 40)

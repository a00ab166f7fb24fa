"""Blocks that come from host memory are copied over several steps, so that no stream beside them stalls."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda_server.engine.core.sequence import Lender, Sequence
from pagoda_server.engine.core.step import Chunk
from pagoda_server.engine.drafting import Speculation
from pagoda_server.engine.loop.steps_in_flight import StepsInFlight
from pagoda_server.engine.runners.synthetic import StepTime, expected_tokens
from pagoda_server.engine.scheduling.pacing import FIRST_LOADS, LOAD_PART
from pagoda_server.engine.timing.cost_model import CostModel
from tests.engine.drafters import AlwaysDrafts, Oracle
from tests.engine.harness import VOCAB_SIZE, SteppedEngine
from tests.engine.test_scheduler import prompt
from tests.engine.unreliable import UnreliableRunner

SIZE = 4  # tokens of a block


def small(
    step_time: StepTime, copy_s: float, lookahead: int = 0, speculation: Speculation | None = None
) -> SteppedEngine:
    return SteppedEngine(
        num_blocks=1200, block_size=SIZE, token_budget=64, max_num_seqs=16, max_model_len=1000, host_blocks=600,
        step_time=step_time, copy_s=copy_s, lookahead=lookahead, speculation=speculation, lenders={},
    )  # fmt: skip


def engine_beside(
    there: SteppedEngine,
    decodes: int,
    step_time: StepTime,
    copy_s: float,
    lookahead: int = 0,
    num_tokens: int = 60,
    speculation: Speculation | None = None,
) -> SteppedEngine:
    """An engine with so many streams, which has computed prompts, and can fetch from the other one."""
    here = small(step_time, copy_s, lookahead, speculation)
    assert here.peers is not None
    here.peers._lenders["there"] = there
    for at in range(decodes):
        here.add(prompt(20, 50 + at), max_tokens=num_tokens)
    for _ in range(30):
        here.step()
    return here


def engine_with(*lengths: int) -> SteppedEngine:
    """An engine that has cached prompts of these lengths."""
    there = small(StepTime(0.001), 0.0)
    for seed, length in enumerate(lengths):
        there.add(prompt(length, seed), max_tokens=1)
    there.run()
    return there


def fetching(here: SteppedEngine, length: int, seed: int, priority: int = 0) -> Sequence:
    return here.add(prompt(length, seed), max_tokens=3, lender=Lender("there", length), priority=priority)


def loads_until_first_token(here: SteppedEngine, *seqs: Sequence) -> list[int]:
    """Return how many blocks each step loads until all of these have a token."""
    loads = []
    while any(seq.account.first_token is None for seq in seqs):
        loads.append(len(here.step().loads))
        assert len(loads) < 1000
    return loads


@settings(deadline=None, max_examples=15)
@given(
    decodes=st.integers(1, 8),
    num_blocks=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    base_s=st.sampled_from([0.003, 0.03, 0.1]),
    copy_s=st.sampled_from([0.00005, 0.0003, 0.002]),
    lookahead=st.sampled_from([0, 1]),
)
def test_what_a_step_loads_lengthens_it_by_a_part_and_every_sequence_gets_its_blocks(
    decodes: int, num_blocks: list[int], base_s: float, copy_s: float, lookahead: int
) -> None:
    lengths = [SIZE * count + 1 for count in num_blocks]
    there = engine_with(*lengths, SIZE * 6 + 1)
    here = engine_beside(there, decodes, StepTime(base_s, 0.0001, 0.001), copy_s, lookahead, 300)
    here.scheduler.costs.is_worth_loading = lambda *_: True  # type: ignore[method-assign]
    loads_until_first_token(here, fetching(here, SIZE * 6 + 1, len(lengths)))  # from which it learns a copy's time
    seqs = [fetching(here, length, seed) for seed, length in enumerate(lengths)]
    loads = loads_until_first_token(here, *seqs)
    most = LOAD_PART * (base_s + (decodes + 4) * 0.0011) / copy_s
    assert max(loads) <= max(1.0, 1.1 * most)
    assert sum(loads) == sum(num_blocks)
    assert len(loads) <= 20 + 1.3 * sum(num_blocks) / max(1, int(LOAD_PART * base_s / copy_s))
    here.run()
    for seq in seqs:
        assert seq.account.cached_tokens == seq.account.pulled_tokens == seq.request.prompt_len - 1
    assert all(here.outputs[seq] == here.expected(here.ended[seq].seq) for seq in here.outputs)
    assert here.pool.num_referenced == 0


def test_before_a_copy_has_been_timed_a_step_loads_few_blocks() -> None:
    here = engine_beside(engine_with(SIZE * 50 + 1), 2, StepTime(0.01, 0.0001, 0.001), 0.0001, num_tokens=200)
    loads = loads_until_first_token(here, fetching(here, SIZE * 50 + 1, 0))
    assert next(filter(None, loads)) == FIRST_LOADS
    assert sum(loads) == 50


def test_where_no_stream_decodes_all_is_loaded_in_one_step() -> None:
    here = engine_beside(engine_with(SIZE * 50 + 1), 0, StepTime(0.01, 0.0001, 0.001), 0.001)
    loads = loads_until_first_token(here, fetching(here, SIZE * 50 + 1, 0))
    assert list(filter(None, loads)) == [50]


class DraftTogether(AlwaysDrafts):
    """Where steps overlap, all decodes wait for their last tokens, and are in every other step."""

    def holds(self, decodes: list[Chunk], costs: CostModel, num_running: int) -> list[Chunk]:
        return decodes


def test_streams_that_wait_for_the_step_in_flight_are_beside_the_next_one_too() -> None:
    oracle = Oracle(lambda seq, count: expected_tokens(seq.tokens, count, VOCAB_SIZE), 0.5, VOCAB_SIZE)
    speculation = DraftTogether(oracle, 4, VOCAB_SIZE)
    there, step_time = engine_with(SIZE * 50 + 1), StepTime(0.01, 0.0001, 0.001)
    here = engine_beside(there, 2, step_time, 0.0001, lookahead=1, num_tokens=400, speculation=speculation)
    seq = here.add(prompt(SIZE * 50 + 9, 0), max_tokens=3, lender=Lender("there", SIZE * 50))  # and computes 9 tokens
    loads = loads_until_first_token(here, seq)
    assert next(filter(None, loads)) == FIRST_LOADS
    assert max(loads) < 30
    assert sum(loads) == 50


def test_blocks_of_a_higher_rank_are_loaded_first() -> None:
    """A stream that has come from another engine does not wait for the copies of those that are to come."""
    there = engine_with(SIZE * 60 + 1, SIZE * 4 + 1)
    here = engine_beside(there, 2, StepTime(0.01, 0.0001, 0.001), 0.001, num_tokens=200)
    copy = fetching(here, SIZE * 60 + 1, 0, priority=-1)
    while not here.step().loads:
        pass
    stream = fetching(here, SIZE * 4 + 1, 1)
    assert len(loads_until_first_token(here, stream)) < 15
    assert len(loads_until_first_token(here, copy)) > 20
    here.run()


def test_a_prompt_starts_while_a_longer_one_loads_its_blocks() -> None:
    """The longer one computes more than a step holds, but not before its last block is there."""
    there = engine_with(SIZE * 100 + 1)
    here = engine_beside(there, 2, StepTime(0.01, 0.0001, 0.001), 0.002, num_tokens=400)
    long = here.add(prompt(SIZE * 100 + 200, 0), max_tokens=3, lender=Lender("there", SIZE * 100))
    while not here.step().loads:
        pass
    assert len(loads_until_first_token(here, here.add(prompt(100, 1), max_tokens=3))) < 5
    assert len(loads_until_first_token(here, long)) > 50
    here.run()
    assert all(here.outputs[each] == here.expected(here.ended[each].seq) for each in here.outputs)


@pytest.mark.parametrize("failure", ["at launch", "when read", "computed"])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_failure_of_any_step_while_blocks_are_loaded_changes_no_token(failure: str, lookahead: int) -> None:
    num_again = 0
    for at in range(12):
        here = engine_beside(engine_with(SIZE * 20 + 1), 2, StepTime(0.01, 0.0001, 0.001), 0.0005, lookahead)
        while len(here.steps):
            here.steps.commit_oldest()
        unreliable = UnreliableRunner(here.runner)
        here.runner, here.steps = unreliable, StepsInFlight(here.scheduler, unreliable)  # type: ignore[assignment]
        seq = fetching(here, SIZE * 20 + 1, 0)
        unreliable.failures = [*[""] * at, failure]
        here.run()
        assert all(here.outputs[each] == here.expected(here.ended[each].seq) for each in here.outputs)
        num_again += seq.account.preemptions
    assert num_again > 0


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_sequence_that_is_cancelled_while_its_blocks_are_loaded_leaves_nothing_held(lookahead: int) -> None:
    for at in range(12):
        here = engine_beside(engine_with(SIZE * 20 + 1), 2, StepTime(0.01, 0.0001, 0.001), 0.0005, lookahead)
        seq = fetching(here, SIZE * 20 + 1, 0)
        for _ in range(at):
            here.step()
        here.abort(seq.id)
        assert not here.scheduler.host.loads
        here.run()
        assert all(here.outputs[each] == here.expected(here.ended[each].seq) for each in here.outputs if each != seq.id)
        assert here.pool.num_referenced == 0

"""Blocks that come from another engine change no token, whatever becomes of the lender, and stay held nowhere."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from pagoda_server.engine.core.sequence import Lender, Sequence
from pagoda_server.engine.loop.steps_in_flight import StepsInFlight
from pagoda_server.engine.runners.synthetic import StepTime
from tests.engine.harness import SteppedEngine, SteppedPeers
from tests.engine.test_scheduler import prompt
from tests.engine.unreliable import UnreliableRunner

LONG = 33  # tokens, eight full blocks
THERE = Lender("there", LONG)


def small(num_blocks: int = 24, lookahead: int = 0) -> SteppedEngine:
    return SteppedEngine(
        num_blocks=num_blocks, block_size=4, token_budget=64, host_blocks=32, lookahead=lookahead, lenders={},
        step_time=StepTime(0.001),
    )  # fmt: skip


def lent(engine: SteppedEngine) -> int:
    return engine.scheduler.host.load().lent_tokens


def peers(engine: SteppedEngine) -> SteppedPeers:
    assert engine.peers is not None
    return engine.peers


def served(engine: SteppedEngine, seed: int, **fields: object) -> Sequence:
    """A long prompt that is served alone."""
    seq = engine.add(prompt(LONG, seed), max_tokens=3, **fields)  # type: ignore[arg-type]
    engine.run()
    check(engine, seq)
    return seq


def check(engine: SteppedEngine, *seqs: Sequence) -> None:
    engine.scheduler.check_integrity()
    for seq in seqs:
        assert engine.outputs[seq.id] == engine.expected(seq)


def pair(lender: SteppedEngine, num_blocks: int = 24, lookahead: int = 0) -> SteppedEngine:
    """An engine that can fetch from this one."""
    here = small(num_blocks, lookahead)
    peers(here)._lenders["there"] = lender
    return here


def check_released(lender: SteppedEngine) -> None:
    host = lender.scheduler.host
    assert host.lent is not None
    assert host._cache is not None
    assert not host.lent.hosts()
    assert not host._cache._pins
    lender.scheduler.check_integrity()


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_prompt_that_another_engine_has_cached_is_fetched_and_not_computed(lookahead: int) -> None:
    there = small(lookahead=lookahead)
    served(there, 0)
    here = pair(there, lookahead=lookahead)
    account = served(here, 0, lender=THERE).account
    assert (account.cached_tokens, account.pulled_tokens, account.recomputed_tokens) == (32, 32, 0)
    load = here.scheduler.host.load()
    assert (load.fetched_tokens, load.unfetched_blocks, lent(there)) == (32, 0, 32)
    account = served(here, 0).account
    assert (account.cached_tokens, account.pulled_tokens) == (32, 0), "it is cached here now"
    check_released(there)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("is_lent", [True, False])
def test_a_sequence_goes_on_at_another_engine_with_the_blocks_of_its_output(lookahead: int, is_lent: bool) -> None:
    there = small(lookahead=lookahead)
    first = there.add(prompt(LONG, 0), max_tokens=30)
    while first.output_len < 12:
        there.step()
    output = first.tokens[LONG:]
    here = pair(there, lookahead=lookahead)
    lender = Lender("there", first.num_tokens) if is_lent else None
    second = here.add(prompt(LONG, 0), max_tokens=30, output=output, **({"lender": lender} if lender else {}))
    here.run()
    check(here, second)
    there.abort(first.id)
    there.run()
    check_released(there)
    num_known = LONG + len(output) - 1  # all but the last token were computed there
    pulled = num_known // 4 * 4 if is_lent else 0
    account = second.account
    assert account.pulled_tokens >= pulled - 4, "a block whose last token is in flight is not cached yet"
    assert account.pulled_tokens <= pulled
    assert account.recomputed_tokens == num_known - account.pulled_tokens


@pytest.mark.parametrize("lookahead", [0, 1])
def test_what_the_lender_has_in_host_memory_alone_is_lent_too(lookahead: int) -> None:
    there = small(num_blocks=12, lookahead=lookahead)
    served(there, 0)
    served(there, 1)
    assert there.scheduler.host.load().blocks_cached
    here = pair(there)
    assert served(here, 0, lender=THERE).account.cached_tokens == 32
    check_released(there)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_an_engine_lends_while_it_computes(lookahead: int) -> None:
    there = small(num_blocks=40, lookahead=lookahead)
    served(there, 0)
    running = [there.add(prompt(9, seed), max_tokens=30) for seed in (5, 6)]
    for _ in range(3):
        there.step()
    here = pair(there)
    assert served(here, 0, lender=THERE).account.cached_tokens == 32
    assert there.scheduler.running, "it was not idle"
    there.run()
    check(there, *running)
    check_released(there)


def test_a_lender_that_does_not_answer_costs_a_wait_and_no_token() -> None:
    there = small()
    served(there, 0)
    here = pair(there)
    peers(here).is_stuck = True
    seq = here.add(prompt(LONG, 0), 3, lender=THERE)
    assert here.step().is_empty
    here.now = here.scheduler.next_deadline
    assert here.now <= 2.0
    here.run()
    assert seq.account.cached_tokens == 0
    check(here, seq)
    peers(here).is_stuck = False
    here.run()
    assert here.scheduler.host.load().fetched_tokens == 32, "what came late is cached"
    check_released(there)


@pytest.mark.parametrize("num_whole", [0, 1, 5])
def test_what_does_not_come_whole_is_computed(num_whole: int) -> None:
    there = small()
    served(there, 0)
    here = pair(there)
    peers(here).corrupt = lambda contents: contents[:num_whole]
    assert served(here, 0, lender=THERE).account.cached_tokens == 4 * num_whole
    load = here.scheduler.host.load()
    assert (load.fetched_tokens, load.unfetched_blocks) == (4 * num_whole, 8 - num_whole)


def test_a_lender_that_is_gone_or_has_something_else_is_a_miss() -> None:
    there = small()
    served(there, 1)
    here = pair(there)
    assert served(here, 0, lender=THERE).account.cached_tokens == 0
    assert served(here, 2, lender=Lender("gone", LONG)).account.cached_tokens == 0
    assert here.scheduler.host.load().unfetched_blocks == 16
    check_released(there)


def test_no_more_is_asked_for_than_the_lender_is_expected_to_have() -> None:
    there = small()
    served(there, 0)
    here = pair(there)
    assert served(here, 0, lender=Lender("there", 19)).account.cached_tokens == 16
    assert lent(there) == 16


def test_a_salted_prompt_is_fetched_for_its_own_salt_alone() -> None:
    there = small()
    served(there, 0, salt="a")
    here = pair(there)
    assert served(here, 0, lender=THERE, salt="b").account.cached_tokens == 0
    assert served(here, 0, lender=THERE, salt="a").account.cached_tokens == 32


def test_a_flush_lends_nothing_of_what_was_cached() -> None:
    there = small(num_blocks=40, lookahead=1)
    served(there, 0)
    there.add(prompt(9, 5), max_tokens=30)
    for _ in range(3):
        there.step()
    here = pair(there)
    peers(here).steps = False
    here.add(prompt(LONG, 0), 3, lender=THERE)
    there.step()  # the plan that saves the blocks is in flight
    there.scheduler.flush_cache()
    there.run()
    peers(here).steps = True
    here.run()
    assert here.scheduler.host.load().fetched_tokens == 0
    check_released(there)


@pytest.mark.parametrize("failure", ["at launch", "when read", "computed"])
def test_what_a_failed_step_saved_is_not_lent(failure: str) -> None:
    there = small(num_blocks=40)
    served(there, 0)
    runner = UnreliableRunner(there.runner)
    there.steps = StepsInFlight(there.scheduler, runner)
    running = there.add(prompt(9, 5), max_tokens=30)
    there.step()
    here = pair(there)
    peers(here).steps = False
    seq = here.add(prompt(LONG, 0), 3, lender=THERE)
    runner.failures = [failure]
    there.step()
    peers(here).steps = True
    here.run()
    there.run()
    check(here, seq)
    check(there, running)
    check_released(there)


def test_a_copy_that_fails_lends_nothing() -> None:
    there = small()
    served(there, 0)
    here = pair(there)
    with patch.object(there.runner, "copy", side_effect=FloatingPointError):
        assert served(here, 0, lender=THERE).account.cached_tokens == 0
    check_released(there)


def test_a_fetch_that_has_proved_slow_is_not_repeated_for_a_prompt_that_is_computed_sooner() -> None:
    there = small(num_blocks=60)
    for seed in range(4):
        served(there, seed)
    here = pair(there, num_blocks=60)
    for seed in range(4, 8):
        served(here, seed)  # it knows now how long computing takes
    source = here.scheduler.host.arrivals
    assert source is not None
    source.peer.note(5.0)
    assert served(here, 0, lender=THERE).account.cached_tokens == 0
    assert lent(there) == 0


def test_a_slow_fetch_is_worth_it_where_computing_beside_decodes_takes_longer() -> None:
    there = small(num_blocks=60)
    served(there, 0)
    here = pair(there, num_blocks=60)
    for seed in range(4, 8):
        served(here, seed)
    source = here.scheduler.host.arrivals
    assert source is not None
    source.peer.note(5.0)
    with patch.object(here.scheduler.costs, "likely_s", return_value=60.0):
        assert served(here, 0, lender=THERE).account.cached_tokens == 32


def test_an_engine_that_has_computed_no_prompt_waits_as_long_as_any_does() -> None:
    there = small()
    served(there, 0)
    here = pair(there)
    peers(here).is_stuck = True
    here.add(prompt(LONG, 0), 3, lender=THERE)
    assert here.scheduler.next_deadline == here.now + 2.0


def test_an_engine_that_has_computed_no_prompt_leaves_half_of_the_time_for_it() -> None:
    there = small()
    served(there, 0)
    here = pair(there)
    peers(here).is_stuck = True
    here.add(prompt(LONG, 0), 3, lender=THERE, timeout_s=1.0)
    assert here.scheduler.next_deadline == pytest.approx(here.now + 0.5)

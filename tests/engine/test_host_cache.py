"""Prefixes that the device had to evict are found in host memory, and no token changes."""

from __future__ import annotations

import pytest

from pagoda_server.engine.core.sequence import Sequence, State
from pagoda_server.engine.kv.windows import window_address
from pagoda_server.engine.loop.steps_in_flight import StepsInFlight
from tests.engine.harness import SteppedEngine
from tests.engine.test_scheduler import prompt
from tests.engine.unreliable import UnreliableRunner

LONG = 33  # tokens, eight full blocks


def small(host_blocks: int = 40, **settings: object) -> SteppedEngine:
    """A cache for one long prompt."""
    return SteppedEngine(num_blocks=12, block_size=4, token_budget=64, host_blocks=host_blocks, **settings)  # type: ignore[arg-type]


def served(engine: SteppedEngine, seed: int, **fields: object) -> Sequence:
    """A long prompt that is served alone."""
    seq = engine.add(prompt(LONG, seed), max_tokens=3, **fields)  # type: ignore[arg-type]
    engine.run()
    engine.scheduler.check_integrity()
    assert engine.outputs[seq.id] == engine.expected(seq)
    return seq


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_prompt_that_was_evicted_is_loaded_and_not_computed(lookahead: int) -> None:
    engine = small(lookahead=lookahead)
    served(engine, 0)
    served(engine, 1)
    again = served(engine, 0)
    assert again.account.cached_tokens == 32
    host = engine.scheduler.host.load()
    assert 16 < host.hit_tokens <= 32, "the device may still have had some"
    assert host.blocks_used == 0


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("others", [1, 2, 5])
def test_a_prompt_of_a_model_with_windows_is_loaded_with_the_blocks_that_they_see(lookahead: int, others: int) -> None:
    engine = SteppedEngine(
        num_blocks=60, block_size=4, token_budget=16, host_blocks=400, windows=(None, 9, 13), lookahead=lookahead
    )
    for seed in range(others + 1):
        served(engine, seed)
    again = served(engine, 0)
    assert again.account.cached_tokens == 32
    hits = engine.scheduler.host.load().hit_tokens
    assert hits == 32 if others == 5 else (hits > 0) == (others == 2), "the device still has some of what is recent"
    assert engine.pool.num_pledged == 0


def test_where_a_block_in_a_window_is_gone_a_shorter_prefix_is_loaded() -> None:
    engine = SteppedEngine(num_blocks=60, block_size=4, token_budget=16, host_blocks=400, windows=(None, 9))
    for seed in range(6):
        served(engine, seed)
    cache = engine.scheduler.host._cache
    assert cache is not None
    seq = engine.add(prompt(LONG, 0), max_tokens=3)
    engine.scheduler._tables.prefixes.match(seq)  # finds nothing on the device, and addresses the blocks
    cache._forget([window_address(seq.blocks.hashes[6], 0)])
    engine.run()
    assert seq.account.cached_tokens == 24, "of 32: the seventh block is inside the window of what follows it"
    assert engine.outputs[seq.id] == engine.expected(seq)
    engine.scheduler.check_integrity()


def test_without_host_memory_it_is_computed_again() -> None:
    engine = small(host_blocks=0)
    served(engine, 0)
    served(engine, 1)
    assert served(engine, 0).account.cached_tokens < 16


def test_what_the_device_still_has_is_shared_and_the_rest_is_loaded() -> None:
    engine = small()
    served(engine, 0)
    engine.add(prompt(17, 1), max_tokens=1)
    engine.run()
    assert served(engine, 0).account.cached_tokens == 32
    assert 0 < engine.scheduler.host.load().hit_tokens < 32


def test_content_that_was_loaded_stays_and_is_not_saved_again() -> None:
    engine = small()
    for seed in (0, 1, 0, 1, 0, 1):
        served(engine, seed)
    host = engine.scheduler.host.load()
    assert host.hit_tokens >= 4 * 16
    assert host.blocks_cached <= 20, "both prompts, once"


def test_what_was_not_used_for_longest_is_given_up_first() -> None:
    def cached_of_first(*seeds: int) -> int:
        engine = small(host_blocks=17)
        for seed in seeds:
            served(engine, seed)
        assert engine.scheduler.host.load().blocks_cached <= 17
        return served(engine, 0).account.cached_tokens

    assert cached_of_first(0, 1, 0, 2, 3) > cached_of_first(0, 1, 1, 2, 3)


def test_another_salt_finds_nothing() -> None:
    engine = small()
    served(engine, 0, salt="one")
    served(engine, 1)
    assert served(engine, 0, salt="two").account.cached_tokens == 0
    assert engine.scheduler.host.load().hit_tokens == 0


def test_a_request_that_bypasses_the_cache_loads_nothing() -> None:
    engine = small()
    served(engine, 0)
    served(engine, 1)
    assert served(engine, 0, bypass=True).account.cached_tokens == 0


def test_a_flushed_cache_is_empty_here_too() -> None:
    engine = small()
    served(engine, 0)
    served(engine, 1)
    assert engine.scheduler.host.load().blocks_cached
    engine.scheduler.flush_cache()
    assert engine.scheduler.host.load().blocks_cached == 0
    assert served(engine, 0).account.cached_tokens == 0


def test_a_flush_while_a_sequence_loads_takes_nothing_from_it() -> None:
    engine = small(lookahead=1)
    served(engine, 0)
    served(engine, 1)
    seq = engine.add(prompt(LONG, 0), max_tokens=3)
    engine.step()
    assert (seq.state, seq.blocks.num_committed) == (State.RUNNING, 0)
    engine.scheduler.flush_cache()
    engine.scheduler.check_integrity()
    engine.run()
    assert engine.outputs[seq.id] == engine.expected(seq)
    engine.scheduler.check_integrity()


def test_preempted_sequences_take_the_place_of_cached_prefixes() -> None:
    engine = small(host_blocks=6)
    served(engine, 0)
    served(engine, 1)
    assert engine.scheduler.host.load().blocks_cached == 6, "all there are"
    seq = engine.add(prompt(LONG, 2), max_tokens=8)
    engine.step()
    engine.scheduler._preempt(seq)
    other = engine.add(prompt(LONG, 3), max_tokens=3, priority=1)
    engine.run()
    assert seq.account.loaded_tokens > 0
    assert engine.outputs[seq.id] == engine.expected(seq)
    assert engine.outputs[other.id] == engine.expected(other)
    engine.scheduler.check_integrity()


@pytest.mark.parametrize("failure", ["at launch", "when read", "computed"])
def test_what_a_failed_step_saved_is_not_trusted(failure: str) -> None:
    engine = small(lookahead=1)
    engine.runner = unreliable = UnreliableRunner(engine.runner)
    engine.steps = StepsInFlight(engine.scheduler, unreliable)
    served(engine, 0)
    unreliable.failures = [failure]
    served(engine, 1)
    served(engine, 0)
    served(engine, 1)


def test_copies_that_are_slower_than_computing_are_left_out() -> None:
    engine = small(copy_s=100.0)
    for seed in (0, 1, 0, 1, 0):
        served(engine, seed)
    assert engine.scheduler.host.load().hit_tokens <= 64

"""What a prompt takes over from earlier ones, parts of blocks included, and what the cache keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pagoda_server.engine.kv import prefix_cache
from pagoda_server.engine.kv.blocks import BlockPool, chain_hashes
from pagoda_server.engine.loop.steps_in_flight import StepsInFlight
from pagoda_server.engine.runners.synthetic import StepTime
from pagoda_server.engine.scheduling.scheduler import MOST_CONSIDERED
from tests.engine.harness import SteppedEngine
from tests.engine.test_scheduler import prompt
from tests.engine.unreliable import UnreliableRunner


def test_a_prefix_that_ends_inside_a_block_is_copied() -> None:
    engine = SteppedEngine(block_size=16, token_budget=64)
    cached = engine.add(prompt(48), max_tokens=1)
    engine.run()
    shorter = engine.add([*prompt(42), 1, 2, 3], max_tokens=8)
    plan = engine.step()
    ((source, target),) = plan.copies
    assert shorter.account.cached_tokens == 42
    assert source != target == shorter.blocks[2]
    engine.run()
    again = engine.add(prompt(48), max_tokens=8)
    engine.run()
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in (cached, shorter, again))
    assert again.account.cached_tokens == 47


def test_less_than_a_quarter_of_a_block_is_computed_instead() -> None:
    engine = SteppedEngine(block_size=16, token_budget=64)
    engine.add(prompt(48), max_tokens=1)
    engine.run()
    for common, cached in ((35, 32), (36, 36)):
        seq = engine.add([*prompt(common), 1, 2, 3, 4, 5], max_tokens=1)
        engine.run()
        assert seq.account.cached_tokens == cached


@pytest.mark.parametrize("rules", [{"salt": "other"}, {"bypass": True}])
def test_no_part_of_a_block_is_found_under_another_salt_or_when_the_cache_is_bypassed(
    rules: dict[str, str | bool],
) -> None:
    engine = SteppedEngine(block_size=16, token_budget=64)
    engine.add(prompt(16), max_tokens=1)
    engine.run()
    seq = engine.add(prompt(10), max_tokens=1, **rules)  # type: ignore[arg-type]
    assert not engine.step().copies
    assert seq.account.cached_tokens == 0


def test_no_part_of_a_block_is_found_behind_another_prefix_or_after_a_flush() -> None:
    engine = SteppedEngine(block_size=8, token_budget=64)
    a, b, c = ([first] * 8 for first in (1, 2, 3))
    engine.add([*a, *b, 9], max_tokens=1)
    engine.add([*c, 9], max_tokens=1)
    engine.run()
    elsewhere = engine.add([*c, *b[:6], 8, 8], max_tokens=1)
    engine.run()
    assert elsewhere.account.cached_tokens == 8
    engine.scheduler.flush_cache()
    flushed = engine.add([*a, *b[:6], 8, 8], max_tokens=1)
    engine.run()
    assert flushed.account.cached_tokens == 0


def test_blocks_of_fewer_than_eight_tokens_are_shared_whole_and_never_copied() -> None:
    engine = SteppedEngine(block_size=4, token_budget=64)
    engine.add(prompt(17), max_tokens=1)
    engine.run()
    seq = engine.add([*prompt(15), 1, 2], max_tokens=1)
    assert not engine.step().copies
    assert seq.account.cached_tokens == 12


@pytest.mark.parametrize("lookahead", [0, 1])
def test_the_source_of_a_copy_is_held_until_the_step_that_makes_it_is_committed(lookahead: int) -> None:
    engine = SteppedEngine(block_size=8, lookahead=lookahead)
    engine.add(prompt(17), max_tokens=1)
    engine.run()
    seq = engine.add([*prompt(14), 1, 2], max_tokens=4)
    ((source, _),) = engine.scheduler.schedule().copies
    assert source not in seq.blocks
    assert engine.pool.num_referenced == len(seq.blocks) + 1
    engine.abort(seq.id)
    assert engine.pool.num_referenced == 1, "a step that fails is computed again"


def test_a_sequence_that_ends_before_its_first_step_needs_no_copy() -> None:
    engine = SteppedEngine(block_size=8, target_itl_s=1e-6, step_time=StepTime(0.001, 0.0, 0.01))
    engine.add(prompt(17), max_tokens=1)
    engine.run()
    stream = engine.add(prompt(4, 50), max_tokens=40)
    engine.step()
    other = engine.add(prompt(60, 90), max_tokens=9)
    engine.step()
    seq = engine.add([*prompt(3), 1, 2, 3, 4, 5], max_tokens=4)
    plan = engine.step()
    assert [chunk.seq for chunk in plan.chunks] == [stream, other], "the target leaves no tokens for it"
    assert seq.num_computed == 3, "it starts inside a block that has to be copied"
    assert not plan.copies, "it is made when it is needed"
    engine.abort(seq.id)
    assert engine.pool.num_referenced == len(stream.blocks) + len(other.blocks)
    engine.run()
    assert engine.outputs[other.id] == engine.expected(other)


@pytest.mark.parametrize("failure", ["at launch", "when read"])
def test_copies_of_a_step_that_fails_are_made_again(failure: str) -> None:
    engine = SteppedEngine(block_size=8, lookahead=1)
    engine.add(prompt(17), max_tokens=1)
    engine.run()
    engine.runner = runner = UnreliableRunner(engine.runner)  # type: ignore[assignment]
    engine.steps = StepsInFlight(engine.scheduler, runner)
    runner.failures = [failure]
    seqs = [engine.add([*prompt(14), at, 2], max_tokens=6) for at in range(3)]
    engine.run()
    assert [seq.account.cached_tokens for seq in seqs] == [14, 14, 14]
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in seqs)


def test_a_copy_that_there_is_no_room_for_is_not_made() -> None:
    engine = SteppedEngine(num_blocks=5, block_size=8, max_model_len=40, token_budget=64)
    engine.add(prompt(16), max_tokens=1)
    engine.run()
    seq = engine.add([*prompt(14), *range(1, 21)], max_tokens=3)
    engine.run()
    assert seq.account.cached_tokens == 8
    assert engine.outputs[seq.id] == engine.expected(seq)


def test_prompts_that_come_once_do_not_displace_one_that_many_share() -> None:
    engine = SteppedEngine(num_blocks=64, block_size=4, token_budget=300)
    system = prompt(80)
    for at in range(3):
        engine.add([*system, at, at, at], max_tokens=2)
        engine.run()
    for at in range(20):  # four times as much as the pool holds
        engine.add([200, *prompt(50, at)], max_tokens=2)
        engine.run()
    again = engine.add([*system, 9, 9, 9], max_tokens=2)
    engine.run()
    assert again.account.cached_tokens >= 80


def test_what_is_no_longer_asked_for_makes_way_for_what_is() -> None:
    engine = SteppedEngine(num_blocks=64, block_size=4, token_budget=300)
    cached = []
    for topic in range(12):  # each is hot while its time lasts, and two of them fill the pool
        for at in range(3):
            seq = engine.add([topic, *prompt(100, topic), at, at], max_tokens=2)
            engine.run()
        cached.append(seq.account.cached_tokens)
    assert min(cached) >= 100


@pytest.mark.parametrize("block_size", [4, 16])
def test_a_second_prompt_behind_a_long_system_prompt_computes_little(block_size: int) -> None:
    engine = SteppedEngine(num_blocks=6400 // block_size, block_size=block_size, token_budget=512, max_model_len=3000)
    system = prompt(2048)
    computed = []
    for own in ([1, 2, 3] * 10, [4, 5, 6] * 10):
        seq = engine.add(system + own, max_tokens=1)
        engine.run()
        computed.append(seq.request.prompt_len - seq.account.cached_tokens)
    assert computed[1] <= 0.15 * computed[0]


def test_entries_of_blocks_that_were_evicted_do_not_pile_up() -> None:
    engine = SteppedEngine(num_blocks=16, block_size=8, max_model_len=64, token_budget=64)
    for at in range(60):
        engine.add([at, *prompt(30, at)], max_tokens=1)
        engine.run()
    heads = engine.scheduler._tables.prefixes._heads
    assert heads is not None
    assert len(heads._contents) <= 2 * 16 + 1


def test_hot_content_fills_four_fifths_of_the_pool_at_most() -> None:
    pool = BlockPool(10, 4)
    *hot, new = pool.allocate(10)
    for block in (*hot, new):
        pool.publish(block, bytes([block]))
    pool.note_hit(hot)
    pool.release(hot)
    pool.release([new])
    evicted = [block for _ in range(3) for block in pool.allocate(1)]
    assert evicted == [hot[-1], new, hot[-2]], "the first that was added is one too many"
    assert len(pool.allocate(7)) == 7


def test_long_prompts_that_are_cached_start_a_few_in_a_step() -> None:
    length, count = 30_000, 12
    engine = SteppedEngine(num_blocks=4096, block_size=16, max_num_seqs=16, token_budget=2048, max_model_len=32_768)
    engine.add([7] * length, max_tokens=1)
    engine.run()
    for _ in range(count):
        engine.add([7] * length, max_tokens=100)
    started = []
    while len(engine.scheduler.running) < count:
        before = len(engine.scheduler.running)
        engine.step()
        started.append(len(engine.scheduler.running) - before)
    assert all(1 <= each <= -(-MOST_CONSIDERED // length) for each in started), started


@pytest.mark.parametrize("lookahead", [0, 1])
def test_siblings_take_the_addresses_of_their_prompt_from_the_first(
    lookahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SteppedEngine(block_size=8, token_budget=64, lookahead=lookahead)
    seqs = engine.add_siblings(4, prompt(100), max_tokens=20)
    hashed = 0

    def counted(*arguments: Any) -> Iterator[bytes]:
        nonlocal hashed
        for address in chain_hashes(*arguments):
            hashed += 1
            yield address

    monkeypatch.setattr(prefix_cache, "chain_hashes", counted)
    engine.run()
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in seqs)
    of_prompt, of_output = 100 // 8, 3
    assert hashed <= of_prompt + len(seqs) * of_output

"""Preempted sequences get back what they computed, from their old blocks or from the host, and no token changes."""

from __future__ import annotations

import pytest

from pagoda_server.engine.core.sequence import BlockTable, Request, SamplingParams, Sequence, State
from pagoda_server.engine.core.step import Chunk, StepPlan
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.kv.host_blocks import HostBlocks
from pagoda_server.engine.kv.prefix_cache import Prefix
from pagoda_server.engine.loop.steps_in_flight import StepsInFlight
from pagoda_server.engine.runners.synthetic import StepTime
from pagoda_server.engine.timing.cost_model import CostModel
from pagoda_server.settings import EngineConfig, SettingError
from tests.engine.harness import SteppedEngine
from tests.engine.test_scheduler import prompt
from tests.engine.unreliable import UnreliableRunner


def crowded(host_blocks: int, **settings: object) -> tuple[SteppedEngine, list[Sequence]]:
    """Five sequences in a cache for two of them."""
    engine = SteppedEngine(num_blocks=10, block_size=4, host_blocks=host_blocks, **settings)  # type: ignore[arg-type]
    return engine, [engine.add(prompt(6, at), max_tokens=20) for at in range(5)]


def preempt(engine: SteppedEngine, seq: Sequence) -> None:
    """Preempt a sequence, whatever else runs."""
    assert seq.state is State.RUNNING
    engine.scheduler._preempt(seq)
    engine.scheduler.check_integrity()


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_preempted_sequence_computes_nothing_again(prefix_caching: bool, lookahead: int) -> None:
    engine, seqs = crowded(40, prefix_caching=prefix_caching, lookahead=lookahead)
    engine.run()
    counters, host = engine.scheduler.counters, engine.scheduler.host.load()
    assert counters.preemptions > 0
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in seqs)
    assert counters.recomputed_tokens <= lookahead * counters.preemptions, "what the step in flight computed is lost"
    assert host.loaded_tokens == sum(seq.account.loaded_tokens for seq in seqs) > 0
    assert sum(seq.account.saved_tokens for seq in seqs) == host.saved_tokens >= host.loaded_tokens
    assert (host.blocks_total, host.blocks_used) == (40, 0)


def test_without_host_memory_it_is_computed_again() -> None:
    engine, seqs = crowded(0, prefix_caching=False)
    engine.run()
    assert engine.scheduler.counters.recomputed_tokens == engine.scheduler.counters.preempted_tokens > 0
    assert not any(seq.account.saved_tokens or seq.account.loaded_tokens for seq in seqs)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_nothing_is_copied_before_others_write_over_it(prefix_caching: bool) -> None:
    engine = SteppedEngine(host_blocks=40, prefix_caching=prefix_caching)
    seq = engine.add(prompt(30), max_tokens=20)
    for _ in range(10):
        engine.step()
    preempt(engine, seq)
    engine.run()
    assert engine.outputs[seq.id] == engine.expected(seq)
    assert (seq.account.recomputed_tokens, seq.account.saved_tokens, seq.account.loaded_tokens) == (0, 0, 0), (
        "its blocks were still there"
    )
    assert seq.account.preempted_tokens > 30


def test_only_what_others_write_over_is_copied() -> None:
    engine = SteppedEngine(num_blocks=14, block_size=4, token_budget=64, host_blocks=40, prefix_caching=False)
    seq = engine.add(prompt(38), max_tokens=10)
    engine.step()
    preempt(engine, seq)
    other = engine.add(prompt(18, 3), max_tokens=1, priority=1)
    engine.run()
    assert engine.outputs[seq.id] == engine.expected(seq)
    assert engine.outputs[other.id] == engine.expected(other)
    assert seq.account.recomputed_tokens == 0
    assert 0 < seq.account.saved_tokens == seq.account.loaded_tokens <= 20


def test_where_host_memory_is_full_the_rest_is_computed_again() -> None:
    engine, seqs = crowded(2, prefix_caching=False)
    engine.run()
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in seqs)
    assert engine.scheduler.counters.recomputed_tokens > 0
    assert engine.scheduler.host.load().loaded_tokens > 0


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_preemption_at_any_step_changes_no_token(prefix_caching: bool, lookahead: int) -> None:
    """After each preemption, another sequence overwrites part of what it left."""
    saved = 0
    for at in range(1, 22):
        engine = SteppedEngine(
            num_blocks=13, block_size=4, host_blocks=20, prefix_caching=prefix_caching, lookahead=lookahead
        )
        seq = engine.add(prompt(29), max_tokens=20)
        for _ in range(at):
            engine.step()
        if seq.state is not State.RUNNING:
            break
        preempt(engine, seq)
        other = engine.add(prompt(10 + at, 3), max_tokens=5, priority=1)
        engine.run()
        assert engine.outputs[seq.id] == engine.expected(seq)
        assert engine.outputs[other.id] == engine.expected(other)
        saved += seq.account.saved_tokens
    assert at > 18
    assert saved > 100


def test_host_blocks_are_given_back_once_their_content_is_in_use_again() -> None:
    engine = SteppedEngine(num_blocks=14, block_size=4, token_budget=64, host_blocks=40, prefix_caching=False)
    seq = engine.add(prompt(38), max_tokens=10)
    engine.step()
    preempt(engine, seq)
    engine.add(prompt(18, 3), max_tokens=1, priority=1)
    while seq.state is not State.RUNNING:
        engine.step()
    assert seq.account.loaded_tokens > 0
    assert engine.scheduler.host.load().blocks_used == 0


def test_what_was_loaded_is_found_by_others_again() -> None:
    engine = SteppedEngine(num_blocks=14, block_size=4, token_budget=64, host_blocks=40)
    seq = engine.add(prompt(38), max_tokens=16)
    engine.step()
    preempt(engine, seq)
    engine.add(prompt(49, 3), max_tokens=1, priority=1)
    while seq.state is not State.RUNNING:
        engine.step()
    assert seq.account.loaded_tokens > 30
    again = engine.add(prompt(38), max_tokens=1)
    engine.run()
    assert again.account.cached_tokens > 32


def test_what_was_kept_on_the_device_is_found_by_others_again() -> None:
    engine = SteppedEngine(token_budget=64, host_blocks=40)
    seq = engine.add(prompt(38), max_tokens=16)
    engine.step()
    preempt(engine, seq)
    engine.scheduler.flush_cache()
    engine.step()
    engine.step()
    assert (seq.state, seq.account.recomputed_tokens) == (State.RUNNING, 0)
    again = engine.add(prompt(38), max_tokens=1)
    engine.run()
    assert again.account.cached_tokens > 32


def committed_sequence(id: int, tokens: list[int], blocks: list[int]) -> Sequence:
    """Return a sequence whose first nine tokens are computed."""
    seq = Sequence(id, tokens, Request(len(tokens)), SamplingParams(), blocks=BlockTable(blocks))
    seq.blocks.num_committed = 9
    return seq


def test_a_sequence_preempted_again_before_it_computes_keeps_what_it_kept() -> None:
    host = HostBlocks(3, BlockPool(8, 4), CostModel(16, lambda: 0.0))
    seq = committed_sequence(0, [1] * 10, [10, 11, 12])
    host.keep(seq)
    host.taken([10, 11, 12])
    assert [block for block, _ in host.saves()] == [10, 11, 12]
    prefix = host.extend(seq, Prefix())
    assert (prefix.num_tokens, len(prefix.loads)) == (9, 3)
    seq.state, seq.blocks = State.RUNNING, BlockTable(prefix.table([30, 31, 32]))
    host.started(seq, prefix)
    host.check_integrity()
    host.keep(seq)
    seq.state, seq.blocks = State.WAITING, []
    host.check_integrity()
    assert host.loads.take([Chunk(seq, 9, 1, samples=True)], 9) == [], "its blocks are others' now"
    assert host.extend(seq, Prefix()) == prefix


@pytest.mark.parametrize("failure", ["at launch", "when read", "computed"])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_sequence_that_started_from_what_a_failed_step_saved_starts_again(failure: str, lookahead: int) -> None:
    """In one step another sequence takes some of its blocks, and it starts from the saved content."""
    engine = SteppedEngine(num_blocks=40, token_budget=64, host_blocks=40, prefix_caching=False, lookahead=lookahead)
    unreliable = UnreliableRunner(engine.runner)
    engine.runner, engine.steps = unreliable, StepsInFlight(engine.scheduler, unreliable)  # type: ignore[assignment]
    seq = engine.add(prompt(38), max_tokens=10)
    engine.step()
    engine.step()
    preempt(engine, seq)
    while len(engine.steps):
        engine.steps.commit_oldest()
    other = engine.add(prompt(18, 3), max_tokens=10, priority=1)
    unreliable.failures = [failure]
    plan = engine.step()
    assert plan.saves
    assert {host for host, _ in plan.loads} == {host for _, host in plan.saves}
    engine.run()
    assert engine.outputs[seq.id] == engine.expected(seq)
    assert engine.outputs[other.id] == engine.expected(other)
    assert seq.account.preemptions == 2


def test_a_sequence_that_finds_its_content_in_the_cache_drops_its_own() -> None:
    """Two sequences compute the same prefix in one step; only the first one's blocks can be found."""
    engine = SteppedEngine(num_blocks=40, token_budget=80, max_num_seqs=8, host_blocks=40, lookahead=1)
    seqs = [engine.add(prompt(30) + rest, max_tokens=12) for rest in ([], [1, 2, 3, 4, 5])]
    for _ in range(4):
        engine.step()
    preempt(engine, seqs[1])
    engine.step()
    engine.step()  # while it runs and no step of it is committed, what is kept of it are the first one's blocks
    assert seqs[1].state is State.RUNNING
    engine.run()
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in seqs)


def test_what_is_no_longer_kept_is_not_saved() -> None:
    host = HostBlocks(1, BlockPool(8, 4), CostModel(16, lambda: 0.0))
    first, second = (committed_sequence(id, [1] * 9, blocks) for id, blocks in enumerate(([10, 11, 12], [20, 21, 22])))
    host.keep(first)
    host.keep(second)
    host.taken([12])
    host.taken([11])  # there is no room, and without this one the last is of no use
    host.check_integrity()
    assert (host.num_kept(first), host.num_kept(second)) == (4, 9)
    host.taken([22])
    assert host.saves() == [(22, 0)]
    assert (first.account.saved_tokens, second.account.saved_tokens) == (0, 1)
    assert host.saves() == []


@pytest.mark.parametrize("failure", ["at launch", "when read", "computed"])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_failure_of_any_step_changes_no_token(failure: str, lookahead: int) -> None:
    loaded = 0
    for at in range(45):
        engine, seqs = crowded(30, prefix_caching=False, lookahead=lookahead)
        unreliable = UnreliableRunner(engine.runner)
        engine.runner, engine.steps = unreliable, StepsInFlight(engine.scheduler, unreliable)  # type: ignore[assignment]
        unreliable.failures = [*[""] * at, failure]
        engine.run()
        assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in seqs)
        loaded += engine.scheduler.host.load().loaded_tokens
    assert loaded > 1000


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_cancelled_sequence_gives_host_blocks_back_at_once(lookahead: int) -> None:
    """Cancel it at every step of a run in which all sequences are preempted now and then."""
    given_back = 0
    for at in range(1, 60):
        engine, seqs = crowded(30, prefix_caching=False, lookahead=lookahead)
        for _ in range(at):
            engine.step()
        for seq in seqs:
            before = engine.scheduler.host.load().blocks_used
            engine.abort(seq.id)
            engine.scheduler.check_integrity()
            given_back += before - engine.scheduler.host.load().blocks_used
        assert engine.scheduler.host.load().blocks_used == 0
        assert engine.pool.num_referenced == 0 or len(engine.steps)
    assert given_back > 50


def test_what_is_kept_is_not_taken_for_what_must_be_computed_before_a_deadline() -> None:
    engine = SteppedEngine(num_blocks=20, block_size=4, host_blocks=40, prefix_caching=False)
    seq = engine.add(prompt(40), max_tokens=20)
    for _ in range(6):
        engine.step()
    preempt(engine, seq)
    assert engine.scheduler._tables.num_cached(seq) == seq.account.lost_tokens > 40


def test_copies_that_take_longer_than_computing_are_tried_now_and_then() -> None:
    """Copying a block takes as long as computing 40 tokens, which only a measurement can show."""
    engine, seqs = crowded(40, prefix_caching=False, step_time=StepTime(0.001, 0.0, 0.01), copy_s=0.4)
    engine.run()
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in seqs)
    preempted = engine.scheduler.counters.preempted_tokens
    assert 0 < engine.scheduler.host.load().saved_tokens < 0.5 * preempted
    engine, _ = crowded(40, prefix_caching=False, step_time=StepTime(0.001, 0.0, 0.01), copy_s=0.004)
    engine.run()
    assert engine.scheduler.counters.recomputed_tokens == 0, "a tenth of the time"


def test_the_faster_way_is_learned_from_steps() -> None:
    now = 0.0
    costs = CostModel(512, lambda: now)
    seq = Sequence(0, [1] * 500, Request(500), SamplingParams())

    def step(length: int, copies: int) -> None:
        """Take 1 ms a token and 3 ms a copy."""
        nonlocal now
        costs.scheduled(after_idle=True)
        now += 0.01 + 0.001 * length + 0.003 * copies
        plan = StepPlan([Chunk(seq, 0, length, samples=False)], saves=[(at, at) for at in range(copies)])
        costs.committed(plan, 0.003 * copies)

    for length in (100, 20, 300, 70, 210, 20, 5, 500, 130):
        step(length, 0)
    assert costs.is_worth_loading(100, 0, 1), "nothing is known of copies"
    step(100, 5)
    assert costs.chunk_s(0, 100) == pytest.approx(0.1, rel=0.1)
    assert costs.is_worth_loading(20, 0, 100)
    assert costs.is_worth_saving(13, 100), "26 copies in 0.078 s"
    assert not costs.is_worth_loading(45, 0, 100)
    assert not costs.is_worth_saving(25, 100), "50 copies"
    refusals = 0
    while not costs.is_worth_loading(45, 0, 100):
        refusals += 1
    assert 5 < refusals < 30, "a measurement that speaks against copies does not last for ever"


def test_copies_are_tried_while_no_prompt_has_been_computed() -> None:
    now = 0.0
    costs = CostModel(512, lambda: now)
    seq = Sequence(0, [1] * 500, Request(500), SamplingParams())
    for length in (1, 1, 1, 100):
        assert costs.is_worth_loading(1000, 0, 500)
        costs.scheduled(after_idle=True)
        now += 0.01 + 0.001 * length + 0.003 * 5
        plan = StepPlan([Chunk(seq, 0, length, samples=True)], loads=[(at, at) for at in range(5)])
        costs.committed(plan, 0.003 * 5)
    assert not costs.is_worth_loading(1000, 0, 500)


def test_settings_of_host_memory_are_checked() -> None:
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(SettingError, match="--host-kv-gb must be from 0 to 1000000000"):
            EngineConfig("m", host_kv_gb=wrong)

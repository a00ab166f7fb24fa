"""Which sequences with adapters run, wait and overtake each other, in simulated time."""

from __future__ import annotations

from pagoda_server.engine.core.sequence import Sequence, State
from pagoda_server.engine.scheduling.adapter_slots import PATIENCE_S
from tests.engine.harness import SteppedEngine

A, B, C, D = (bytes([number]) * 32 for number in range(1, 5))


def add(engine: SteppedEngine, adapter: bytes, max_tokens: int = 8, seed: int = 0, priority: int = 0) -> Sequence:
    return engine.add([seed, 1, 2], max_tokens, adapter=adapter, priority=priority)


def test_adapters_beyond_the_slots_wait_while_others_overtake_them() -> None:
    engine = SteppedEngine(adapter_slots=2)
    running = [add(engine, A), add(engine, B)]
    waiting, base, same = add(engine, C), add(engine, b""), add(engine, A, seed=1)
    engine.step()
    assert waiting.state is State.WAITING
    assert {seq.id for seq in engine.scheduler.running} == {seq.id for seq in (*running, base, same)}
    assert engine.scheduler.hold == "no adapter"
    engine.run()
    assert waiting.account.adapter_s == waiting.account.queue_s > 0
    assert base.account.adapter_s == same.account.adapter_s == 0.0
    for seq in (*running, waiting, base, same):
        assert engine.outputs[seq.id] == engine.expected(seq)


def test_equal_prompts_with_different_adapters_share_no_blocks() -> None:
    engine = SteppedEngine(adapter_slots=2)
    prompt = list(range(20))
    for adapter in (A, B, b"", A):
        seq = engine.add(prompt, 4, adapter=adapter)
        engine.run()
        assert engine.outputs[seq.id] == engine.expected(seq)
    first, *_ = engine.ended.values()
    cached = [ended.seq.account.cached_tokens for ended in engine.ended.values()]
    assert first.seq.account.cached_tokens == 0
    assert cached[:3] == [0, 0, 0]
    assert cached[3] >= 16


def test_the_slot_that_was_not_used_for_longest_goes_first_and_a_pinned_one_stays() -> None:
    engine = SteppedEngine(adapter_slots=3)
    slots = {}
    for adapter in (A, B, C, A):
        seq = add(engine, adapter)
        engine.step()
        slots[adapter] = seq.adapter_slot
        if adapter == B:
            assert seq.request.adapter is not None
            seq.request.adapter.is_pinned = True
        engine.run()
    later = [add(engine, D), add(engine, b"\5" * 32)]
    engine.step()
    assert [seq.adapter_slot for seq in later] == [slots[C], slots[A]]  # B's was unused for longest
    again = add(engine, B)
    engine.step()
    assert again.adapter_slot == slots[B]
    engine.run()


def test_a_sequence_gets_a_slot_however_many_arrive_for_the_others() -> None:
    engine = SteppedEngine(adapter_slots=2, max_num_seqs=8)
    for seed in range(3):
        add(engine, A, seed=seed)
        add(engine, B, seed=seed)
    engine.step()
    waiting = add(engine, C)
    for count in range(40):  # without a pause, new ones come before the last ones have ended
        add(engine, (A, B)[count % 2], seed=count)
        engine.step()
        if waiting.state is not State.WAITING:
            break
    assert waiting.state is State.RUNNING
    assert PATIENCE_S < engine.now < 25
    engine.run()
    assert all(engine.outputs[ended.seq.id] == engine.expected(ended.seq) for ended in engine.ended.values())


def test_a_slot_that_is_drained_for_a_sequence_that_leaves_is_used_again() -> None:
    engine = SteppedEngine(adapter_slots=1)
    running = add(engine, A, max_tokens=30)
    waiting = add(engine, B)
    for _ in range(3):
        engine.step()
    behind = add(engine, A, seed=3)
    engine.step()
    assert behind.state is State.WAITING  # A's slot is drained
    engine.abort(waiting.id)
    engine.step()
    assert behind.state is State.RUNNING
    engine.run()
    assert engine.outputs[running.id] == engine.expected(running)


def test_siblings_share_their_adapter_and_its_prompt() -> None:
    engine = SteppedEngine(adapter_slots=1)
    seqs = engine.add_siblings(3, list(range(9)), 5, adapter=A)
    engine.run()
    for seq in seqs:
        assert engine.outputs[seq.id] == engine.expected(seq)
    assert engine.scheduler.counters.prompt_tokens == 9


def test_a_slot_that_is_drained_for_one_sequence_holds_up_none_of_a_higher_rank() -> None:
    """It would wait for the other to start, which stands behind it."""
    engine = SteppedEngine(adapter_slots=1, policy="priority")
    running, waiting = add(engine, A, max_tokens=100), add(engine, B)
    while engine.now <= 2 * PATIENCE_S:
        engine.step()
    higher = add(engine, C, priority=1)
    engine.abort(running.id)
    engine.run()
    for seq in (waiting, higher):
        assert engine.outputs[seq.id] == engine.expected(seq)

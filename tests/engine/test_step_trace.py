"""The trace of steps in simulated time, where every step lasts a second."""

from __future__ import annotations

from typing import Any

import pytest

from pagoda_server.engine.core.sequence import EndReason
from pagoda_server.engine.loop import step_trace
from pagoda_server.engine.loop.step_trace import TraceSnapshot
from pagoda_server.engine.serving.codec import trace_messages
from tests.engine.harness import SteppedEngine


def kinds(snapshot: TraceSnapshot, id: int) -> list[object]:
    return [move[1] for move in snapshot.moves if move[2] == id]


def test_a_step_tells_which_sequences_computed_how_many_tokens() -> None:
    engine = SteppedEngine(token_budget=10)
    engine.add([1, 2, 3], max_tokens=4)
    engine.step()
    engine.add(list(range(12)), max_tokens=4)
    engine.step()
    first, second = engine.steps.trace.take().steps
    assert first[:2] == (0.0, 0.0)  # the harness moves its clock between steps
    assert first[2][:3] == ((0,), (0,), (3,))
    assert second[2][:3] == ((0, 1), (0,), (9,))


def test_steps_of_the_same_sequences_share_their_numbers() -> None:
    engine = SteppedEngine()
    engine.add([1, 2, 3], max_tokens=5)
    engine.run()
    _, second, third, *_ = engine.steps.trace.take().steps
    assert second[2][0] is third[2][0]


@pytest.mark.parametrize(
    ("hold", "sizes"),
    [
        ("no budget", {"token_budget": 16}),
        ("no blocks", {"num_blocks": 8, "token_budget": 64}),
        ("no place", {"max_num_seqs": 1, "token_budget": 64}),
    ],
)
def test_it_tells_why_the_next_in_line_has_not_started(hold: str, sizes: dict[str, Any]) -> None:
    engine = SteppedEngine(**sizes)
    engine.add([1] * 20, max_tokens=3)
    engine.add([2] * 12, max_tokens=2)
    engine.add([3] * 12, max_tokens=2)
    engine.step()
    waiting, next_in_line, why = engine.steps.trace.take().steps[0][2][5:8]
    assert (waiting, next_in_line, why) == (2, 1, hold)


def test_it_tells_why_a_running_sequence_did_not_compute() -> None:
    engine = SteppedEngine(num_blocks=64, token_budget=16)
    engine.add([1] * 14, max_tokens=2)
    engine.add([2] * 30, max_tokens=2)
    engine.add([3] * 8, max_tokens=2)
    engine.step()
    plan = engine.step()
    idle = engine.steps.trace.take().steps[-1][2][3:5]
    computing = {chunk.seq.id for chunk in plan.chunks}
    running = {seq.id for seq in engine.scheduler.running}
    assert set(idle[0]) == running - computing
    assert set(idle[1]) <= {"no budget"}


def test_a_sequence_whose_last_token_is_pending_has_nothing_to_compute() -> None:
    engine = SteppedEngine(lookahead=1)
    engine.add([1], max_tokens=1)
    engine.add([2], max_tokens=9)
    engine.step()
    engine.step()
    engine.step()
    assert engine.steps.trace.take().steps[1][2][3:5] == ((0,), ("token pending",))


def test_moves_tell_starts_preemptions_and_ends() -> None:
    engine = SteppedEngine(num_blocks=8, block_size=4)
    seqs = [engine.add([head] * 10, max_tokens=16) for head in (1, 2)]
    engine.abort(engine.add([3] * 10, max_tokens=2).id)
    engine.run()
    [undisturbed, preempted] = sorted(seqs, key=lambda seq: seq.account.preemptions)
    snapshot = engine.steps.trace.take()
    assert kinds(snapshot, undisturbed.id) == ["started", EndReason.LENGTH]
    assert kinds(snapshot, preempted.id) == ["started", "preempted", "started", EndReason.LENGTH]
    assert kinds(snapshot, 2) == [EndReason.ABORTED]
    lost = [move[7] for move in snapshot.moves if move[1] == "preempted"]
    assert lost == [preempted.account.preempted_tokens]


def test_every_second_of_a_sequence_is_booked_once() -> None:
    engine = SteppedEngine(num_blocks=8, block_size=4)
    engine.now = 5.0
    seqs = [engine.add([head] * 14, max_tokens=16) for head in (1, 2)]
    engine.run()
    for seq in seqs:
        booked = seq.account.queue_s + seq.account.prefill_s + seq.account.decode_s + seq.account.preempted_s
        assert booked == engine.ended[seq.id].at - seq.request.arrived
    assert (seqs[0].account.queue_s, seqs[0].account.preempted_s) == (0.0, 0.0)
    assert seqs[0].account.decode_s == 15.0
    assert seqs[1].account.queue_s > 0 or seqs[1].account.preempted_s > 0


def test_old_steps_and_moves_are_forgotten_but_live_sequences_keep_their_last_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_trace, "KEEP_S", 10.0)
    engine = SteppedEngine(max_num_seqs=1)
    engine.add([1], max_tokens=100)
    engine.add([2], max_tokens=100)
    for _ in range(50):
        engine.step()
    snapshot = engine.steps.trace.take()
    assert [step[0] for step in snapshot.steps] == list(range(40, 50))
    assert kinds(snapshot, 0) == ["started"]
    assert kinds(snapshot, 1) == ["waits"]
    assert len(engine.steps.trace.take(last_s=3.0).steps) == 3


def test_memory_is_bounded_however_short_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_trace, "MAX_NUMBERS", 24)
    engine = SteppedEngine()
    for head in range(8):
        engine.add([head], max_tokens=2 + head)  # a different batch in every step
    engine.run()
    steps = engine.steps.trace.take().steps
    assert len(steps) < engine.scheduler.counters.steps
    assert sum(len(step[2][0]) + 2 * len(step[2][1]) + 2 * len(step[2][3]) for step in steps) <= 24


def test_messages_carry_every_step_once_and_know_the_last() -> None:
    engine = SteppedEngine(max_model_len=2000, num_blocks=600)
    engine.add([1, 2], max_tokens=1300)
    engine.run()
    snapshot = engine.steps.trace.take()
    traces = list(trace_messages(7, snapshot))
    assert [trace.is_last for trace in traces] == [False] * (len(traces) - 1) + [True]
    assert {trace.number for trace in traces} == {7}
    steps = [step for trace in traces for step in trace.part.steps]
    assert len(steps) == len(snapshot.steps)
    assert all(trace.part.steps[0].sequences == [0] for trace in traces)  # a part can be read alone
    assert not any(step.sequences for step in traces[0].part.steps[2:])
    assert [trace.is_last for trace in trace_messages(0, SteppedEngine().steps.trace.take())] == [True]

"""Steps that are launched before the previous one's tokens are known: what must not change, and what it costs."""

from __future__ import annotations

import queue
import time

from pagoda_server.engine.core.sequence import EndReason, Request, SamplingParams, Sequence
from pagoda_server.engine.core.step import Sampled, StepOutput, StepPlan
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.loop.loop import Add, EngineLoop, LoadSnapshot
from pagoda_server.engine.loop.steps_in_flight import Launched
from pagoda_server.engine.runners.synthetic import expected_tokens
from pagoda_server.engine.scheduling.scheduler import Scheduler
from tests.engine.harness import VOCAB_SIZE, SteppedEngine, synthetic_runner
from tests.engine.test_scheduler import prompt


def test_a_length_that_is_known_costs_no_row_and_a_stop_token_costs_one() -> None:
    for ends_by_stop in (False, True):
        engine = SteppedEngine(lookahead=1)
        tokens = expected_tokens(prompt(5), 12, VOCAB_SIZE)
        stop = next(at for at, token in enumerate(tokens) if at > 3 and tokens.index(token) == at)
        params = {"stop_token_ids": frozenset({tokens[stop]}), "max_tokens": 30} if ends_by_stop else {"max_tokens": 8}
        seq = engine.add(prompt(5), **params)
        rows = 0
        while engine.scheduler.running or engine.scheduler.waiting:
            rows += engine.step().num_tokens
        engine.run()
        needed = len(seq.tokens) - 1  # the last token is never computed
        assert rows == needed + ends_by_stop
        assert engine.ended[seq.id].reason is (EndReason.STOP if ends_by_stop else EndReason.LENGTH)


def test_a_sequence_that_is_preempted_while_a_step_computes_it_loses_and_doubles_no_token() -> None:
    engine = SteppedEngine(num_blocks=10, block_size=4, prefix_caching=False, lookahead=1)
    seqs = [engine.add(prompt(6, at), max_tokens=20) for at in range(5)]
    arrived_while_waiting = 0
    for _ in range(200):
        waiting = {seq.id for seq in engine.scheduler.waiting if seq.account.preemptions}
        before = {id: len(tokens) for id, tokens in engine.outputs.items()}
        engine.step()
        arrived_while_waiting += sum(len(engine.outputs[id]) > before[id] for id in waiting)
        preempted_now = [seq for seq in engine.scheduler.waiting if seq.account.preemptions and seq.id not in waiting]
        arrived_while_waiting += sum(len(engine.outputs[seq.id]) > before[seq.id] for seq in preempted_now)
    assert arrived_while_waiting > 0, "the case did not occur"
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in seqs)


def test_a_sequence_cancelled_in_flight_returns_its_blocks_at_once_and_ends_once() -> None:
    engine = SteppedEngine(lookahead=1)
    seqs = [engine.add(prompt(9, at), max_tokens=20) for at in range(3)]
    for _ in range(4):
        engine.step()
    engine.abort(seqs[1].id)
    assert not seqs[1].blocks
    tokens = len(engine.outputs[seqs[1].id])
    engine.run()
    assert engine.ended[seqs[1].id].reason is EndReason.ABORTED
    assert len(engine.outputs[seqs[1].id]) == tokens, "no token after the end"
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in (seqs[0], seqs[2]))


def test_blocks_that_a_step_in_flight_still_writes_can_be_given_away() -> None:
    """In a full pool, a waiting sequence takes every block of a stopped sequence in the next step."""
    engine = SteppedEngine(num_blocks=6, block_size=4, max_num_seqs=2, max_model_len=24, lookahead=1)
    stops = frozenset(range(0, VOCAB_SIZE, 5))
    seqs = [engine.add(prompt(7 + at % 3, at), max_tokens=10, stop_token_ids=stops) for at in range(30)]
    engine.run()
    assert sum(ended.reason is EndReason.STOP for ended in engine.ended.values()) > 10
    for seq in seqs:
        expected = engine.expected(seq)
        stopped = next((at for at, token in enumerate(expected, 1) if token in stops), len(expected))
        assert engine.outputs[seq.id] == expected[:stopped]


class Recorder:
    """Notes when steps are launched and read."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.lookahead = 1
        self._runner = synthetic_runner(64, 4, lookahead=1)
        self._count = 0

    def recover(self) -> None:
        raise AssertionError("nothing failed")

    def launch(self, plan: StepPlan) -> Launched:
        number, launched, notes = self._count, self._runner.launch(plan), self.notes
        self._count += 1
        notes.append(f"launch {number}")

        class Noted:
            def result(self) -> Sampled:
                notes.append(f"read {number}")
                return launched.result()

        return Noted()


class Outbox:
    def __init__(self) -> None:
        self.outputs: queue.SimpleQueue[StepOutput] = queue.SimpleQueue()

    def send(self, output: StepOutput, load: LoadSnapshot) -> None:
        self.outputs.put(output)


def test_the_loop_launches_a_step_before_it_reads_the_one_before() -> None:
    scheduler = Scheduler(BlockPool(64, 4), max_num_seqs=8, token_budget=32, max_model_len=100, clock=time.monotonic)
    runner, outbox = Recorder(), Outbox()
    loop = EngineLoop(scheduler, runner, outbox, on_end=lambda: None, lookahead=1)
    loop.inbox.put(Add(Sequence(0, [1, 2, 3], Request(3), SamplingParams(max_tokens=4))))
    loop.start()
    tokens: list[int] = []
    while len(tokens) < 4:
        tokens += outbox.outputs.get(timeout=10).tokens
    loop.stop()
    loop.join(5)
    assert tokens == expected_tokens([1, 2, 3], 4, VOCAB_SIZE)
    assert runner.notes == [
        "launch 0",
        *(note for at in range(3) for note in (f"launch {at + 1}", f"read {at}")),
        "read 3",
    ]

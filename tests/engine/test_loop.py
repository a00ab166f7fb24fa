"""The loop thread, also with a runner that misbehaves."""

from __future__ import annotations

import math
import queue
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.core.sequence import EndReason, Request, SamplingParams, Sequence, State
from pagoda_server.engine.core.step import Chunk, StepOutput, StepPlan
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.loop.loop import MOST_ADDED, Abort, Add, EngineLoop, Inbox, LoadSnapshot, Stop
from pagoda_server.engine.loop.steps_in_flight import Launched, compute_one_by_one
from pagoda_server.engine.runners.synthetic import expected_tokens
from pagoda_server.engine.scheduling.scheduler import Scheduler
from pagoda_server.engine.serving import main
from pagoda_server.settings import EXIT_CONFIG, EngineConfig
from tests.engine.harness import VOCAB_SIZE, synthetic_runner


def sequence(id: int, prompt: list[int], max_tokens: int, deadline: float = math.inf) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(id, list(prompt), Request(len(prompt), deadline=deadline), params)


class PoisonedRunner:
    """Raises whenever one of the poisoned sequences is in the batch."""

    def __init__(self, poisoned: set[int]) -> None:
        self._runner = synthetic_runner(64, 4)
        self._poisoned = poisoned

    @property
    def lookahead(self) -> int:
        return self._runner.lookahead

    def recover(self) -> None:
        self._runner.recover()

    def launch(self, plan: StepPlan) -> Launched:
        if any(chunk.seq.id in self._poisoned for chunk in plan.chunks):
            raise FloatingPointError("poison")
        return self._runner.launch(plan)


class Outbox:
    def __init__(self) -> None:
        self.outputs: queue.SimpleQueue[StepOutput] = queue.SimpleQueue()
        self.loads: list[LoadSnapshot] = []

    def send(self, output: StepOutput, load: LoadSnapshot) -> None:
        self.outputs.put(output)
        self.loads.append(load)

    def until_ended(self, count: int) -> tuple[dict[int, list[int]], dict[int, EndReason]]:
        tokens: dict[int, list[int]] = {}
        ended: dict[int, EndReason] = {}
        while len(ended) < count:
            output = self.outputs.get(timeout=10)
            for id, token in zip(output.sequences, output.tokens, strict=True):
                tokens.setdefault(id, []).append(token)
            ended |= {end.seq.id: end.reason for end in output.ended}
        return tokens, ended


def started_loop(poisoned: set[int]) -> tuple[EngineLoop, Outbox, threading.Event]:
    scheduler = Scheduler(BlockPool(64, 4), max_num_seqs=8, token_budget=32, max_model_len=100, clock=time.monotonic)
    outbox, ended = Outbox(), threading.Event()
    loop = EngineLoop(scheduler, PoisonedRunner(poisoned), outbox, on_end=ended.set)
    loop.start()
    return loop, outbox, ended


def test_an_exception_in_one_sequence_fails_that_one_alone() -> None:
    loop, outbox, _ = started_loop(poisoned={1})
    for id in range(3):
        loop.inbox.put(Add(sequence(id, [id, 5, 7], 6)))
    tokens, ended = outbox.until_ended(3)
    assert ended == {0: EndReason.LENGTH, 1: EndReason.FAILED, 2: EndReason.LENGTH}
    for id in (0, 2):
        assert tokens[id] == expected_tokens([id, 5, 7], 6, VOCAB_SIZE)
    assert outbox.loads[-1].blocks_free + outbox.loads[-1].blocks_evictable == 64
    loop.stop()
    loop.join(5)


def test_a_device_that_fails_everything_ends_the_loop_and_tells_why() -> None:
    scheduler = Scheduler(BlockPool(64, 4), max_num_seqs=8, token_budget=32, max_model_len=100, clock=time.monotonic)
    ended = threading.Event()
    loop = EngineLoop(scheduler, PoisonedRunner({0, 1}), Outbox(), on_end=ended.set)
    for id in range(2):
        loop.inbox.put(Add(sequence(id, [1], 5)))
    loop.start()  # only now, so that one step takes both
    assert ended.wait(5.0)
    assert isinstance(loop.failure, FloatingPointError)


def test_all_chunks_failing_alone_is_the_devices_fault() -> None:
    runner = PoisonedRunner({0, 1})
    seqs = [sequence(id, [1], 5) for id in range(2)]
    for seq in seqs:
        seq.blocks, seq.state = [seq.id], State.RUNNING
    with pytest.raises(FloatingPointError):
        compute_one_by_one(runner, StepPlan([Chunk(seq, 0, 1, True) for seq in seqs]))


def test_an_idle_loop_takes_no_step_and_wakes_for_a_message() -> None:
    loop, outbox, _ = started_loop(poisoned=set())
    time.sleep(0.05)
    assert [load.counters.steps for load in outbox.loads] == [0], "its load at the start, and nothing more"
    loop.inbox.put(Add(sequence(7, [1, 2], 3)))
    tokens, _ = outbox.until_ended(1)
    assert tokens[7] == expected_tokens([1, 2], 3, VOCAB_SIZE)
    loop.inbox.put(Abort([7]))
    loop.stop()
    loop.join(5)
    assert not loop.is_alive()


def test_a_queued_deadline_wakes_an_idle_loop() -> None:
    scheduler = Scheduler(BlockPool(4, 4), max_num_seqs=1, token_budget=8, max_model_len=16, clock=time.monotonic)
    outbox = Outbox()
    loop = EngineLoop(scheduler, synthetic_runner(4, 4), outbox, on_end=lambda: None)
    seq = sequence(0, [1, 2], 3, deadline=time.monotonic() - 1.0)
    loop.start()
    loop.inbox.put(Add(seq))
    _, ended = outbox.until_ended(1)
    assert ended == {0: EndReason.DEADLINE}
    loop.stop()
    loop.join(5)


def test_the_loop_runs_on_the_thread_that_loaded_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's libraries keep handles and memory for each thread."""
    threads, load, run = [], main.load_runner, EngineLoop.run

    def watched_load(*args: Any) -> Any:
        threads.append(threading.get_ident())
        return load(*args)

    def watched_run(loop: EngineLoop) -> None:
        threads.append(threading.get_ident())
        loop.stop()
        run(loop)

    monkeypatch.setattr(main, "load_runner", watched_load)
    monkeypatch.setattr(EngineLoop, "run", watched_run)
    assert main.run(EngineConfig("synthetic", listen=f"unix:{tmp_path}/engine")) == 0
    assert threads[0] == threads[1] != threading.get_ident()


def test_a_mistake_in_the_settings_is_one_line_though_another_thread_finds_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise ConfigError("--block-size is wrong")

    monkeypatch.setattr(main, "load_runner", fails)
    assert main.run(EngineConfig("synthetic")) == EXIT_CONFIG
    assert capsys.readouterr().err == "error: --block-size is wrong\n"


def test_a_flood_of_long_prompts_is_taken_in_over_several_steps() -> None:
    inbox, length = Inbox(), 30_000
    arriving = [Add(sequence(id, [7] * length, 1)) for id in range(12)]
    for message in (*arriving, Abort([0]), Stop()):
        inbox.put(message)
    taken = []
    while not taken or taken[-1][-1] != Stop():
        taken.append(inbox.take())
    assert [message for messages in taken for message in messages] == [*arriving, Abort([0]), Stop()]
    assert max(map(len, taken)) <= -(-MOST_ADDED // length)

"""Scheduler and blocks under arbitrary sequences of operations, in simulated time; every invariant after every step."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.schedules import ScheduleName
from engine.sequence import EndReason
from tests.engine.harness import SteppedEngine

MAX_MODEL_LEN = 60
# Few different prompts, sharing prefixes, so that the cache is hit often.
prompts = st.builds(
    lambda head, length: [(head * 13 + at // 2) % 256 for at in range(length)],
    st.integers(0, 2),
    st.integers(1, MAX_MODEL_LEN - 1),
)


class SchedulerMachine(RuleBasedStateMachine):
    schedule: ScheduleName = "continuous"

    def __init__(self) -> None:
        super().__init__()
        # Small enough that sequences are preempted, large enough for any one of them.
        self.engine = SteppedEngine(
            num_blocks=20,
            block_size=4,
            max_num_seqs=6,
            token_budget=11,
            max_model_len=MAX_MODEL_LEN,
            schedule=self.schedule,
        )
        self.seqs = []

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 30),
        priority=st.integers(-1, 1),
        timeout_s=st.sampled_from([float("inf"), 1.0, 20.0]),
        salt=st.sampled_from(["", "a"]),
        bypass=st.booleans(),
    )
    def add(self, prompt, max_tokens, priority, timeout_s, salt, bypass):
        self.seqs.append(
            self.engine.add(prompt, max_tokens, priority=priority, timeout_s=timeout_s, salt=salt, bypass=bypass)
        )

    @rule(count=st.integers(1, 12))
    def steps(self, count):
        for _ in range(count):
            plan = self.engine.step()
            assert plan.num_tokens <= 11
            assert len(plan.chunks) <= 6
            running = self.engine.scheduler.running
            assert plan.chunks or not (running or self.engine.scheduler.waiting), "work waits, and nobody works"

    @rule(data=st.data())
    def abort(self, data):
        if self.seqs:
            self.engine.abort(data.draw(st.sampled_from(self.seqs)).id)

    @rule()
    def flush_cache(self):
        self.engine.scheduler.flush_cache()

    @invariant()
    def everything_is_accounted_for(self):
        self.engine.scheduler.check_integrity()

    @invariant()
    def no_token_is_wrong(self):
        for seq in self.seqs:
            got = self.engine.outputs[seq.id]
            assert got == self.engine.expected(seq)[: len(got)]

    def teardown(self):
        self.engine.run()
        assert self.engine.pool.num_referenced == 0
        for seq in self.seqs:
            ended = self.engine.ended[seq.id]
            if ended.reason is EndReason.LENGTH:
                limit = min(seq.params.max_tokens, MAX_MODEL_LEN - seq.prompt_len)
                assert self.engine.outputs[seq.id] == self.engine.expected(seq)[:limit]


class SequentialMachine(SchedulerMachine):
    schedule = "sequential"


class InterleavedMachine(SchedulerMachine):
    schedule = "interleaved"


class StaticMachine(SchedulerMachine):
    schedule = "static"


TestContinuous = SchedulerMachine.TestCase
TestContinuous.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestSequential = SequentialMachine.TestCase
TestInterleaved = InterleavedMachine.TestCase
TestStatic = StaticMachine.TestCase
for case in (TestSequential, TestInterleaved, TestStatic):
    case.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

"""An engine without threads or sockets: a scheduler and a synthetic runner, stepped by hand in simulated time."""

from __future__ import annotations

import itertools
import math

from engine.blocks import BlockPool, chain_root
from engine.runner_info import KVCacheSpec, RunnerInfo
from engine.scheduler import Scheduler
from engine.schedules import ScheduleName
from engine.sequence import SamplingParams, Sequence, StepPlan
from engine.step_output import Ended
from engine.steps_in_flight import StepsInFlight
from engine.synthetic import SyntheticRunner, expected_tokens

VOCAB_SIZE = 258


def synthetic_runner(num_blocks: int, block_size: int, lookahead: int = 0) -> SyntheticRunner:
    spec = KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=1, element_bytes=4, block_size=block_size)
    info = RunnerInfo(
        model="synthetic",
        architecture="synthetic",
        device="cpu",
        dtype="int64",
        kernel_backend="none",
        vocab_size=VOCAB_SIZE,
        max_model_len=32_768,
        weight_bytes=0,
        kv_cache=spec,
        num_blocks=num_blocks,
    )
    return SyntheticRunner(info, lookahead=lookahead)


class SteppedEngine:
    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        token_budget: int = 16,
        max_model_len: int = 200,
        prefix_caching: bool = True,
        schedule: ScheduleName = "continuous",
        lookahead: int = 0,
    ) -> None:
        self.now = 0.0
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            token_budget=token_budget,
            max_model_len=max_model_len,
            prefix_caching=prefix_caching,
            clock=lambda: self.now,
            schedule=schedule,
        )
        self.runner = synthetic_runner(num_blocks, block_size, lookahead)
        self.steps = StepsInFlight(self.scheduler, self.runner)
        self.outputs: dict[int, list[int]] = {}
        self.ended: dict[int, Ended] = {}
        self._ids = itertools.count()

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        priority: int = 0,
        timeout_s: float = math.inf,
        salt: str = "",
        bypass: bool = False,
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> Sequence:
        seq = Sequence(
            id=next(self._ids),
            tokens=list(prompt),
            prompt_len=len(prompt),
            params=SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_token_ids),
            arrived=self.now,
            deadline=self.now + timeout_s,
            priority=priority,
            cache_root=chain_root(salt),
            bypass_cache=bypass,
        )
        self.outputs[seq.id] = []
        self.scheduler.add(seq)
        self._take_output()
        return seq

    def abort(self, *ids: int) -> None:
        self.scheduler.abort(ids)
        self._take_output()

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        if not plan.is_empty:
            self.steps.launch(plan)
        if len(self.steps) > (0 if plan.is_empty else self.runner.lookahead):
            self.steps.commit_oldest()
        self._take_output()
        self.now += 1.0
        self.scheduler.check_integrity()
        return plan

    def run(self, limit: int = 10_000) -> int:
        """Steps until nothing is left to do; the number of steps."""
        for count in range(limit):
            was_busy = len(self.steps) > 0
            if self.step().is_empty and not was_busy:
                return count
        raise AssertionError(f"still at work after {limit} steps")

    def expected(self, seq: Sequence) -> list[int]:
        return expected_tokens(seq.tokens[: seq.prompt_len], seq.params.max_tokens, VOCAB_SIZE)

    def _take_output(self) -> None:
        output = self.scheduler.take_output()
        self.steps.trace.note(output)
        for id, token in zip(output.sequences, output.tokens, strict=True):
            assert id not in self.ended, f"a token for sequence {id} after its end"
            self.outputs[id].append(token)
        for ended in output.ended:
            assert ended.seq.id not in self.ended, f"sequence {ended.seq.id} ended twice"
            self.ended[ended.seq.id] = ended

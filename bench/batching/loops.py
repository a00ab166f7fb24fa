"""Loops that serve the same requests on the same machine and differ in which requests share a step.

All of them run the engine's own scheduler. Continuous batching is the scheduler alone: requests join and leave at every
step. A static batch is the scheduler with requests that are all as long as the longest: prompts are padded, and a
member that has what it asked for keeps its row until the batch ends. Its further tokens are dropped.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from bench.measure import RequestTimes, Run
from bench.workloads import Request
from pagoda_server.engine.core.sequence import Request as Prompt
from pagoda_server.engine.core.sequence import SamplingParams
from pagoda_server.engine.core.sequence import Sequence as Tokens
from pagoda_server.engine.core.step import Sampled, StepPlan
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.runners.load import InformedRunner
from pagoda_server.engine.scheduling.scheduler import Scheduler
from pagoda_server.engine.timing.cost_model import StepLoad, StepTimeFilter

TOKEN_BUDGET = 512
BLOCK_SIZE = 16
MANY_TOKENS = 1 << 19  # more than any batch here needs


class Simulated:
    """A machine whose steps take what a cost model predicts, in simulated time.

    num_tokens  that its KV cache holds
    """

    def __init__(self, costs: StepTimeFilter, num_tokens: int = MANY_TOKENS) -> None:
        self._costs = costs
        self.pool = BlockPool(num_tokens // BLOCK_SIZE, BLOCK_SIZE)
        self.now = 0.0

    def compute(self, plan: StepPlan) -> Sampled:
        self.now += self._costs.predict(StepLoad.of_chunks(plan.chunks, plan.num_tokens))
        return Sampled([0 if chunk.samples else -1 for chunk in plan.chunks], [None] * len(plan.chunks))

    def wait_until(self, moment: float) -> None:
        self.now = max(self.now, moment)


class Real:
    """The engine's runner, in real time from the moment when this is made."""

    def __init__(self, runner: InformedRunner) -> None:
        self._runner = runner
        self.pool = BlockPool(runner.info.num_blocks, runner.info.kv_cache.block_size)
        self._began = time.perf_counter()

    @property
    def now(self) -> float:
        return time.perf_counter() - self._began

    def compute(self, plan: StepPlan) -> Sampled:
        return self._runner.launch(plan).result()

    def wait_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self.now))


Machine: TypeAlias = Simulated | Real
Loop: TypeAlias = Callable[[Machine, Sequence[Request], int], Run]


def continuous(
    machine: Machine,
    requests: Sequence[Request],
    size: int,
    *,
    token_budget: int = TOKEN_BUDGET,
    watch: Callable[[Scheduler], None] = lambda scheduler: None,
) -> Run:
    """Requests join and leave the batch at every step (Orca, Yu et al., 2022): the scheduler as a server has it.

    size   sequences that run at once, at most
    watch  is called after each step
    """
    scheduler = Scheduler(
        machine.pool,
        max_num_seqs=size,
        token_budget=token_budget,
        max_model_len=machine.pool.num_blocks * machine.pool.block_size,
        clock=lambda: machine.now,
        prefix_caching=False,
    )
    coming = deque(sorted(enumerate(requests), key=lambda each: each[1].arrival_s))
    times = [RequestTimes(request.arrival_s, []) for request in requests]
    while True:
        while coming and coming[0][1].arrival_s <= machine.now:
            number, request = coming.popleft()
            prompt = Prompt(len(request.prompt), arrived=request.arrival_s)
            scheduler.add(Tokens(number, [*request.prompt], prompt, SamplingParams(max_tokens=request.output_len)))
        plan = scheduler.schedule()
        if not plan.is_empty:
            scheduler.commit(plan, machine.compute(plan))
            for number in scheduler.take_output().sequences:
                times[number].arrivals.append(machine.now)
            watch(scheduler)
        elif coming:
            machine.wait_until(coming[0][1].arrival_s)
        else:
            return Run(times, scheduler.counters.steps)


def dynamic(machine: Machine, requests: Sequence[Request], size: int, wait_s: float) -> Run:
    """Static batches of what has come when one is full, or when its oldest request has waited for `wait_s`."""
    waiting = sorted(requests, key=lambda request: request.arrival_s)
    times, steps = [], 0
    while waiting:
        last = waiting[min(size, len(waiting)) - 1]
        machine.wait_until(min(last.arrival_s, waiting[0].arrival_s + wait_s))
        batch = [request for request in waiting[:size] if request.arrival_s <= machine.now]
        del waiting[: len(batch)]
        longest = max(len(request.prompt) for request in batch)
        padded = Request([0] * longest, max(request.output_len for request in batch), machine.now)
        budget = max(TOKEN_BUDGET, len(batch) * longest)  # all prompts are computed in one step
        run = continuous(machine, [padded] * len(batch), len(batch), token_budget=budget)
        steps += run.steps or 0
        for request, row in zip(batch, run.times, strict=True):
            times.append(RequestTimes(request.arrival_s, row.arrivals[: request.output_len]))
    return Run(times, steps)


def static(machine: Machine, requests: Sequence[Request], size: int) -> Run:
    """Full batches in the order of arrival. Requests that arrive together keep their order."""
    return dynamic(machine, requests, size, math.inf)


def grouped(by: Callable[[Request], int]) -> Loop:
    """Return a loop that makes static batches of requests that are alike."""
    return lambda machine, requests, size: static(machine, sorted(requests, key=by), size)


LOOPS: dict[str, Loop] = {
    "one by one": lambda machine, requests, size: static(machine, requests, 1),
    "static": static,
    "static, grouped by prompt": grouped(lambda request: len(request.prompt)),
    "static, grouped by output": grouped(lambda request: request.output_len),
    "continuous": continuous,
}

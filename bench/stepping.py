"""The engine's own scheduler and runner, stepped in this process, with a record of what every step did."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from bench.measure import RequestTimes, Run
from bench.workloads import Workload
from pagoda_server.engine.core.sequence import Chunk, SamplingParams, Sequence, State, StepPlan
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.runners.load import InformedRunner
from pagoda_server.engine.scheduling.scheduler import Scheduler
from pagoda_server.engine.scheduling.schedules import ScheduleName

TOKEN_BUDGET = 512


class Work(Enum):
    """What a step did for the sequence in a slot."""

    PREFILL = "prefill"
    DECODE = "decode"
    PADDING = "padding"
    HELD = "held"  # nothing, but the sequence keeps the slot


@dataclass(frozen=True, slots=True)
class Cell:
    """`request`: its number in the workload."""

    slot: int
    request: int
    work: Work


@dataclass(frozen=True, slots=True)
class Recording:
    """One mode's run of a workload. `steps`: for each step, the slots that were taken; `run`: as through gRPC."""

    schedule: ScheduleName
    max_num_seqs: int
    steps: list[list[Cell]]
    run: Run

    @property
    def num_slots(self) -> int:
        return 1 + max(cell.slot for cells in self.steps for cell in cells)

    @property
    def slot_use(self) -> float:
        """Output tokens ÷ (steps × the places that the batch has): the share of rows that were worth something."""
        return self.run.output_tokens / (len(self.steps) * self.max_num_seqs)


def record(
    runner: InformedRunner,
    workload: Workload,
    schedule: ScheduleName,
    max_num_seqs: int,
    on_tokens: Callable[[int], None],
) -> Recording:
    """Runs a workload whose requests are all there at once, to its end."""
    scheduler = Scheduler(
        BlockPool(runner.info.num_blocks, runner.info.kv_cache.block_size),
        max_num_seqs=max_num_seqs,
        token_budget=TOKEN_BUDGET,
        max_model_len=runner.info.max_model_len,
        prefix_caching=False,
        clock=time.monotonic,
        schedule=schedule,
    )
    for number, request in enumerate(workload.requests):
        scheduler.add(_sequence(number, request.prompt, request.output_len))
    slots = _Slots()
    steps: list[list[Cell]] = []
    arrivals: list[list[float]] = [[] for _ in workload.requests]
    started = time.perf_counter()
    while not (plan := scheduler.schedule()).is_empty:
        steps.append(slots.cells(scheduler.running, plan))
        scheduler.commit(plan, runner.launch(plan).result())
        output = scheduler.take_output()
        now = time.perf_counter() - started
        for id in output.sequences:
            arrivals[id].append(now)
        on_tokens(len(output.tokens))
    times = [RequestTimes(0.0, of_request) for of_request in arrivals]
    return Recording(schedule, max_num_seqs, steps, Run(times, len(steps)))


def _sequence(number: int, prompt: list[int], output_len: int) -> Sequence:
    params = SamplingParams(max_tokens=output_len)
    return Sequence(number, list(prompt), len(prompt), params, arrived=0.0, deadline=math.inf, bypass_cache=True)


class _Slots:
    """Gives a sequence the first free slot when it starts, for as long as it runs."""

    def __init__(self) -> None:
        self._slot_of: dict[int, int] = {}

    def cells(self, running: list[Sequence], plan: StepPlan) -> list[Cell]:
        """What the step is about to do. A filler, which has no id, pads the sequence whose blocks it borrows."""
        self._slot_of = {seq.id: self._slot_of[seq.id] for seq in running if seq.id in self._slot_of}
        free = iter(sorted(set(range(len(running))) - set(self._slot_of.values())))
        for seq in running:
            if seq.id not in self._slot_of:
                self._slot_of[seq.id] = next(free)
        owners = {seq.blocks[-1]: seq.id for seq in running}
        computed = {owners[chunk.seq.blocks[-1]]: _work(chunk) for chunk in plan.chunks}
        return [Cell(self._slot_of[seq.id], seq.id, computed.get(seq.id, Work.HELD)) for seq in running]


def _work(chunk: Chunk) -> Work:
    if chunk.seq.state is not State.RUNNING:
        return Work.PADDING
    return Work.PREFILL if chunk.start < chunk.seq.prompt_len else Work.DECODE

"""`python -m bench.micro.crowds`: time of schedule() with thousands waiting, all of them in time, late or lost.

256 sequences decode and 10,000 wait, in simulated time. Three places become free in the first measured step, so that
the scheduler looks at the queue. Times are the thread's CPU time, so other work on the machine does not count.
"""

from __future__ import annotations

import gc
import math
import time
from statistics import median
from typing import Annotated, Literal, TypeAlias

import typer
from rich.console import Console
from rich.table import Table

from pagoda_server.engine.core.sequence import Request, SamplingParams, Sequence
from pagoda_server.engine.core.step import Sampled
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.scheduling.policies import POLICIES
from pagoda_server.engine.scheduling.scheduler import Scheduler
from pagoda_server.settings.engine import PolicyName

RUNNING = 256
STEP_S = 0.02
Crowd: TypeAlias = Literal["timely", "late", "lost"]


class Engine:
    """A scheduler in simulated time. A running sequence keeps its place unless it is aborted."""

    def __init__(self, policy: PolicyName) -> None:
        self.now = 0.0
        self.scheduler = Scheduler(
            BlockPool(64 * RUNNING, 16),
            max_num_seqs=RUNNING,
            token_budget=512,
            max_model_len=600,
            clock=lambda: self.now,
            policy=policy,
            target_itl_s=2 * STEP_S,
        )
        self.count = 0

    def add(self, timeout_s: float = math.inf, ttft_s: float = math.inf) -> None:
        id, self.count = self.count, self.count + 1
        tokens = [(7 * id + at) % 1000 for at in range(32)]
        params = SamplingParams(max_tokens=500)
        seq = Sequence(
            id, tokens, Request(len(tokens), arrived=self.now, deadline=self.now + timeout_s, ttft_s=ttft_s), params
        )
        self.scheduler.add(seq)

    def step(self) -> float:
        """Run a step; return the milliseconds that schedule() took."""
        started = time.thread_time()
        plan = self.scheduler.schedule()
        spent = time.thread_time() - started
        self.now += STEP_S
        tokens = [7 if chunk.samples else -1 for chunk in plan.chunks]
        self.scheduler.commit(plan, Sampled(tokens, [None] * len(tokens)))
        self.scheduler.take_output()
        return 1e3 * spent


def measure(policy: PolicyName, crowd: Crowd, waiting: int, steps: int) -> tuple[float, float]:
    """Return milliseconds of the first step in which the crowd is in that state, and the median of later steps."""
    engine = Engine(policy)
    for _ in range(RUNNING):
        engine.add()
    for _ in range(40):
        engine.step()
    for _ in range(waiting):
        engine.add(timeout_s=1.0 if crowd == "lost" else math.inf, ttft_s=1.0 if crowd == "late" else math.inf)
    gc.collect()
    gc.freeze()  # as the engine does: a full collection is not part of a step
    for _ in range(5):
        engine.step()
    engine.now += 2.0
    engine.scheduler.abort([seq.id for seq in engine.scheduler.running[:3]])
    first = engine.step()
    return first, median(engine.step() for _ in range(steps))


def main(
    waiting: Annotated[int, typer.Option(help="Waiting sequences.")] = 10_000,
    steps: Annotated[int, typer.Option(help="Later steps; the table gives their median.")] = 60,
    repeat: Annotated[int, typer.Option(help="Number of runs; the table gives medians.")] = 5,
) -> None:
    table = Table("policy", "waiting sequences are", "first step ms", "later steps ms", box=None)
    crowds: tuple[Crowd, ...] = ("timely", "late", "lost")
    for policy in POLICIES:
        for crowd in crowds:
            runs = [measure(policy, crowd, waiting, steps) for _ in range(repeat)]
            first, after = (median(column) for column in zip(*runs, strict=True))
            table.add_row(policy, crowd, f"{first:.2f}", f"{after:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)

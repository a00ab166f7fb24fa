"""`python -m bench.micro.crowds`: what schedule() takes with thousands waiting, also when all are late or lost at once.

256 sequences decode and 10,000 wait, in simulated time. Three places become free in the first step that is measured, so
that the queue is looked at. Times are those that the thread was computing: others on the machine do not count.
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

from pagoda_server.engine.core.sequence import Sampled, SamplingParams, Sequence
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.scheduling.policies import POLICIES
from pagoda_server.engine.scheduling.scheduler import Scheduler
from pagoda_server.settings.engine import PolicyName

RUNNING = 256
STEP_S = 0.02
Crowd: TypeAlias = Literal["timely", "late", "lost"]


class Engine:
    """Whoever has a place keeps it, except those who are aborted."""

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
        seq = Sequence(id, tokens, len(tokens), params, self.now, self.now + timeout_s, ttft_s=ttft_s)
        self.scheduler.add(seq)

    def step(self) -> float:
        """Milliseconds that schedule() takes."""
        started = time.thread_time()
        plan = self.scheduler.schedule()
        spent = time.thread_time() - started
        self.now += STEP_S
        tokens = [7 if chunk.samples else -1 for chunk in plan.chunks]
        self.scheduler.commit(plan, Sampled(tokens, [None] * len(tokens)))
        self.scheduler.take_output()
        return 1e3 * spent


def measure(policy: PolicyName, crowd: Crowd, waiting: int, steps: int) -> tuple[float, float]:
    """Milliseconds of the first step after they have become what they are, and the median of those after it."""
    engine = Engine(policy)
    for _ in range(RUNNING):
        engine.add()
    for _ in range(40):
        engine.step()
    for _ in range(waiting):
        engine.add(timeout_s=1.0 if crowd == "lost" else math.inf, ttft_s=1.0 if crowd == "late" else math.inf)
    gc.collect()
    gc.freeze()  # as the engine does: a collection of everything is no part of a step
    for _ in range(5):
        engine.step()
    engine.now += 2.0
    engine.scheduler.abort([seq.id for seq in engine.scheduler.running[:3]])
    first = engine.step()
    return first, median(engine.step() for _ in range(steps))


def main(
    waiting: Annotated[int, typer.Option(help="Sequences that wait.")] = 10_000,
    steps: Annotated[int, typer.Option(help="Of which the median is told.")] = 60,
    repeat: Annotated[int, typer.Option(help="Runs, of which the median is told.")] = 5,
) -> None:
    table = Table("policy", "all that wait are", "first step ms", "steps after it ms", box=None)
    crowds: tuple[Crowd, ...] = ("timely", "late", "lost")
    for policy in POLICIES:
        for crowd in crowds:
            runs = [measure(policy, crowd, waiting, steps) for _ in range(repeat)]
            first, after = (median(column) for column in zip(*runs, strict=True))
            table.add_row(policy, crowd, f"{first:.2f}", f"{after:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)

"""`python -m bench.micro.bookkeeping`: host time of a step around the model, in microseconds.

Every sequence decodes one token per step, without a model. The parts are those of engine/loop/loop.py: schedule, pack
(fill the arrays of a recorded step), commit (with take_output), trace (record the step), load (take a snapshot),
deliver (to the router's pending output), and encode (that output to bytes).
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import control_pb2
from pagoda_server.engine.core.step import Sampled, StepPlan
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.loop.loop import Add, EngineLoop
from pagoda_server.engine.loop.step_trace import StepTrace
from pagoda_server.engine.loop.steps_in_flight import Computed
from pagoda_server.engine.runners.cpu.recorded_steps import DecodeArrays
from pagoda_server.engine.scheduling.scheduler import Scheduler
from pagoda_server.engine.serving.server import EngineServer
from pagoda_server.settings.engine import EngineConfig

BLOCK_SIZE = EngineConfig("any").tokens_a_block("cpu")
PARTS = ("schedule", "pack", "commit", "trace", "load", "deliver", "encode")


class NoModel:
    """A runner that returns, at once, a token that ends no sequence."""

    lookahead = 0

    def recover(self) -> None: ...

    def launch(self, plan: StepPlan) -> Computed:
        count = len(plan.chunks)
        return Computed(Sampled([7] * count, [None] * count))


def submit(number: int, prompt_len: int) -> engine_pb2.Submit:
    prompt = [(number * 31 + at) % 1000 for at in range(prompt_len)]
    return engine_pb2.Submit(first_sequence=number, prompt=prompt, max_tokens=1 << 20, stop_token_ids=[2])


def add_submitted(loop: EngineLoop, scheduler: Scheduler) -> None:
    for message in loop.inbox.take():
        assert isinstance(message, Add)
        scheduler.add(message.seq)


async def measure(num_seqs: int, context_len: int, steps: int, waiting: int) -> dict[str, float]:
    """Return the median microseconds of each part."""
    blocks_each = -(-(context_len + steps + 64) // BLOCK_SIZE)
    scheduler = Scheduler(
        BlockPool(num_seqs * blocks_each + 1, BLOCK_SIZE),
        max_num_seqs=num_seqs,
        token_budget=num_seqs * context_len + 1,
        max_model_len=context_len + steps + 64,
        clock=time.monotonic,
        target_itl_s=EngineConfig("any").target_itl_s,
    )
    runner, server = NoModel(), EngineServer(control_pb2.EngineInfo())
    loop = EngineLoop(scheduler, runner, server, on_end=lambda: None)  # never started: this function calls each part
    server.attach(loop.inbox)
    connection = server.connect()
    for number in range(num_seqs):  # lengths differ, so that not all sequences need a block in the same step
        server.submit(connection, submit(number, context_len - number % BLOCK_SIZE))
    add_submitted(loop, scheduler)
    scheduler.commit(plan := scheduler.schedule(), runner.launch(plan).result())
    scheduler.take_output()
    for number in range(num_seqs, num_seqs + waiting):
        server.submit(connection, submit(number, 32))
    add_submitted(loop, scheduler)

    longest = context_len + steps + 64
    trace = StepTrace(scheduler)
    arrays = DecodeArrays(num_seqs, longest, BLOCK_SIZE)

    spent: dict[str, list[float]] = defaultdict(list)
    for _ in range(steps):
        started = time.perf_counter()
        plan = scheduler.schedule()
        scheduled = time.perf_counter()
        arrays.fill(plan.chunks)
        packed = time.perf_counter()
        sampled = runner.launch(plan).result()
        executed = time.perf_counter()
        scheduler.commit(plan, sampled)
        output = scheduler.take_output()
        committed = time.perf_counter()
        trace.add(trace.sketch(plan), started, executed)
        trace.note(output)
        traced = time.perf_counter()
        load = loop.load()
        loaded = time.perf_counter()
        server.deliver(output, load)
        delivered = time.perf_counter()
        connection.take().SerializeToString()
        encoded = time.perf_counter()
        assert len(plan.chunks) == len(output.tokens) == num_seqs
        spent["schedule"].append(scheduled - started)
        spent["pack"].append(packed - scheduled)
        spent["commit"].append(committed - executed)
        spent["trace"].append(traced - committed)
        spent["load"].append(loaded - traced)
        spent["deliver"].append(delivered - loaded)
        spent["encode"].append(encoded - delivered)
    return {part: median(times) * 1e6 for part, times in spent.items()}


def main(
    steps: Annotated[int, typer.Option(help="Measured steps per row.")] = 400,
    waiting: Annotated[int, typer.Option(help="Waiting sequences in the third row of each size.")] = 10_000,
) -> None:
    table = Table("sequences", "context", "waiting", *PARTS, "sum", box=None)
    for num_seqs in (1, 64, 256):
        for context_len, queued in ((128, 0), (2048, 0), (128, waiting)):
            parts = asyncio.run(measure(num_seqs, context_len, steps, queued))
            cells = [f"{parts[part]:.0f}" for part in PARTS] + [f"{sum(parts.values()):.0f}"]
            table.add_row(str(num_seqs), str(context_len), str(queued), *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)

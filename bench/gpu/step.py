"""The whole decode step: the engine's own loop on a model with random weights, at several batch sizes."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
from torch.profiler import ProfilerActivity, profile

from bench.gpu.attention import TINY
from bench.gpu.random_model import write_model
from bench.gpu.rows import Bar, Bench, Row, explain
from pagoda_server.checkpoints.progress import no_progress
from pagoda_server.engine.core.sequence import Request, SamplingParams, Sequence
from pagoda_server.engine.core.step import Sampled, StepOutput, StepPlan
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.loop.loop import Abort, Add, EngineLoop, LoadSnapshot
from pagoda_server.engine.loop.steps_in_flight import Launched
from pagoda_server.engine.runners.load import InformedRunner, load_runner
from pagoda_server.engine.runners.runner_info import RunnerInfo
from pagoda_server.engine.scheduling.scheduler import Scheduler
from pagoda_server.kernels.triton.inputs import LLAMA_1B, LLAMA_8B, ModelShape
from pagoda_server.settings.engine import EngineConfig

PART = "decode step"
SKIPPED, MEASURED = 8, 32  # steps per batch size
GROWTH = 512  # tokens by which a context may grow while others are computed and the first batch is measured
MAX_TOKENS = 16 * GROWTH  # no sequence may end before all batches are measured
TOKEN_BUDGET = 8192
POLL_S = 0.002
LONGEST_WAIT_S = 100.0
IDLE_WINDOW_S = 0.1
EIGHT_B_BAR, ONE_B_BAR = Bar(fraction=0.8), Bar(fraction=0.65)


@dataclass(frozen=True, slots=True)
class Series:
    """Batch sizes in falling order: prompts are computed once, and sequences leave as the batch shrinks."""

    context: int
    batches: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Done:
    """A finished step: its sequences and tokens, when its result arrived, and how long the host waited for it."""

    num_seqs: int
    num_tokens: int
    ended: float
    waited: float


class _WatchedStep:
    def __init__(self, launched: Launched, plan: StepPlan, done: list[_Done]) -> None:
        self._launched = launched
        self._plan = plan
        self._done = done

    def result(self) -> Sampled:
        started = time.perf_counter()
        sampled = self._launched.result()
        ended = time.perf_counter()
        self._done.append(_Done(len(self._plan.chunks), self._plan.num_tokens, ended, ended - started))
        return sampled


class WatchedRunner:
    """A runner that records its steps."""

    def __init__(self, runner: InformedRunner) -> None:
        self._runner = runner
        self.done: list[_Done] = []

    @property
    def lookahead(self) -> int:
        return self._runner.lookahead

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    def launch(self, plan: StepPlan) -> _WatchedStep:
        return _WatchedStep(self._runner.launch(plan), plan, self.done)

    def recover(self) -> None:
        self._runner.recover()


class _NoOutbox:
    def send(self, output: StepOutput, load: LoadSnapshot) -> None:
        pass


def rows(bench: Bench, shape: ModelShape) -> Iterator[Row]:
    """Yield one row per context and batch, also for a batch that does not fit on the card."""
    if bench.is_small:
        shape, every = TINY, [Series(24, (3, 1))]
    else:
        every = [Series(1024, (256, 128, 32, 1)), Series(8192, (128, 32, 1))]
    logging.getLogger("pagoda.engine").setLevel(logging.ERROR)
    if bench.device.type == "cuda":
        with suppress(Exception):  # without a profiler, idle time is unknown
            start_profiler()
    with TemporaryDirectory() as folder:
        write_model(Path(folder), shape, max_positions=max(series.context for series in every) + MAX_TOKENS)
        config = EngineConfig(
            folder,
            device=bench.device.type,  # type: ignore[arg-type]
            dtype="bfloat16",
            quantization="none",
            max_num_seqs=max(every[0].batches),
            token_budget=64 if bench.is_small else TOKEN_BUDGET,
            kv_cache_gb=0.01 if bench.is_small else None,
            prefix_caching=False,
        )
        runner = WatchedRunner(load_runner(config, Path(folder), no_progress))
    numbers = itertools.count()  # unique over the runner's life
    for series in every:
        yield from _measure(series, numbers, runner, shape, bench)


def _measure(
    series: Series,
    numbers: Iterator[int],
    runner: WatchedRunner,
    shape: ModelShape,
    bench: Bench,
) -> Iterator[Row]:
    scheduler = Scheduler(
        BlockPool(runner.info.num_blocks, runner.info.kv_cache.block_size),
        max_num_seqs=runner.info.limits.max_num_seqs,
        token_budget=runner.info.limits.token_budget,
        max_model_len=runner.info.max_model_len,
        prefix_caching=False,
        clock=time.monotonic,
    )
    room = runner.info.token_capacity // (series.context + GROWTH)
    for batch in series.batches:
        if batch > room:
            yield Row(PART, _case(shape, batch, series.context), error=f"the KV cache holds {room} such contexts")
    batches = [batch for batch in series.batches if batch <= room]
    sequences = [_sequence(next(numbers), series.context, shape.vocab_size) for _ in range(max(batches, default=0))]
    loop = EngineLoop(scheduler, runner, _NoOutbox(), on_end=lambda: None, lookahead=runner.lookahead)
    loop.start()
    try:
        started = time.perf_counter()
        for seq in sequences:
            loop.inbox.put(Add(seq))
        for at, batch in enumerate(batches):
            loop.inbox.put(Abort([seq.id for seq in sequences[batch:]]))
            steps = _decodes(loop, runner, batch)
            kv_tokens = sum(seq.num_tokens for seq in sequences[:batch]) - batch * MEASURED // 2
            row = _row(_case(shape, batch, series.context), batch, kv_tokens, steps, runner.info, shape, bench)
            if at == 0:
                row.figures["prefill tok/s"] = batch * series.context / (steps[0].ended - started)
            yield _with_idle(row, bench)
        loop.inbox.put(Abort([seq.id for seq in sequences]))
        while scheduler.running and loop.is_alive():
            time.sleep(POLL_S)
    finally:
        loop.stop()
        loop.join(timeout=LONGEST_WAIT_S)


def _decodes(loop: EngineLoop, runner: WatchedRunner, batch: int) -> list[_Done]:
    """Wait for steps in which exactly the batch's sequences decode; return the last MEASURED and the one before."""
    since = len(runner.done)
    deadline = time.monotonic() + LONGEST_WAIT_S
    while True:
        steps = runner.done[since:]
        tail = steps[-SKIPPED - MEASURED :]
        if len(tail) == SKIPPED + MEASURED and all(step.num_seqs == step.num_tokens == batch for step in tail):
            return tail[SKIPPED - 1 :]  # the end of the step before is the start of the first
        if loop.failure is not None:
            raise RuntimeError(f"the engine's loop died: {explain(loop.failure)}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {SKIPPED + MEASURED} steps of {batch} decodes within {LONGEST_WAIT_S:.0f} s")
        time.sleep(POLL_S)


def _row(
    case: str, batch: int, kv_tokens: int, steps: list[_Done], info: RunnerInfo, shape: ModelShape, bench: Bench
) -> Row:
    pairs = list(itertools.pairwise(steps))
    step_s = median(after.ended - before.ended for before, after in pairs)
    host_s = median(after.ended - before.ended - after.waited for before, after in pairs)
    layer = sum(math.prod(size) for name, size in shape.projections.items() if name != "head")
    parameters = shape.num_layers * layer + math.prod(shape.projections["head"])
    kv_bytes = kv_tokens * info.kv_cache.bytes_per_token
    limit_s = bench.ceilings.seconds(2.0 * parameters, 2.0 * parameters * batch) + bench.ceilings.seconds(kv_bytes)
    bar = EIGHT_B_BAR if shape is LLAMA_8B else ONE_B_BAR if shape is LLAMA_1B and batch == 1 else None
    return Row(
        PART,
        case,
        time_us=1e6 * step_s,
        rate=batch / step_s,
        unit="tok/s",
        fraction=limit_s / step_s,
        bar=str(bar or ""),
        met=None if bar is None else limit_s / step_s >= (bar.fraction or 0.0),
        figures={"host ms": 1e3 * host_s, "limit tok/s": batch / limit_s},
    )


def _with_idle(row: Row, bench: Bench) -> Row:
    """Add the share of time in which the GPU runs no kernel."""
    if bench.device.type != "cuda":
        return row
    try:
        row.figures["idle %"] = 100 * idle_fraction()
    except Exception as failure:  # the profiler may be forbidden
        return replace(row, error=f"idle time is unknown: {explain(failure)}")
    return row


def start_profiler() -> None:
    """Start the profiler once: its first use takes seconds, and must precede the capture of graphs that it watches."""
    with profile(activities=[ProfilerActivity.CUDA]):
        pass


def idle_fraction() -> float:
    """Profile for a moment; return the idle share of the GPU. Raise the profiler's error if it is not allowed."""
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        time.sleep(IDLE_WINDOW_S)
    spans = sorted(
        (float(event.time_range.start), float(event.time_range.end))
        for event in watched.events()
        if event.device_type.name == "CUDA"
    )
    return 1.0 - busy(spans) / (max(end for _, end in spans) - spans[0][0])


def busy(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of spans, which are in order of their starts."""
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _case(shape: ModelShape, batch: int, context: int) -> str:
    return f"{shape.name}, batch {batch}, context {context}"


def _sequence(number: int, context: int, vocab_size: int) -> Sequence:
    prompt = np.random.default_rng(number).integers(0, vocab_size, context).tolist()
    params = SamplingParams(max_tokens=MAX_TOKENS)
    return Sequence(number, prompt, Request(context, arrived=time.monotonic(), bypass_cache=True), params)

"""The whole step: the engine's own loop on a model with random weights, at several batch sizes, then by kernel."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from bench.gpu.attention import TINY
from bench.gpu.breakdown import Breakdown, Span, profiled
from bench.gpu.random_model import write_model
from bench.gpu.rows import Bar, Bench, Row, explain, failed
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
PREFILL = "prefill tok/s"
SKIPPED, MEASURED = 8, 32  # steps per batch size
GROWTH = 512  # tokens by which a context may grow while others are computed and the first batch is measured
MAX_TOKENS = 16 * GROWTH  # no sequence may end before all batches are measured
TOKEN_BUDGET = 8192
POLL_S = 0.002
LONGEST_WAIT_S = 100.0
PROFILED_S = 0.1  # of decode steps
TIMED_SHARE = 0.6  # of the time limit, after which no further context is begun: the breakdown comes after all timings
DETERMINISTIC_KV_GB = 7.0  # two models of 8 billion parameters and their caches fit on a card of 80 GB
INT4_BYTES = (16 + 2 + 2) / 32  # of a weight in 4 bits: codes, scale and minimum of a group of 32
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
    """Yield one row per context and batch, also for a batch that does not fit on the card, then those of breakdowns."""
    started = time.monotonic()
    if bench.is_small:
        shape, every = TINY, [Series(24, (3, 1)), Series(40, (2,))]
    else:
        every = [Series(1024, (256, 128, 32, 1)), Series(8192, (128, 32, 1))]
    model = _load(bench, shape, every)
    for series in every:
        if time.monotonic() - started > TIMED_SHARE * bench.limit_s:
            yield Row(PART, f"{shape.name}, context {series.context}", error="no time left")
        else:
            yield from _measure(series, model, bench)
    # The profiler slows down whatever runs after its first use.
    try:
        yield from _breakdowns(Series(every[0].context, (min(128, max(every[0].batches)), 1)), model, bench)
    except Exception as failure:  # the profiler may be forbidden
        yield failed("step by kernel", shape.name, failure)


def deterministic_rows(bench: Bench, shape: ModelShape) -> Iterator[Row]:
    """Yield the time of decode steps with --deterministic, beside those without it, and the ratio for prompts."""
    shape, series = (TINY, Series(24, (2,))) if bench.is_small else (shape, Series(1024, (32, 1)))
    found = [
        list(_measure(series, _load(bench, shape, [series], deterministic, DETERMINISTIC_KV_GB), bench))
        for deterministic in (False, True)
    ]
    for default, row in zip(*found, strict=True):
        figures = dict(row.figures)
        if default.time_us and row.time_us:
            figures["÷ default"] = row.time_us / default.time_us
        if PREFILL in figures:
            figures["prefill time ÷ default"] = default.figures[PREFILL] / figures[PREFILL]
        others = {} if default.time_us is None else {"default": default.time_us}
        yield replace(row, part="deterministic", bar="", met=None, others=others, figures=figures)


def int4_rows(bench: Bench, shape: ModelShape) -> Iterator[Row]:
    """Yield the time of decode steps with weights in 4 bits, whose limit is that of their bytes."""
    shape, series = (TINY, Series(24, (3, 1))) if bench.is_small else (shape, Series(1024, (128, 32, 1)))
    model = _load(bench, shape, [series], has_int4_weights=True)
    for row in _measure(series, model, bench):
        yield replace(row, part="decode step, int4", bar="", met=None)


def _load(
    bench: Bench,
    shape: ModelShape,
    every: list[Series],
    deterministic: bool = False,
    kv_cache_gb: float | None = None,
    has_int4_weights: bool = False,
) -> _Model:
    logging.getLogger("pagoda.engine").setLevel(logging.ERROR)
    with TemporaryDirectory() as folder:
        longest = max(series.context for series in every) + MAX_TOKENS
        write_model(Path(folder), shape, max_positions=longest, has_int4_weights=has_int4_weights)
        config = EngineConfig(
            folder,
            device=bench.device.type,  # type: ignore[arg-type]
            dtype="bfloat16",
            quantization="int4" if has_int4_weights else "none",
            deterministic=deterministic,
            max_num_seqs=max(every[0].batches),
            token_budget=64 if bench.is_small else TOKEN_BUDGET,
            kv_cache_gb=0.01 if bench.is_small else kv_cache_gb,
            prefix_caching=False,
        )
        # One thread loads and serves, as in the engine: CUDA's libraries keep handles and memory for each thread.
        thread = ThreadPoolExecutor(1, "engine")
        runner = WatchedRunner(thread.submit(load_runner, config, Path(folder), no_progress).result())
    return _Model(runner, config, shape, thread, itertools.count())


@dataclass(frozen=True, slots=True)
class _Model:
    """
    thread    on which the runner was made, and its loops run
    numbers   of sequences, unique over the runner's life
    """

    runner: WatchedRunner
    config: EngineConfig
    shape: ModelShape
    thread: ThreadPoolExecutor
    numbers: Iterator[int]

    def room(self, context: int) -> int:
        """How many sequences of this length the KV cache holds while they grow."""
        return self.runner.info.token_capacity // (context + GROWTH)

    def sequences(self, count: int, context: int) -> list[Sequence]:
        return [_sequence(next(self.numbers), context, self.shape.vocab_size) for _ in range(count)]

    @contextmanager
    def serving(self, sequences: list[Sequence]) -> Iterator[EngineLoop]:
        """Run the engine's loop; at the end of the block its sequences are aborted, and it stops."""
        info = self.runner.info
        scheduler = Scheduler(
            BlockPool(info.num_blocks, info.kv_cache.block_size),
            max_num_seqs=info.limits.max_num_seqs,
            token_budget=info.limits.token_budget,
            max_model_len=info.max_model_len,
            windows=info.kv_cache.groups.windows,
            prefix_caching=False,
            clock=time.monotonic,
        )
        lookahead = self.runner.lookahead
        loop = EngineLoop(scheduler, self.runner, _NoOutbox(), on_end=lambda: None, lookahead=lookahead)
        ended = self.thread.submit(loop.run)
        try:
            yield loop
            loop.inbox.put(Abort([seq.id for seq in sequences]))
            while scheduler.running and not ended.done():
                time.sleep(POLL_S)
        finally:
            loop.stop()
            ended.result(timeout=LONGEST_WAIT_S)


def _measure(series: Series, model: _Model, bench: Bench) -> Iterator[Row]:
    room = model.room(series.context)
    for batch in series.batches:
        if batch > room:
            case = _case(model.shape, batch, series.context)
            yield Row(PART, case, error=f"the KV cache holds {room} such contexts")
    batches = [batch for batch in series.batches if batch <= room]
    skipped, measured = (2, 4) if bench.is_small else (SKIPPED, MEASURED)
    sequences = model.sequences(max(batches, default=0), series.context)
    with model.serving(sequences) as loop:
        started = time.perf_counter()
        for seq in sequences:
            loop.inbox.put(Add(seq))
        for index, batch in enumerate(batches):
            loop.inbox.put(Abort([seq.id for seq in sequences[batch:]]))
            # The end of the step before is the start of the first.
            steps = _decodes(loop, model.runner, batch, skipped + measured)[skipped - 1 :]
            kv_tokens = sum(seq.num_tokens for seq in sequences[:batch]) - batch * measured // 2
            row = _row(_case(model.shape, batch, series.context), batch, kv_tokens, steps, model, bench)
            if index == 0:
                row.figures[PREFILL] = batch * series.context / (steps[0].ended - started)
            yield row


def _breakdowns(series: Series, model: _Model, bench: Bench) -> Iterator[Row]:
    """Profile the steps that compute the prompts of the largest batch, then decode steps of each batch."""
    batches = [min(batch, model.room(series.context)) for batch in series.batches]
    runner, sequences = model.runner, model.sequences(batches[0], series.context)

    def told(what: str, num_steps: int, spans: list[Span]) -> Row:
        breakdown = Breakdown.of(f"{model.shape.name}, {what}", num_steps, spans)
        breakdown.write(bench.evidence)
        figures = {"steps": float(num_steps), "kernels a step": len(spans) / max(1, num_steps)}
        figures |= {"idle %": 100 * breakdown.idle_fraction, "longest gap µs": breakdown.longest_gap_us}
        time_us = breakdown.window_us / max(1, num_steps)
        return Row("step by kernel", breakdown.what, time_us=time_us, figures=figures)

    with model.serving(sequences) as loop:
        before = len(runner.done)
        with profiled() as spans:
            for seq in sequences:
                loop.inbox.put(Add(seq))
            _decodes(loop, runner, batches[0], 1)
        yield told(f"prefill of {batches[0]} × {series.context}", len(runner.done) - before, spans)
        for batch in batches:
            loop.inbox.put(Abort([seq.id for seq in sequences[batch:]]))
            _decodes(loop, runner, batch, 1 if bench.is_small else SKIPPED)
            before = len(runner.done)
            with profiled() as spans:
                time.sleep(PROFILED_S)
                if bench.is_small:
                    _decodes(loop, runner, batch, 2)
            yield told(f"decode of {batch}, context {series.context}", len(runner.done) - before, spans)


def _decodes(loop: EngineLoop, runner: WatchedRunner, batch: int, count: int) -> list[_Done]:
    """Wait for `count` new steps in a row in which exactly the batch's sequences decode, and return them."""
    since = len(runner.done)
    deadline = time.monotonic() + LONGEST_WAIT_S
    while True:
        tail = runner.done[since:][-count:]
        if len(tail) == count and all(step.num_seqs == step.num_tokens == batch for step in tail):
            return tail
        if loop.failure is not None:
            raise RuntimeError(f"the engine's loop died: {explain(loop.failure)}") from loop.failure
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {count} steps of {batch} decodes within {LONGEST_WAIT_S:.0f} s")
        time.sleep(POLL_S)


def _row(case: str, batch: int, kv_tokens: int, steps: list[_Done], model: _Model, bench: Bench) -> Row:
    shape = model.shape
    pairs = list(itertools.pairwise(steps))
    step_s = median(after.ended - before.ended for before, after in pairs)
    host_s = median(after.ended - before.ended - after.waited for before, after in pairs)
    layer = sum(math.prod(size) for name, size in shape.projections.items() if name != "head")
    parameters = shape.num_layers * layer + math.prod(shape.projections["head"])
    kv_bytes = kv_tokens * model.runner.info.kv_cache.bytes_per_token
    weight_bytes = (INT4_BYTES if model.config.quantization == "int4" else 2.0) * parameters
    limit_s = bench.ceilings.seconds(weight_bytes, 2.0 * parameters * batch) + bench.ceilings.seconds(kv_bytes)
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


def _case(shape: ModelShape, batch: int, context: int) -> str:
    return f"{shape.name}, batch {batch}, context {context}"


def _sequence(number: int, context: int, vocab_size: int) -> Sequence:
    prompt = np.random.default_rng(number).integers(0, vocab_size, context).tolist()
    params = SamplingParams(max_tokens=MAX_TOKENS)
    return Sequence(number, prompt, Request(context, arrived=time.monotonic(), bypass_cache=True), params)

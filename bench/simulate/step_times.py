"""Measure a real model's step time, and fit a constant, a part per sequence and a part per token."""

from __future__ import annotations

import time
from itertools import product
from statistics import median

import numpy as np

from pagoda_server.checkpoints import resolve
from pagoda_server.checkpoints.progress import no_progress
from pagoda_server.engine.core.sequence import Request, SamplingParams, Sequence
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.runners.load import load_runner
from pagoda_server.engine.runners.synthetic import StepTime
from pagoda_server.engine.scheduling.scheduler import Scheduler
from pagoda_server.settings.engine import EngineConfig

# Fitted to SmolLM2-135M-Instruct with the native-int8 kernels on 2 shared cores of an AMD EPYC (AVX512-VNNI),
# 2026-11-21. Each of the twenty steps that it was fitted to, from 7 to 260 ms, took within 17 % of its prediction.
DEFAULT = StepTime(base_s=0.0055, per_sequence_s=0.00011, per_token_s=0.00045)

DECODES = (1, 4, 16, 32, 48)
CHUNKS = (0, 32, 128, 448)
CONTEXT = 128
STEPS = 6  # per case; the median counts


def measure(model: str) -> StepTime:
    """Time decodes at a context of 128 tokens, with and without a prompt chunk in the step."""
    budget = max(DECODES) * CONTEXT + 1
    runner = load_runner(EngineConfig(model, token_budget=budget), resolve(model), no_progress)
    rows: list[list[float]] = []
    seconds: list[float] = []
    for decodes, chunk in product(DECODES, CHUNKS):
        times = []
        scheduler = Scheduler(
            BlockPool(runner.info.num_blocks, runner.info.kv_cache.block_size),
            max_num_seqs=max(DECODES) + 1,
            token_budget=budget,
            max_model_len=runner.info.max_model_len,
            clock=time.monotonic,
            prefix_caching=False,
        )
        for id in range(decodes):
            scheduler.add(_sequence(id, CONTEXT))
        scheduler.commit(plan := scheduler.schedule(), runner.launch(plan).result())
        for step in range(STEPS):
            if chunk:
                scheduler.add(_sequence(decodes + step, chunk))
            plan = scheduler.schedule()
            started = time.perf_counter()
            sampled = runner.launch(plan).result()
            times.append(time.perf_counter() - started)
            scheduler.commit(plan, sampled)
            scheduler.abort([decodes + step])
        rows.append([1.0, decodes + bool(chunk), decodes + chunk])
        seconds.append(median(times))
    # Minimize relative errors, so that short steps are fitted as well as long ones.
    weights = 1 / np.array(seconds)
    parts, *_ = np.linalg.lstsq(np.array(rows) * weights[:, None], np.ones(len(rows)), rcond=None)
    return StepTime(*(max(0.0, float(part)) for part in parts))


def _sequence(id: int, length: int) -> Sequence:
    params = SamplingParams(max_tokens=1000)
    return Sequence(id, [(7 * id + at) % 1000 for at in range(length)], Request(length), params)

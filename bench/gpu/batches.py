"""How many tokens a request's batch changes: the same requests, decoded alone and in batches of every size.

A GPU's library chooses the algorithm of a product by its number of rows, and sums in another order. In float32 no token
changes; in 16 bits one does where two are nearly equally likely. A fault of padding or of a block table changes most.
With --deterministic no token changes in 16 bits either.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.gpu.attention import TINY
from bench.gpu.random_model import write_model
from bench.gpu.rows import Bench, Row
from pagoda_server.checkpoints.progress import no_progress
from pagoda_server.engine.core.sequence import Request, SamplingParams, Sequence
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.loop.steps_in_flight import StepsInFlight
from pagoda_server.engine.runners.load import InformedRunner, load_runner
from pagoda_server.engine.scheduling.scheduler import Scheduler
from pagoda_server.kernels.triton.inputs import ModelShape
from pagoda_server.settings.engine import DType, EngineConfig

PART = "batch sizes"
SHAPE = ModelShape("a model of 0.2 billion parameters", 8, 16, 4, 64, 1024, 2816, 32_000)
AT_ONCE = (2, 8, 16, 64)
OUTPUT_LEN = 32
# By dtype, and whether --deterministic is on: the share of the tokens that may differ.
MOST_DIFFERING: dict[tuple[DType, bool], float] = {
    ("float32", False): 0.0,
    ("bfloat16", False): 0.1,  # a fault changes nearly all; random weights have many logits that are nearly equal
    ("bfloat16", True): 0.0,
}


def rows(bench: Bench) -> Iterator[Row]:
    """Yield one row per setting and number of sequences at once."""
    shape, sizes = (TINY, (2, 3)) if bench.is_small else (SHAPE, AT_ONCE)
    requests = draw_requests(max(sizes), shape.vocab_size, output_len=4 if bench.is_small else OUTPUT_LEN)
    with TemporaryDirectory() as folder:
        write_model(Path(folder), shape, max_positions=512)
        for (dtype, deterministic), most in MOST_DIFFERING.items():
            config = EngineConfig(
                folder,
                device=bench.device.type,  # type: ignore[arg-type]
                dtype=dtype,
                quantization="none",
                deterministic=deterministic,
                max_num_seqs=max(sizes),
                token_budget=64 if bench.is_small else 1024,
                kv_cache_gb=0.01 if bench.is_small else 0.5,
            )
            runner = load_runner(config, Path(folder), no_progress)
            alone = generate(runner, requests, at_once=1)
            for size in sizes:
                differing, compared = count_differing(alone, generate(runner, requests, at_once=size))
                yield Row(
                    PART,
                    f"{dtype}{', deterministic' if deterministic else ''}, {size} at once against 1",
                    rate=100 * differing / compared,
                    unit="% of tokens differ",
                    bar=f"≤ {100 * most:g} %",
                    met=differing <= most * compared,
                    figures={"differ": float(differing), "compared": float(compared)},
                )


def draw_requests(count: int, vocab_size: int, output_len: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 3 to 100 tokens; every other one is answered greedily, the rest with a seed."""
    rng = random.Random(0)
    requests = []
    for number in range(count):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randrange(3, 100))]
        temperature = 0.8 * (number % 2)
        requests.append((prompt, SamplingParams(max_tokens=output_len, temperature=temperature, seed=number)))
    return requests


def generate(
    runner: InformedRunner, requests: Items[tuple[list[int], SamplingParams]], at_once: int
) -> list[list[int]]:
    """Return each request's tokens, where at most `at_once` sequences run at the same time."""
    scheduler = Scheduler(
        BlockPool(runner.info.num_blocks, runner.info.kv_cache.block_size),
        max_num_seqs=at_once,
        token_budget=runner.info.limits.token_budget,
        max_model_len=runner.info.max_model_len,
        prefix_caching=False,
        clock=time.monotonic,
    )
    seqs = [
        Sequence(number, list(prompt), Request(len(prompt)), params) for number, (prompt, params) in enumerate(requests)
    ]
    for seq in seqs:
        scheduler.add(seq)
    steps = StepsInFlight(scheduler, runner)
    while True:
        plan = scheduler.schedule()
        if not plan.is_empty:
            steps.launch(plan)
        elif not len(steps):
            break
        if len(steps) > (0 if plan.is_empty else runner.lookahead):
            steps.commit_oldest()
        if faults := [ended.detail for ended in scheduler.take_output().ended if ended.detail]:
            raise RuntimeError(faults[0])
    return [seq.tokens[seq.request.prompt_len :] for seq in seqs]


def count_differing(alone: Items[list[int]], together: Items[list[int]]) -> tuple[int, int]:
    """Count tokens that differ after equal ones, and those compared: what follows a difference has another prompt."""
    differing = compared = 0
    for one, other in zip(alone, together, strict=True):
        for left, right in zip(one, other, strict=True):
            compared += 1
            if left != right:
                differing += 1
                break
    return differing, compared

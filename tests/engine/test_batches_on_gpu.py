"""How many tokens a request's batch changes: the same requests, decoded alone and in batches of every size.

A GPU's library chooses the algorithm of a product by its number of rows, and sums in another order. In float32 no token
changes; in 16 bits one does where two are nearly equally likely. A fault of padding or of a block table changes most.
With --deterministic no token changes in 16 bits either.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence as Items
from pathlib import Path

import pytest

from bench.gpu.random_model import write_model
from pagoda_server.checkpoints.progress import no_progress
from pagoda_server.engine.core.sequence import Request, SamplingParams, Sequence
from pagoda_server.engine.core.step import Sampled
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.loop.steps_in_flight import StepsInFlight
from pagoda_server.engine.runners.cuda.outcomes import DeviceStep
from pagoda_server.engine.runners.load import InformedRunner, load_runner
from pagoda_server.engine.scheduling.scheduler import Scheduler
from pagoda_server.kernels.triton.inputs import ModelShape
from pagoda_server.settings.engine import DType, EngineConfig
from tests.rehearsal import simulated_card

SHAPE = ModelShape("a model of 0.2 billion parameters", 8, 16, 4, 64, 1024, 2816, 32_000)
TINY = ModelShape("tiny", 2, 8, 2, 32, 64, 96, 300)
# By dtype, and whether --deterministic is on: the share of the tokens that may differ. A fault changes nearly all;
# random weights have many logits that are nearly equal.
MOST_DIFFERING: dict[tuple[DType, bool], float] = {
    ("float32", False): 0.0,
    ("bfloat16", False): 0.1,
    ("bfloat16", True): 0.0,
}


def differing_share(
    folder: Path, shape: ModelShape, sizes: tuple[int, ...], dtype: DType, deterministic: bool
) -> float:
    """Decode the same requests alone and in each of these batches; return the largest share of tokens that differ."""
    is_small = shape is TINY
    requests = draw_requests(max(sizes), shape.vocab_size, output_len=4 if is_small else 32)
    write_model(folder, shape, max_positions=512)
    config = EngineConfig(
        str(folder),
        device="cuda",
        dtype=dtype,
        quantization="none",
        deterministic=deterministic,
        max_num_seqs=max(sizes),
        token_budget=64 if is_small else 1024,
        kv_cache_gb=0.01 if is_small else 0.5,
    )
    runner = load_runner(config, folder, no_progress)
    alone = generate(runner, requests, at_once=1)
    counts = [count_differing(alone, generate(runner, requests, at_once=size)) for size in sizes]
    return max(differing / compared for differing, compared in counts)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "deterministic"), list(MOST_DIFFERING))
def test_on_a_gpu_batches_change_no_token_in_float32_or_with_deterministic_and_few_in_bfloat16(
    dtype: DType, deterministic: bool, tmp_path: Path
) -> None:
    share = differing_share(tmp_path, SHAPE, (2, 8, 16, 64), dtype, deterministic)
    assert share <= MOST_DIFFERING[dtype, deterministic]


@pytest.mark.parametrize(("dtype", "deterministic"), list(MOST_DIFFERING))
def test_on_a_simulated_card_no_batch_changes_a_token(dtype: DType, deterministic: bool, tmp_path: Path) -> None:
    with simulated_card():
        assert differing_share(tmp_path, TINY, (2, 3), dtype, deterministic) <= MOST_DIFFERING[dtype, deterministic]


def test_a_step_of_several_sequences_that_chooses_other_tokens_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = DeviceStep.result

    def faulty(step: DeviceStep) -> Sampled:
        sampled = result(step)
        return Sampled([token + (len(sampled.tokens) > 1) for token in sampled.tokens], sampled.logprobs)

    monkeypatch.setattr(DeviceStep, "result", faulty)
    with simulated_card():
        assert differing_share(tmp_path, TINY, (2, 3), "float32", False) > 0.1


def test_what_follows_a_difference_is_not_compared() -> None:
    assert count_differing([[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 5]]) == (0, 5)
    assert count_differing([[1, 2, 3], [4, 5, 6]], [[1, 7, 8], [4, 5, 0]]) == (2, 5)


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
        windows=runner.info.kv_cache.groups.windows,
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

"""Whatever is served, in whatever order, several ranks give the tokens of one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet

from pagoda_server.engine.core.step import Chunk, StepPlan
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from tests.engine.test_speculation import knowing, needs_native, serve
from tests.engine.test_tensor_parallel import settings_of
from tests.engine.thread_ranks import ThreadGroup
from tests.engine.tiny_models import ONE_OF_EACH_FAMILY, ShuffledBlocks, load_runner, random_prompt, saved_model

pytestmark = pytest.mark.timeout(200)

DIFFERENT = {"gpt2": 2, "gemma3": 2, "qwen2_moe": 3}  # learned positions, several groups of layers, experts


def cases() -> list[ParameterSet]:
    """A model of each family, on 2 and 3 ranks in turn; some of them in the fast tests, more schedules at night."""
    thorough = [name for name in ONE_OF_EACH_FAMILY if name not in DIFFERENT]
    counts = DIFFERENT | {name: 2 + number % 2 for number, name in enumerate(thorough)}
    return [
        *(pytest.param(name, counts[name], [0, 1]) for name in DIFFERENT),
        *(
            pytest.param(name, counts[name], [number], marks=pytest.mark.thorough)
            for number, name in enumerate(thorough)
        ),
        *(pytest.param(name, count, range(100, 104), marks=pytest.mark.nightly) for name, count in counts.items()),
    ]


@pytest.mark.parametrize(("name", "count", "seeds"), cases())
def test_ranks_serve_the_tokens_of_one_process(
    name: str, count: int, seeds: Sequence[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Greedy and seeded, with masks, penalties, cached and shared prompts, preemption, drafts and failed steps.

    Logits differ in their last bits, so that one sequence of a schedule may meet two tokens that are equally likely.
    """
    folder = saved_model(name, tmp_path_factory)
    alone = load_runner(folder)
    with ThreadGroup(settings_of(folder, tensor_parallel=count)) as runner:
        for seed in seeds:
            expected = serve(alone, seed, None)
            for drafts, failures in ((None, seed % 2), (knowing(expected, (0.7, 1.0)[seed % 2]), 1 - seed % 2)):
                found = serve(runner, seed, drafts, failures)
                assert found.tokens.keys() == expected.tokens.keys()
                differing = [id for id in expected.ends if found.tokens[id] != expected.tokens[id]]
                assert len(differing) <= 1, (seed, differing)
                assert all(found.ends[id] == end for id, end in expected.ends.items() if id not in differing)


@pytest.mark.thorough
def test_the_default_model_on_three_ranks(default_model_folder: Path) -> None:
    """It has 9 heads in 3 groups. Logits after each token of a prompt, and of decodes behind it, are close."""
    prompt = random_prompt(60, seed=1)

    def logits_of(runner: ModelRunner) -> torch.Tensor:
        seq = ShuffledBlocks(runner).sequence(prompt, 4)
        parts = [runner.logits(Chunk(seq, start, length, False)) for start, length in ((0, 40), (40, 19), (59, 1))]
        assert len(runner.execute(StepPlan([Chunk(seq, 59, 1, True)])).tokens) == 1
        return torch.cat(parts)

    how = {"kv_cache_gb": 0.05, "quantization": "none"}
    alone = logits_of(load_runner(default_model_folder, **how))
    with ThreadGroup(settings_of(default_model_folder, tensor_parallel=3, **how)) as runner:
        together = logits_of(runner)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-3)


@needs_native
def test_deterministic_ranks_compute_the_same_bits_at_once_and_one_by_one(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = saved_model("qwen3", tmp_path_factory)
    how = {"dtype": "bfloat16", "quantization": "none", "deterministic": True}
    with ThreadGroup(settings_of(folder, tensor_parallel=2, **how)) as runner:
        blocks, prompt = ShuffledBlocks(runner), random_prompt(40, seed=1)
        at_once = runner.logits(Chunk(blocks.sequence(prompt, 1), 0, 40, True))
        again = blocks.sequence(prompt, 1)
        assert torch.equal(torch.cat([runner.logits(Chunk(again, each, 1, True)) for each in range(40)]), at_once)

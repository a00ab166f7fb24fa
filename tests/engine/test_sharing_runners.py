"""Shared and copied blocks with real pages: the runners of a CPU and of a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pagoda_server.engine.core.sequence import Request, SamplingParams, Sequence
from pagoda_server.engine.loop.steps_in_flight import Runner
from tests.engine.test_device_runner import Served, device_runner, outputs
from tests.engine.tiny_models import load_runner, random_prompt, saved_model

PARAMS = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.95, seed=11)
SETTINGS = {"max_num_seqs": 6, "token_budget": 19, "max_model_len": 120}


@pytest.fixture(scope="module", params=["llama", "mistral with a sliding window"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(request.param, tmp_path_factory)


def runner_of(kind: str, folder: Path, block_size: int = 4) -> Runner:
    load = load_runner if kind == "cpu" else device_runner
    return load(folder, block_size=block_size, **SETTINGS)


def ask_siblings(served: Served, prompt: list[int], count: int) -> list[Sequence]:
    request = Request(len(prompt), shares_prompt=True)
    seqs = []
    for at in range(count):
        params = replace(PARAMS, seed=PARAMS.seed + at)
        seqs.append(Sequence(100 + at, list(prompt), request, params))
    for seq in seqs:
        served.scheduler.add(seq)
    return seqs


@pytest.mark.parametrize("kind", ["cpu", "device"])
@pytest.mark.parametrize("length", [30, 33, 34])
def test_siblings_generate_what_separate_seeded_requests_do(folder: Path, kind: str, length: int) -> None:
    prompt = random_prompt(length, seed=4)
    together = Served(runner_of(kind, folder), 60)
    seqs = ask_siblings(together, prompt, 8)
    together.run()
    alone = []
    for at in range(8):
        served = Served(runner_of("cpu", folder), 60)
        alone.append(served.add(prompt, replace(PARAMS, seed=PARAMS.seed + at)))
        served.run()
    assert outputs(seqs) == outputs(alone)
    assert len({tuple(tokens) for tokens in outputs(seqs)}) > 4, "different seeds"


@pytest.mark.parametrize("kind", ["cpu", "device"])
def test_a_prompt_that_leaves_another_inside_a_block_is_continued_rightly(folder: Path, kind: str) -> None:
    served = Served(runner_of(kind, folder, block_size=8), 60, block_size=8)
    served.add(random_prompt(40, seed=4), replace(PARAMS, max_tokens=1))
    served.run()
    prompt = [*random_prompt(40, seed=4)[:30], 5, 6, 7, 8]
    seq = served.add(prompt, PARAMS)
    served.run()
    assert seq.account.cached_tokens >= 30
    fresh = Served(runner_of("cpu", folder), 60)
    alone = fresh.add(prompt, PARAMS)
    fresh.run()
    assert outputs([seq]) == outputs([alone])

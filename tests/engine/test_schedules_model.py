"""Every way of serving with a real model: each sequence's tokens are those that it gets alone."""

from __future__ import annotations

import math
from typing import get_args

import pytest

from pagoda_server.engine.core.sequence import SamplingParams, Sequence
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.engine.scheduling.scheduler import Scheduler
from pagoda_server.engine.scheduling.schedules import ScheduleName
from tests.engine.tiny_models import (
    BLOCK_SIZE,
    MODELS,
    ShuffledBlocks,
    generate,
    load_runner,
    random_prompt,
    save_model,
)

MAX_MODEL_LEN = 60
TOKEN_BUDGET = 30
REQUESTS = [(3, 20), (40, 20), (1, 9), (17, 1), (25, 12), (8, 15)]  # prompt and output lengths


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = tmp_path_factory.mktemp("model")
    save_model(MODELS["llama"], folder)
    return load_runner(folder, max_num_seqs=4, token_budget=TOKEN_BUDGET, max_model_len=MAX_MODEL_LEN)


@pytest.mark.parametrize("schedule", get_args(ScheduleName))
def test_greedy_tokens_are_those_of_the_sequence_alone(runner: ModelRunner, schedule: ScheduleName) -> None:
    for kv in runner._cache:  # padding must leave nothing behind that a sequence could read
        kv.keys.fill_(float("nan"))
        kv.values.fill_(float("nan"))
    scheduler = Scheduler(
        BlockPool(runner.info.num_blocks, BLOCK_SIZE),
        max_num_seqs=4,
        token_budget=TOKEN_BUDGET,
        max_model_len=MAX_MODEL_LEN,
        clock=lambda: 0.0,
        schedule=schedule,
    )
    seqs = []
    for id, (prompt_len, output_len) in enumerate(REQUESTS):
        params = SamplingParams(max_tokens=output_len)
        seqs.append(Sequence(id, random_prompt(prompt_len, seed=id), prompt_len, params, 0.0, math.inf))
        scheduler.add(seqs[-1])
    while not (plan := scheduler.schedule()).is_empty:
        sampled = runner.execute(plan)
        assert not sampled.faults
        scheduler.commit(plan, sampled)
        scheduler.check_integrity()
    for seq in seqs:
        alone = ShuffledBlocks(runner).sequence(seq.tokens[: seq.prompt_len], seq.output_len)
        assert seq.tokens[seq.prompt_len :] == generate(runner, alone, seq.params.max_tokens, TOKEN_BUDGET)

"""Every family computes what transformers computes, however its tokens are packed and wherever its pages lie."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.models import FAMILIES
from pagoda_server.engine.models.rope import Rope
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.engine.runners.loaded_model import load_for_serving
from pagoda_server.settings.engine import EngineConfig
from tests.engine.tiny_models import (
    MODELS,
    ShuffledBlocks,
    generate,
    load_runner,
    next_chunk,
    random_prompt,
    save_model,
    step,
    step_logits,
)

NUM_TOKENS = 64


@dataclass(frozen=True)
class Pair:
    """One model, here and in transformers."""

    ours: ModelRunner
    theirs: Any

    def their_logits(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.theirs(torch.tensor([tokens])).logits[0]

    def their_tokens(self, prompt: list[int], count: int) -> list[int]:
        with torch.inference_mode():
            out = self.theirs.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
        return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("model")
    theirs = save_model(MODELS[request.param], folder)
    theirs.generation_config.eos_token_id = None
    runner = load_runner(folder)
    for kv in runner._cache:  # a slot that no token was written to must never matter
        kv.keys.fill_(float("nan"))
        kv.values.fill_(float("nan"))
    return Pair(runner, theirs)


def test_every_family_has_a_model_here() -> None:
    assert {config.model_type for config in MODELS.values()} == {family.model_type for family in FAMILIES}


def test_logits_equal_those_of_transformers(pair: Pair) -> None:
    prompt = random_prompt(53, seed=1)
    seq = ShuffledBlocks(pair.ours).sequence(prompt, 1)
    logits = step_logits(pair.ours, [next_chunk(seq)])
    torch.testing.assert_close(logits[0], pair.their_logits(prompt)[-1], atol=1e-4, rtol=1e-4)


def test_greedy_tokens_equal_those_of_transformers(pair: Pair) -> None:
    prompt = random_prompt(11, seed=2)
    seq = ShuffledBlocks(pair.ours).sequence(prompt, NUM_TOKENS)
    assert generate(pair.ours, seq, NUM_TOKENS) == pair.their_tokens(prompt, NUM_TOKENS)


@pytest.mark.thorough
def test_mixed_batches_of_decodes_and_odd_chunks_choose_the_tokens_of_each_sequence_alone(pair: Pair) -> None:
    prompts = [random_prompt(length, seed=length) for length in (1, 2, 5, 17, 31, 66)]
    blocks = ShuffledBlocks(pair.ours)
    seqs = [blocks.sequence(prompt, NUM_TOKENS) for prompt in prompts]
    sizes = random.Random(3)
    while unfinished := [seq for seq in seqs if seq.output_len < NUM_TOKENS]:
        chunks = [next_chunk(seq, at_most=sizes.choice((1, 2, 3, 7, 13))) for seq in unfinished]
        step(pair.ours, sizes.sample(chunks, k=sizes.randint(1, len(chunks))))
    for seq, prompt in zip(seqs, prompts, strict=True):
        assert seq.tokens[seq.request.prompt_len :] == pair.their_tokens(prompt, NUM_TOKENS)


def test_older_config_files_with_rope_scaling_describe_the_same_model(tmp_path: Path) -> None:
    theirs = save_model(MODELS["llama3 rope"], tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    parameters = fields.pop("rope_parameters")
    fields["rope_theta"] = parameters.pop("rope_theta")
    fields["rope_scaling"] = parameters
    (tmp_path / "config.json").write_text(json.dumps(fields))
    pair = Pair(load_runner(tmp_path), theirs)
    prompt = random_prompt(100, seed=4)
    logits = step_logits(pair.ours, [next_chunk(ShuffledBlocks(pair.ours).sequence(prompt, 1))])
    torch.testing.assert_close(logits[0], pair.their_logits(prompt)[-1], atol=1e-4, rtol=1e-4)


def test_a_long_context_has_the_long_factors_of_longrope(tmp_path: Path) -> None:
    theirs = save_model(MODELS["phi3 with longrope"], tmp_path)
    pair, prompt = Pair(load_runner(tmp_path, max_model_len=320, kv_cache_gb=0.01), theirs), random_prompt(300, seed=7)
    logits = step_logits(pair.ours, [next_chunk(ShuffledBlocks(pair.ours).sequence(prompt, 1))])
    torch.testing.assert_close(logits[0], pair.their_logits(prompt)[-1], atol=1e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match="--max-model-len 1025 exceeds the model's 1024 positions"):
        load_runner(tmp_path, max_model_len=1025)


def test_dynamic_rope_serves_the_positions_at_which_it_is_the_default(tmp_path: Path) -> None:
    config = LlamaConfig.from_dict(MODELS["llama"].to_dict())
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    theirs = save_model(config, tmp_path)
    pair, prompt = Pair(load_runner(tmp_path), theirs), random_prompt(250, seed=8)
    logits = step_logits(pair.ours, [next_chunk(ShuffledBlocks(pair.ours).sequence(prompt, 1))])
    torch.testing.assert_close(logits[0], pair.their_logits(prompt)[-1], atol=1e-4, rtol=1e-4)
    assert pair.ours.info.max_model_len == config.max_position_embeddings


def test_rotations_looked_up_in_tables_are_those_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(MODELS["yarn rope"], tmp_path)
    runner, prompt = load_runner(tmp_path), random_prompt(100, seed=6)
    blocks = ShuffledBlocks(runner)
    computed = step_logits(runner, [next_chunk(blocks.sequence(prompt, 1))])
    runner._model.tabulate_rotations(len(prompt))
    monkeypatch.delattr(Rope, "_compute")
    assert torch.equal(step_logits(runner, [next_chunk(blocks.sequence(prompt, 1))]), computed)


def test_a_model_on_a_gpu_has_tables_of_as_many_rotations_as_contexts_may_have_tokens(tmp_path: Path) -> None:
    save_model(MODELS["llama"], tmp_path)
    config = EngineConfig(str(tmp_path), max_model_len=100)
    for backend, num_rows in (("triton", 100), ("native", 3)):
        [rope] = load_for_serving(config, torch.device("cpu"), backend=(backend, "unquantized")).model._ropes
        assert [len(table) for table in rope.rotations(torch.arange(3))] == [num_rows, num_rows]


def test_bfloat16_logits_are_as_near_to_float32_as_those_of_transformers(tmp_path: Path) -> None:
    prompt = random_prompt(40, seed=5)
    theirs = save_model(MODELS["smollm"], tmp_path)
    true = Pair(load_runner(tmp_path), theirs).their_logits(prompt)[-1]
    rounded = Pair(load_runner(tmp_path, dtype="bfloat16", quantization="none"), theirs.to(torch.bfloat16))
    ours = step_logits(rounded.ours, [next_chunk(ShuffledBlocks(rounded.ours).sequence(prompt, 1))])[0].float()
    their_error = (rounded.their_logits(prompt)[-1].float() - true).square().mean().sqrt()
    assert (ours - true).square().mean().sqrt() < 1.5 * their_error

"""Every family computes what transformers computes, however its tokens are packed and wherever its pages lie."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.core.sequence import EndReason, SamplingParams, Sequence
from pagoda_server.engine.models import FAMILIES
from pagoda_server.engine.models.feed_forward import ExpertMLP
from pagoda_server.engine.models.rope import Rope
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.engine.runners.loaded_model import load_for_serving
from pagoda_server.kernels.route import Routes
from pagoda_server.settings.engine import EngineConfig
from tests.engine.test_device_runner import Served
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
TOLERANCE = 1e-4  # of logits, absolute and relative
WITH_EXPERTS = [name for name, config in MODELS.items() if {"num_experts_per_tok", "moe_k"} & config.to_dict().keys()]


@dataclass(frozen=True)
class Pair:
    """One model, here and in transformers."""

    ours: ModelRunner
    theirs: Any
    checked: set[tuple[int, ...]] = field(default_factory=set)

    def their_logits(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.theirs(torch.tensor([tokens])).logits[0]

    def check_greedy(self, seq: Sequence) -> None:
        """Fail unless each token of a greedy output is the one that transformers chooses after those before it.

        Where the two greatest logits are nearer to each other than sums in another order may be, either one will do.
        """
        key = seq.request.prompt_len, *seq.tokens
        if key in self.checked:
            return
        rows = self.their_logits(seq.tokens[:-1])[seq.request.prompt_len - 1 :]
        best = rows.topk(2).values
        rounding = 2 * (TOLERANCE + TOLERANCE * best[:, 0].abs())
        assert ((best[:, 0] - best[:, 1]) < rounding).float().mean() < 0.1, "a model of ties tests nothing"
        chosen = rows.gather(1, torch.tensor(seq.tokens[seq.request.prompt_len :])[:, None])[:, 0]
        assert (best[:, 0] - chosen <= rounding).all(), (best[:, 0] - chosen, rounding)
        self.checked.add(key)


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
    torch.testing.assert_close(logits[0], pair.their_logits(prompt)[-1], atol=TOLERANCE, rtol=TOLERANCE)


def test_greedy_tokens_equal_those_of_transformers(pair: Pair) -> None:
    prompt = random_prompt(11, seed=2)
    seq = ShuffledBlocks(pair.ours).sequence(prompt, NUM_TOKENS)
    generate(pair.ours, seq, NUM_TOKENS)
    pair.check_greedy(seq)


@pytest.mark.thorough
def test_mixed_batches_of_decodes_and_odd_chunks_choose_the_tokens_of_each_sequence_alone(pair: Pair) -> None:
    prompts = [random_prompt(length, seed=length) for length in (1, 2, 5, 17, 31, 66)]
    blocks = ShuffledBlocks(pair.ours)
    seqs = [blocks.sequence(prompt, NUM_TOKENS) for prompt in prompts]
    sizes = random.Random(3)
    while unfinished := [seq for seq in seqs if seq.output_len < NUM_TOKENS]:
        chunks = [next_chunk(seq, at_most=sizes.choice((1, 2, 3, 7, 13))) for seq in unfinished]
        step(pair.ours, sizes.sample(chunks, k=sizes.randint(1, len(chunks))))
    for seq in seqs:
        pair.check_greedy(seq)


@pytest.mark.thorough
def test_a_batch_the_cache_and_preemptions_change_no_token(pair: Pair) -> None:
    prompts = [random_prompt(length, seed=100 + length) for length in (3, 8, 12, 19, 25, 31, 38, 44)]

    def serve(served: Served, prompts: list[list[int]], max_tokens: int) -> list[Sequence]:
        seqs = [served.add(prompt, SamplingParams(max_tokens=max_tokens)) for prompt in prompts]
        served.run()
        assert all(ended.reason is EndReason.LENGTH for ended in served.ended), served.ended
        return seqs

    roomy = Served(pair.ours, pair.ours.info.num_blocks, max_num_seqs=len(prompts))
    first = serve(roomy, prompts, NUM_TOKENS)
    continued = serve(roomy, [seq.tokens[:-40] for seq in first], 40)
    assert all(seq.account.cached_tokens >= seq.request.prompt_len - 4 for seq in continued)
    cramped = Served(pair.ours, 70, max_num_seqs=len(prompts))
    preempted = serve(cramped, prompts, NUM_TOKENS)
    assert cramped.scheduler.counters.preemptions > 0, "the cache is too small for all of them"
    for seq in (*first, *continued, *preempted):
        pair.check_greedy(seq)


@pytest.mark.thorough
@pytest.mark.parametrize("pair", WITH_EXPERTS, indirect=True)
def test_the_rows_of_a_batch_choose_experts_of_their_own(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has the logits of its sequence alone, though its neighbours' experts are others."""
    layers = [layer._mlp for layer in pair.ours._model._layers if isinstance(layer._mlp, ExpertMLP)]
    assert layers
    chosen: list[set[tuple[int, ...]]] = []
    for layer in layers:

        def watched(x: torch.Tensor, routes: Routes, *rest: Any, multiply: Any = layer._experts) -> torch.Tensor:
            chosen.append({tuple(sorted(row)) for row in routes.experts.tolist()})
            return multiply(x, routes, *rest)

        monkeypatch.setattr(layer, "_experts", watched)
    prompts = [[token] for token in range(0, 160, 20)]
    blocks = ShuffledBlocks(pair.ours)
    logits = step_logits(pair.ours, [next_chunk(blocks.sequence(prompt, 1)) for prompt in prompts])
    if layers[0]._routing.chosen < layers[0]._routing.num_experts:
        assert all(len(choices) > 1 for choices in chosen)
    theirs = torch.stack([pair.their_logits(prompt)[-1] for prompt in prompts])
    torch.testing.assert_close(logits, theirs, atol=TOLERANCE, rtol=TOLERANCE)


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
    torch.testing.assert_close(logits[0], pair.their_logits(prompt)[-1], atol=TOLERANCE, rtol=TOLERANCE)


def test_a_long_context_has_the_long_factors_of_longrope(tmp_path: Path) -> None:
    theirs = save_model(MODELS["phi3 with longrope"], tmp_path)
    pair, prompt = Pair(load_runner(tmp_path, max_model_len=320, kv_cache_gb=0.01), theirs), random_prompt(300, seed=7)
    logits = step_logits(pair.ours, [next_chunk(ShuffledBlocks(pair.ours).sequence(prompt, 1))])
    torch.testing.assert_close(logits[0], pair.their_logits(prompt)[-1], atol=TOLERANCE, rtol=TOLERANCE)
    with pytest.raises(ConfigError, match="--max-model-len 1025 exceeds the model's 1024 positions"):
        load_runner(tmp_path, max_model_len=1025)


def test_dynamic_rope_serves_the_positions_at_which_it_is_the_default(tmp_path: Path) -> None:
    config = LlamaConfig.from_dict(MODELS["llama"].to_dict())
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    theirs = save_model(config, tmp_path)
    pair, prompt = Pair(load_runner(tmp_path), theirs), random_prompt(250, seed=8)
    logits = step_logits(pair.ours, [next_chunk(ShuffledBlocks(pair.ours).sequence(prompt, 1))])
    torch.testing.assert_close(logits[0], pair.their_logits(prompt)[-1], atol=TOLERANCE, rtol=TOLERANCE)
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

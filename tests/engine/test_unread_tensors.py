"""A checkpoint with tensors that a model does not use is refused, unless they cannot change what it computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagoda_server.engine.core.errors import ConfigError
from tests.engine.tiny_models import (
    MODELS,
    ShuffledBlocks,
    load_runner,
    next_chunk,
    random_prompt,
    save_model,
    step_logits,
)


def with_tensor(folder: Path, model: str, name: str, tensor: torch.Tensor) -> Any:
    """Save one of MODELS with one more tensor; return transformers' model."""
    theirs = save_model(MODELS[model], folder)
    change_tensors(folder, lambda tensors: tensors | {name: tensor})
    return theirs


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)


def check_logits(folder: Path, theirs: Any) -> None:
    """Fail unless the folder's model computes what transformers computes."""
    runner, prompt = load_runner(folder), random_prompt(20, seed=1)
    logits = step_logits(runner, [next_chunk(ShuffledBlocks(runner).sequence(prompt, 1))])
    with torch.inference_mode():
        torch.testing.assert_close(logits[0], theirs(torch.tensor([prompt])).logits[0, -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("llama", "model.layers.0.self_attn.q_proj.bias"),
        ("llama", "model.layers.2.input_layernorm.weight"),
        ("llama", "model.layers.0.self_attn.q_norm.weight"),
        ("smollm", "lm_head.bias"),
        ("qwen3_moe", "model.layers.0.mlp.experts.6.up_proj.weight"),
    ],
)
def test_a_tensor_that_is_not_used_is_named(model: str, name: str, tmp_path: Path) -> None:
    with_tensor(tmp_path, model, name, torch.ones(4))
    with pytest.raises(ConfigError, match=f"tensor {name} of .* is not used by this family"):
        load_runner(tmp_path)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("llama", "model.layers.1.self_attn.k_proj.k_scale"),
        ("smollm", "lm_head.weight"),
        ("gpt2", "transformer.h.0.attn.bias"),
        ("gpt2", "transformer.h.0.attn.masked_bias"),
    ],
)
def test_tensors_that_change_nothing_are_left_out(model: str, name: str, tmp_path: Path) -> None:
    check_logits(tmp_path, with_tensor(tmp_path, model, name, torch.ones(4)))


def test_biases_of_zeros_that_quantizers_write_are_left_out(tmp_path: Path) -> None:
    check_logits(tmp_path, with_tensor(tmp_path, "llama", "model.layers.0.mlp.down_proj.bias", torch.zeros(4)))


def test_layers_that_predict_more_tokens_are_left_out_as_far_as_the_config_has_them(tmp_path: Path) -> None:
    model = next(name for name, config in MODELS.items() if config.model_type == "glm4_moe")
    number = MODELS[model].num_hidden_layers
    theirs = with_tensor(tmp_path, model, f"model.layers.{number}.eh_proj.weight", torch.ones(4))
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"num_nextn_predict_layers": 1}))
    check_logits(tmp_path, theirs)
    path.write_text(json.dumps(fields | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ConfigError, match=rf"model\.layers\.{number}\.eh_proj\.weight"):
        load_runner(tmp_path)


def test_another_epsilon_of_xielu_is_refused(tmp_path: Path) -> None:
    with_tensor(tmp_path, "apertus", "model.layers.1.mlp.act_fn.eps", torch.tensor(-1e-3))
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.act_fn\.eps is .*; only -1e-06 is supported"):
        load_runner(tmp_path)


@pytest.mark.parametrize("model", ["smollm", "gpt2", "opt"])
def test_a_checkpoint_of_the_base_model_has_names_without_a_prefix(model: str, tmp_path: Path) -> None:
    theirs = save_model(MODELS[model], tmp_path)
    config = (tmp_path / "config.json").read_bytes()
    theirs.base_model.save_pretrained(tmp_path)
    check_logits(tmp_path, theirs)  # its config.json names the class of the base model
    (tmp_path / "config.json").write_bytes(config)
    assert not any(name.startswith(theirs.base_model_prefix) for name in load_file(tmp_path / "model.safetensors"))
    check_logits(tmp_path, theirs)
    change_tensors(tmp_path, lambda tensors: tensors | {"layers.7.self_attn.q_proj.weight": torch.ones(4)})
    with pytest.raises(ConfigError, match=r"tensor layers\.7\.self_attn\.q_proj\.weight .* is not used"):
        load_runner(tmp_path)


def test_a_base_model_without_the_head_that_it_needs_is_refused(tmp_path: Path) -> None:
    save_model(MODELS["llama"], tmp_path)
    change_tensors(
        tmp_path, lambda each: {name.removeprefix("model."): each[name] for name in each if "head" not in name}
    )
    with pytest.raises(ConfigError, match=r"tensor lm_head\.weight is missing"):
        load_runner(tmp_path)

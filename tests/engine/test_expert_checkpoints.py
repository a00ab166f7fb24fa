"""Checkpoints with the tensors of experts apart, or those of all experts in one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

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


def fuse(folder: Path) -> dict[str, Tensor]:
    """Stack the experts of each layer as newer modules of transformers hold them; return what was written."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for layer in {name.split(".mlp.")[0] for name in tensors if ".experts." in name}:
        name, count = f"{layer}.mlp.experts", MODELS["qwen3_moe"].num_experts

        def stacked(part: str, name: str = name, count: int = count) -> Tensor:
            return torch.stack([tensors.pop(f"{name}.{number}.{part}.weight") for number in range(count)])

        tensors[f"{name}.gate_up_proj"] = torch.cat([stacked("gate_proj"), stacked("up_proj")], dim=1)
        tensors[f"{name}.down_proj"] = stacked("down_proj")
    save_file(tensors, path)
    return tensors


def logits(folder: Path) -> Tensor:
    runner = load_runner(folder)
    return step_logits(runner, [next_chunk(ShuffledBlocks(runner).sequence(random_prompt(20, seed=1), 1))])


def test_experts_in_one_tensor_are_those_in_many(tmp_path: Path) -> None:
    save_model(MODELS["qwen3_moe"], tmp_path)
    apart = logits(tmp_path)
    fuse(tmp_path)
    assert torch.equal(logits(tmp_path), apart)


def test_a_tensor_of_too_few_experts_is_named(tmp_path: Path) -> None:
    save_model(MODELS["qwen3_moe"], tmp_path)
    tensors = fuse(tmp_path)
    name = "model.layers.1.mlp.experts.down_proj"
    tensors[name] = tensors[name][:4].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"{name} has shape \[4, 48, 24\], without a part for expert 4"):
        load_runner(tmp_path)


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    save_model(MODELS["qwen3_moe"], tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.mlp.experts.5.up_proj.weight"]
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=r"experts\.5\.up_proj\.weight is missing"):
        load_runner(tmp_path)

"""Checkpoints with the tensors of experts apart, or those of all experts in one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

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


def logits(folder: Path, **settings: str) -> Tensor:
    runner = load_runner(folder, **settings)
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


def test_gpt_oss_in_mxfp4_computes_what_its_values_compute(tmp_path: Path) -> None:
    config = type(MODELS["gpt_oss"])(**(MODELS["gpt_oss"].to_dict() | {"hidden_size": 64, "intermediate_size": 96}))
    theirs = save_model(config, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for number, layer in enumerate(theirs.model.layers):
        for module in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{number}.mlp.experts.{module}"
            count, in_size, out_size = tensors.pop(name).shape
            blocks = torch.randint(0, 256, (count, out_size, in_size // 32, 16), dtype=torch.uint8)
            scales = torch.randint(120, 125, (count, out_size, in_size // 32), dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            weight = getattr(layer.mlp.experts, module)
            weight.data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": {"quant_method": "mxfp4"}}))
    with torch.inference_mode():
        expected = theirs(torch.tensor([random_prompt(20, seed=1)])).logits[0, -1]
    torch.testing.assert_close(logits(tmp_path)[0], expected, atol=1e-4, rtol=1e-4)
    kept = logits(tmp_path, dtype="bfloat16", quantization="int4")[0].float()
    assert torch.corrcoef(torch.stack((kept, expected)))[0, 1] > 0.99

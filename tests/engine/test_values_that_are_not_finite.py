"""Weights that are not finite are found while a model is loaded, not by its first request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagoda_server.engine.core.errors import ConfigError
from tests.checkpoints.quantized_tensors import packed_in_4_bits
from tests.engine.tiny_models import MODELS, load_runner, save_model

NORM, MATRIX = "model.layers.1.post_attention_layernorm.weight", "model.layers.0.mlp.down_proj.weight"
NOT_FINITE = "tensor {} has values that are not finite: the file is corrupt"


@pytest.mark.parametrize("name", [NORM, MATRIX, "model.embed_tokens.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_value_that_is_not_finite_names_its_tensor(
    name: str, value: float, quantization: str, tmp_path: Path
) -> None:
    save_model(MODELS["llama"], tmp_path, torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name].view(-1)[-1] = value
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=NOT_FINITE.format(name)):
        load_runner(tmp_path, quantization=quantization)


def test_a_value_beyond_the_dtype_that_is_served_names_its_tensor(tmp_path: Path) -> None:
    save_model(MODELS["llama"], tmp_path, torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[NORM][0] = 1e6
    save_file(tensors, tmp_path / "model.safetensors")
    load_runner(tmp_path)
    with pytest.raises(ConfigError, match=f"tensor {NORM} has values beyond those of torch.float16"):
        load_runner(tmp_path, dtype="float16")


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (float("nan"), "values that are not finite"),
        (float("inf"), "values that are not finite"),
        (200.0, "a scale of 200; at most 127 is supported"),
    ],
)
def test_scales_of_groups_that_kernels_cannot_hold_name_their_tensor(
    scale: float, message: str, tmp_path: Path
) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    config = MODELS["llama"].__class__(**{**MODELS["llama"].to_dict(), "hidden_size": 64, "num_attention_heads": 4})
    save_model(config, tmp_path, torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= packed_in_4_bits(name, tensors.pop(name).float())
    tensors[f"{name}_scale"][3, 1] = scale
    save_file(tensors, tmp_path / "model.safetensors")
    saved = json.loads((tmp_path / "config.json").read_text())
    saved["quantization_config"] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match=f"tensor {name} has {message}"):
        load_runner(tmp_path, dtype="bfloat16", quantization="int4")

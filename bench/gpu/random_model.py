"""Write a folder of a model of any size with a byte-level tokenizer. Its weights are drawn when it is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from pagoda_server.checkpoints import resolve
from pagoda_server.kernels.triton.inputs import ModelShape

MAX_POSITIONS = 16384
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def write_model(
    folder: Path, shape: ModelShape, max_positions: int = MAX_POSITIONS, has_int4_weights: bool = False
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(shape, max_positions)
    if has_int4_weights:
        config["quantization_config"] = {"quant_method": "gguf"}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    synthetic = resolve("synthetic")
    for name in TOKENIZER_FILES:
        shutil.copyfile(synthetic / name, folder / name)
    return folder


def _config(shape: ModelShape, max_positions: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "random_weights": True,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": shape.tied,
    }

"""Qwen3: Llama whose queries and keys are normalised, head by head, before they are rotated (Yang et al., 2025)."""

from __future__ import annotations

from dataclasses import replace

from pagoda_server.engine.models.config import ConfigFile, ModelConfig, read_llama_like
from pagoda_server.engine.models.qwen2 import qwen_sliding_window

_HEAD_DIM = 128  # what transformers assumes where config.json is silent


def configure_qwen3(file: ConfigFile) -> ModelConfig:
    attention_bias = file.flag("attention_bias", False)
    return replace(
        read_llama_like(file, "qwen3", head_dim=_HEAD_DIM),
        qk_norm=True,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        sliding_window=qwen_sliding_window(file),
    )

"""Qwen3: Llama whose queries and keys are normalised, head by head, before they are rotated (Yang et al., 2025)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.models.config import ConfigFile, ModelConfig, read_llama_like
from engine.models.llama import Layer, Llama
from engine.models.qwen2 import qwen_sliding_window

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


class Qwen3(Llama):
    def _normalise(self, layer: Layer, qkv: Tensor) -> Tensor:
        assert layer.query_norm is not None
        assert layer.key_norm is not None
        kv_heads, eps = self.config.num_kv_heads, self.config.rms_norm_eps
        q, k, v = torch.split(qkv, [self.config.num_heads, kv_heads, kv_heads], dim=1)
        q, k = self._ops.rms_norm(q, layer.query_norm, eps), self._ops.rms_norm(k, layer.key_norm, eps)
        return torch.cat((q, k, v), dim=1)

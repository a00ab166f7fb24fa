"""Qwen3 (Yang et al., 2025): Llama that normalises each head of queries and keys before it rotates them."""

from __future__ import annotations

from dataclasses import replace

from ...kernels import HeadNorms
from .config import ConfigFile, ModelConfig
from .decoder import Layer
from .llama import Llama, LlamaLayer
from .qwen2 import qwen_windows
from .weights import Weights

_HEAD_DIM = 128  # what transformers assumes if config.json does not say


class Qwen3(Llama):
    architecture, model_type = "Qwen3ForCausalLM", "qwen3"

    @classmethod
    def configure(cls, file: ConfigFile) -> ModelConfig:
        config = ModelConfig.read(file, cls.model_type, head_dim=_HEAD_DIM)
        bias = file.flag("attention_bias", False)
        return replace(config, qkv_bias=bias, output_bias=bias, windows=qwen_windows(file, config.num_layers))

    def make_layer(self, weights: Weights, prefix: str, window: int | None) -> Layer:
        query, key = (weights.norm(f"{prefix}.self_attn.{name}_norm", self.config.head_dim) for name in ("q", "k"))
        return LlamaLayer(weights, prefix, self.config, window, HeadNorms(query, key, self.config.rms_norm_eps))

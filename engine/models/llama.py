"""Llama (Touvron et al., 2023): each sublayer reads the normalised residual stream."""

from __future__ import annotations

from dataclasses import replace

from ...kernels import HeadNorms, PagedKV
from .config import ConfigFile, ModelConfig
from .decoder import Attention, Decoder, GatedMLP, Layer, LayerInputs, ResidualStream
from .weights import Weights


class LlamaLayer:
    """Attention and feed-forward layer, each behind a norm."""

    def __init__(
        self, weights: Weights, prefix: str, config: ModelConfig, window: int | None, norms: HeadNorms | None = None
    ) -> None:
        self._attention_norm = weights.norm(f"{prefix}.input_layernorm", config.hidden_size)
        self._attention = Attention(weights, f"{prefix}.self_attn", config, window, norms)
        self._mlp_norm = weights.norm(f"{prefix}.post_attention_layernorm", config.hidden_size)
        self._mlp = GatedMLP(weights, f"{prefix}.mlp", config)

    def __call__(self, stream: ResidualStream, step: LayerInputs, kv: PagedKV) -> None:
        stream.add(self._attention(stream.read_normalised(self._attention_norm), step, kv))
        stream.add(self._mlp(stream.read_normalised(self._mlp_norm)))


class Llama(Decoder):
    architecture, model_type = "LlamaForCausalLM", "llama"

    @classmethod
    def configure(cls, file: ConfigFile) -> ModelConfig:
        attention_bias = file.flag("attention_bias", False)
        return replace(
            ModelConfig.read(file, cls.model_type),
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=file.flag("mlp_bias", False),
        )

    def make_layer(self, weights: Weights, prefix: str, window: int | None) -> Layer:
        return LlamaLayer(weights, prefix, self.config, window)

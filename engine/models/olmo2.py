"""OLMo 2 (OLMo Team, 2024): norms behind attention and feed-forward layer, and over whole queries and keys."""

from __future__ import annotations

from dataclasses import replace

from ...kernels import HeadNorms, PagedKV
from .config import ConfigFile, ModelConfig
from .decoder import (
    Attention,
    Decoder,
    Embedded,
    GatedMLP,
    Layer,
    LayerInputs,
    ResidualStream,
    StepInputs,
)
from .weights import Weights

_RMS_NORM_EPS = 1e-5  # what transformers assumes if config.json does not say


class Olmo2Layer:
    """Attention and feed-forward layer, whose results are normalised before they are added to the stream."""

    def __init__(self, weights: Weights, prefix: str, config: ModelConfig, window: int | None) -> None:
        query = weights.norm(f"{prefix}.self_attn.q_norm", config.query_size)
        key = weights.norm(f"{prefix}.self_attn.k_norm", config.kv_size)
        norms = HeadNorms(query, key, config.rms_norm_eps)
        self._attention = Attention(weights, f"{prefix}.self_attn", config, window, norms)
        self._attention_norm = weights.norm(f"{prefix}.post_attention_layernorm", config.hidden_size)
        self._mlp = GatedMLP(weights, f"{prefix}.mlp", config)
        self._mlp_norm = weights.norm(f"{prefix}.post_feedforward_layernorm", config.hidden_size)

    def __call__(self, stream: ResidualStream, step: LayerInputs, kv: PagedKV) -> None:
        stream.add(self._attention(stream.read(), step, kv), self._attention_norm)
        stream.add(self._mlp(stream.read()), self._mlp_norm)


class Olmo2(Decoder):
    architecture, model_type = "Olmo2ForCausalLM", "olmo2"

    @classmethod
    def configure(cls, file: ConfigFile) -> ModelConfig:
        bias = file.flag("attention_bias", False)
        config = ModelConfig.read(file, cls.model_type, rms_norm_eps=_RMS_NORM_EPS)
        return replace(config, qkv_bias=bias, output_bias=bias)

    def make_layer(self, weights: Weights, prefix: str, window: int | None) -> Layer:
        return Olmo2Layer(weights, prefix, self.config, window)

    def embed(self, inputs: StepInputs) -> Embedded:
        """In the weights' dtype, because products read the stream as it is."""
        embedded = super().embed(inputs)
        return embedded._replace(tokens=embedded.tokens.to(self._dtype))

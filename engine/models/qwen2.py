"""Qwen2 (Yang et al., 2024): Llama with biases on queries, keys and values, and a window on some layers."""

from __future__ import annotations

from dataclasses import replace

from ..core.errors import ConfigError
from .config import ConfigFile, ModelConfig
from .llama import Llama

# What transformers assumes if config.json does not say.
_SLIDING_WINDOW = 4096
_FULL_ATTENTION_LAYERS = 28


class Qwen2(Llama):
    architecture, model_type = "Qwen2ForCausalLM", "qwen2"

    @classmethod
    def configure(cls, file: ConfigFile) -> ModelConfig:
        config = ModelConfig.read(file, cls.model_type)
        return replace(config, qkv_bias=True, windows=qwen_windows(file, config.num_layers))


def qwen_windows(file: ConfigFile, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer. Only the upper layers have one, unless `layer_types` names others."""
    if not file.flag("use_sliding_window", False):
        return (None,) * num_layers
    window = file.optional_size("sliding_window", absent=_SLIDING_WINDOW)
    num_full = min(file.count("max_window_layers", _FULL_ATTENTION_LAYERS), num_layers)
    kinds = {"full_attention": None, "sliding_attention": window}
    layer_types = file.names("layer_types")
    if not layer_types:
        return (None,) * num_full + (window,) * (num_layers - num_full)
    if len(layer_types) != num_layers or not set(layer_types) <= set(kinds):
        raise ConfigError(f"config.json: layer_types must name {' or '.join(kinds)} for each of {num_layers} layers")
    return tuple(kinds[kind] for kind in layer_types)

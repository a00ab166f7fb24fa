"""Qwen2: Llama with biases on queries, keys and values (Yang et al., 2024)."""

from __future__ import annotations

from dataclasses import replace

from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.models.config import ConfigFile, ModelConfig, read_llama_like

# What transformers assumes where config.json is silent.
_SLIDING_WINDOW = 4096
_FULL_ATTENTION_LAYERS = 28


def configure_qwen2(file: ConfigFile) -> ModelConfig:
    return replace(read_llama_like(file, "qwen2"), qkv_bias=True, sliding_window=qwen_sliding_window(file))


def qwen_sliding_window(file: ConfigFile) -> int | None:
    """Qwen may slide on its upper layers only; here all layers do or none. Raises ConfigError for a mixture."""
    if not file.flag("use_sliding_window", False):
        return None
    num_layers = file.size("num_hidden_layers")
    layer_types = file.names("layer_types")
    if not layer_types:
        num_full = min(file.count("max_window_layers", _FULL_ATTENTION_LAYERS), num_layers)
        layer_types = ["full_attention"] * num_full + ["sliding_attention"] * (num_layers - num_full)
    match sorted(set(layer_types)):
        case ["full_attention"]:
            return None
        case ["sliding_attention"]:
            return file.optional_size("sliding_window", absent=_SLIDING_WINDOW)
        case kinds:
            raise ConfigError(f"config.json: layers of different attention are not supported: {', '.join(kinds)}")

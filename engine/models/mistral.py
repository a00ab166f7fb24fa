"""Mistral (Jiang et al., 2023): Llama with a sliding window."""

from __future__ import annotations

from dataclasses import replace

from .config import ConfigFile, ModelConfig
from .llama import Llama

_SLIDING_WINDOW = 4096  # what transformers assumes if config.json does not say


class Mistral(Llama):
    architecture, model_type = "MistralForCausalLM", "mistral"

    @classmethod
    def configure(cls, file: ConfigFile) -> ModelConfig:
        config = ModelConfig.read(file, cls.model_type)
        window = file.optional_size("sliding_window", absent=_SLIDING_WINDOW)
        return replace(config, windows=(window,) * config.num_layers)

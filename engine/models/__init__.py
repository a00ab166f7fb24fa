"""The models that can be served, one file a family, chosen by what config.json calls them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from pagoda_server.checkpoints.progress import Progress, no_progress
from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.models.config import ConfigFile, ModelConfig
from pagoda_server.engine.models.inputs import StepInputs
from pagoda_server.engine.models.llama import Embedded, Llama, configure_llama, configure_mistral
from pagoda_server.engine.models.parameters import Parameters
from pagoda_server.engine.models.qwen2 import configure_qwen2
from pagoda_server.engine.models.qwen3 import configure_qwen3
from pagoda_server.engine.models.weights import draw_weights, load_weights, quantized_weights
from pagoda_server.kernels import Backend

__all__ = ["Embedded", "Llama", "ModelConfig", "StepInputs", "load_model", "read_config"]


@dataclass(frozen=True, slots=True)
class _Family:
    architecture: str
    model_type: str
    configure: Callable[[ConfigFile], ModelConfig]


_FAMILIES = (
    _Family("LlamaForCausalLM", "llama", configure_llama),
    _Family("MistralForCausalLM", "mistral", configure_mistral),
    _Family("Qwen2ForCausalLM", "qwen2", configure_qwen2),
    _Family("Qwen3ForCausalLM", "qwen3", configure_qwen3),
)


def read_config(folder: Path) -> ModelConfig:
    """What the folder's config.json describes. Raises ConfigError if it is broken or not supported."""
    file = ConfigFile(folder)
    return _family(file).configure(file)


def load_model(
    folder: Path, backend: Backend, device: torch.device, dtype: torch.dtype, progress: Progress = no_progress
) -> Llama:
    """A model with its weights on `device`. Raises ConfigError if the checkpoint is broken or not supported.

    Where config.json says `"random_weights": true` there is nothing to load: a model of any size, for measurements.
    """
    config = read_config(folder)
    int4 = quantized_weights(folder) if config.has_int4_weights and backend.takes_int4 else frozenset()
    parameters = Parameters.allocate(config, device, dtype, int4)
    if ConfigFile(folder).flag("random_weights", False):
        draw_weights(parameters.by_name(config))
    else:
        load_weights(folder, parameters.by_name(config), progress)
    return Llama(config, parameters, backend)


def _family(file: ConfigFile) -> _Family:
    named = file.architecture or file.text("model_type", "")
    for family in _FAMILIES:
        if named in (family.architecture, family.model_type):
            return family
    supported = ", ".join(family.architecture for family in _FAMILIES)
    raise ConfigError(f"architecture {named!r} is not supported; {supported} are")

"""The models that can be served. A family is a class in a file of its own, and an entry in FAMILIES below.

To add one, copy the file of the nearest family and write down what the paper says:

names     `architecture` and `model_type`, as config.json has them.
settings  `configure` returns a ModelConfig. `ModelConfig.read` reads what families share. Methods of ConfigFile read
          the rest and raise errors that name the field. Refuse whatever the layers do not compute. A setting that no
          other family has goes into a subclass of ModelConfig.
layers    `make_layer` returns a callable that takes the residual stream, the step's inputs and the layer's pages. Its
          `__init__` asks `Weights` for its parts by their names in the checkpoint. They are read, merged, quantized and
          packed on the way, so a family knows nothing of formats, backends and devices.

A layer is where families differ:

norms       stream.add(mlp(stream.read_normalised(norm)))        before a sublayer, as in Llama
            stream.add(mlp(stream.read()), norm)                 behind it, as in OLMo 2
            stream.add(mlp(stream.read_normalised(one)), other)  on both sides
window      `ModelConfig.windows` has an entry for each layer, which `make_layer` hands to `Attention`.
q/k norms   `Attention` takes HeadNorms: for each head as in Qwen3, or for all heads at once as in OLMo 2.
scale       Kernels divide scores by √head_dim. Another scale becomes a field of AttentionPlan, as the window is.
activation  `GatedMLP` has SwiGLU. Another activation is another class beside it, on an op of its own.
experts     An expert layer is a class that stands where a layer has its `GatedMLP`: it takes x [num_tokens, hidden] and
            returns the same shape. Nothing outside the layer knows which of the two it is, or what `ffn_size` is.

In a step a layer may call only ops of the backend (kernels/backend.py), never torch: on a CPU the compiled ops of a
decode step are recorded, and ops of torch would be missing from the recording. A new op comes with its reference.

Prove it with an entry in MODELS of tests/engine/tiny_models.py. Tests then compare its logits and tokens with those of
transformers, op by op, recorded, and on the kernels of a GPU. To serve the family from GGUF files, add an entry in
checkpoints/gguf_config.py.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ...checkpoints.folder import quoted
from ...checkpoints.progress import Progress, no_progress
from ...kernels import Backend
from ..core.errors import ConfigError
from .config import ConfigFile, ModelConfig
from .decoder import Decoder, Embedded, StepInputs
from .llama import Llama
from .mistral import Mistral
from .olmo2 import Olmo2
from .qwen2 import Qwen2
from .qwen3 import Qwen3
from .weights import Checkpoint, RandomTensors, Weights

__all__ = ["FAMILIES", "Decoder", "Embedded", "ModelConfig", "StepInputs", "load_model", "read_config"]

FAMILIES: tuple[type[Decoder], ...] = (Llama, Mistral, Qwen2, Qwen3, Olmo2)


def read_config(folder: Path) -> ModelConfig:
    """Reads the folder's config.json. Raises ConfigError if it is broken or describes a model that is not supported."""
    file = ConfigFile(folder)
    return _family(file).configure(file)


def load_model(
    folder: Path, backend: Backend, device: torch.device, dtype: torch.dtype, progress: Progress = no_progress
) -> Decoder:
    """Loads a model to `device`. Raises ConfigError if the checkpoint is broken or not supported.

    If config.json says `"random_weights": true` there is nothing to load: a model of any size, for measurements.
    """
    file = ConfigFile(folder)
    family = _family(file)
    tensors = RandomTensors() if file.flag("random_weights", False) else Checkpoint(folder, progress)
    return family(family.configure(file), Weights(tensors, backend, device, dtype))


def _family(file: ConfigFile) -> type[Decoder]:
    named = file.architecture or file.text("model_type", "")
    for family in FAMILIES:
        if named in (family.architecture, family.model_type):
            return family
    supported = ", ".join(family.architecture for family in FAMILIES)
    raise ConfigError(f"architecture {quoted(named)} is not supported; supported: {supported}")

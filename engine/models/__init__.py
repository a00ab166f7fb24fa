"""The models that can be served. A family is a row in families.py, and a function that reads its config.json.

The layers of a dense decoder are described by data (`ModelConfig`), and what can be folded into weights is folded when
they are loaded: the order of rotated dimensions, the scale of scores, of what is added to the stream, and of logits. To
add a family, copy the function of the nearest one and write down what its class in transformers computes:

sizes       `ModelConfig.read` reads what families share, with what this one assumes where config.json does not say.
            Methods of ConfigFile read the rest and raise errors that name the field. A field that no one reads is
            refused by its name, unless inert_fields.py has it; so is a tensor, unless inert_tensors.py has it.
norms       LayerNorms names those before and behind each sublayer; head_norms are those of queries and keys,
            before they are rotated or (`head_norms_behind`) once they have been.
attention   `windows` and `rotations` have an entry for each layer. A rotation may turn a part of a head, or none of it,
            and pairs may be interleaved. `score_scale` replaces 1 / √head_dim.
projections biases, and what the checkpoint calls them: `Names` has those of Llama, and fused ones.
layers      without a gate, in parallel, without a rotation but with learned positions.
multipliers `embedding_scale`, `residual_scale`, `logit_scale`.
experts     `ExpertLayers` says which layers have them, how wide they are, and what their tensors are called. Its
            `Routing` says how a router chooses: how many, by softmax or sigmoid, normalised, in groups.

What none of these says is a new field of ModelConfig, and its place in decoder.py. In a step a layer may call
only ops of the backend (kernels/backend.py), never torch: on a CPU the compiled ops of a decode step are recorded, and
ops of torch would be missing from it.

Prove it with an entry in MODELS of tests/engine/tiny_models.py. Tests then compare its logits and tokens with those of
transformers, op by op, recorded, and on the kernels of a GPU. To serve the family from GGUF files, add an entry in
checkpoints/gguf_families.py.
"""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

import torch

from ...checkpoints.folder import quoted
from ...checkpoints.parsed_once import forget_headers
from ...checkpoints.progress import Progress, no_progress
from ...kernels import INT4, Backend
from ..core.errors import ConfigError
from .config import ModelConfig
from .config_file import ConfigFile
from .decoder import Decoder, Embedded, GroupInputs, StepInputs, attention_share
from .families import FAMILIES, Family
from .inert_tensors import is_inert
from .measured_weights import MeasuredWeights
from .share import WHOLE, Share
from .tensors import Checkpoint, RandomTensors, Tensors
from .weights import Weights

__all__ = [
    "FAMILIES",
    "Decoder",
    "Embedded",
    "GroupInputs",
    "ModelConfig",
    "StepInputs",
    "attention_share",
    "load_model",
    "read_config",
]


def read_config(folder: Path, max_model_len: int | None = None) -> ModelConfig:
    """Reads the folder's config.json, of a model for contexts of `max_model_len` tokens; None: as it was trained.

    Raises ConfigError if the file is broken or describes a model that is not supported.
    """
    return _configured(ConfigFile(folder, max_model_len))


def load_model(
    folder: Path,
    backend: Backend,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress = no_progress,
    max_model_len: int | None = None,
    make_weights: type[Weights] = Weights,
    packs: bool = False,
    share: Share = WHOLE,
) -> Decoder:
    """Loads a model to `device`, with the configuration that `read_config` returns.

    make_weights  MeasuredWeights for one whose sizes alone are wanted
    packs         round weights to 4 bits that the checkpoint holds whole
    share         the part of the model that this rank of a tensor-parallel group has

    Raises ConfigError if the checkpoint is broken or not supported.

    If config.json says `"random_weights": true` there is nothing to load: a model of any size, for measurements.
    """
    file = ConfigFile(folder, max_model_len)
    config = _configured(file)
    if file.flag("random_weights", False):
        tensors: Tensors = RandomTensors(INT4 if config.has_grouped_weights else None)
    else:
        tensors = Checkpoint(folder, progress)
        config = replace(config, names=config.names.as_in(tensors.has))
    if not share.is_whole:  # what cannot be cut is refused before anything is read
        Decoder(config, MeasuredWeights(tensors, backend, device, dtype, packs, share))
    decoder = Decoder(config, make_weights(tensors, backend, device, dtype, packs, share))
    if isinstance(tensors, Checkpoint) and make_weights is Weights:  # others read no tensor
        last = range(config.num_layers, config.num_layers + file.count("num_nextn_predict_layers", 0))
        unused_head = config.names.head if config.tie_word_embeddings else ""
        tensors.refuse_unread(lambda name: is_inert(name, unused_head, config.names.layers, last))
        forget_headers()
    return decoder


def _configured(file: ConfigFile) -> ModelConfig:
    family = _family(file)
    config = family.configure(file, family.model_type)
    file.refuse_unread()
    return config


def _family(file: ConfigFile) -> Family:
    architecture, model_type = file.architecture, file.text("model_type", "")
    for family in FAMILIES:
        names = {architecture, model_type} - {""}
        if names and names <= {family.architecture, family.base_architecture, family.model_type}:
            return family
    supported = list(dict.fromkeys(family.architecture for family in FAMILIES))
    nearest = ", ".join(get_close_matches((architecture or f"{model_type}ForCausalLM")[:64], supported, cutoff=0.0))
    named = f"architecture {quoted(architecture or model_type)}"
    if model_type and any(architecture == family.architecture for family in FAMILIES):
        named += f" with model_type {quoted(model_type)}"
    raise ConfigError(f"{named} is not supported; of the {len(supported)} that are, the nearest names are {nearest}")

"""What is served and what is refused, of every causal family of transformers, and of each family's fields."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.models import read_config
from pagoda_server.engine.models.inert_fields import is_inert
from tests.engine.tiny_models import ShuffledBlocks, load_runner, next_chunk, random_prompt, step, step_logits

_PROMPT_LEN = 53
_ROPE = {"rope_theta": 10_000.0, "factor": 4.0}
_TRAINED = {"original_max_position_embeddings": 64}
_ROPE_VARIANTS: tuple[dict[str, Any], ...] = (
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    {"rope_type": "default", **_ROPE},
    {"rope_type": "linear", **_ROPE},
    {"rope_type": "dynamic", **_ROPE},
    {"rope_type": "dynamic", **_ROPE, "alpha": 3.0},
    {"rope_type": "yarn", **_ROPE, **_TRAINED},
    {"rope_type": "yarn", **_ROPE, **_TRAINED, "truncate": False, "attention_factor": 1.3},
    {"rope_type": "yarn", **_ROPE, **_TRAINED, "llama_4_scaling_beta": 0.5},
    {"rope_type": "llama3", **_ROPE, **_TRAINED, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "longrope", **_TRAINED, "short_factor": [1.5, 2.0, 3.0, 4.0], "long_factor": [3.0, 4.0, 5.0, 6.0]},
    {"rope_type": "proportional", **_ROPE},
)
_ACTIVATIONS = ("gelu", "relu", "relu2", "silu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu", "tanh")
_OTHER_SIZES: Mapping[str, tuple[int | None, ...]] = {
    "hidden_size": (96,),
    "n_embd": (96,),
    "head_dim": (16, 4),
    "intermediate_size": (64,),
    "vocab_size": (101,),
    "num_hidden_layers": (3,),
    "num_attention_heads": (2, 12),
    "num_key_value_heads": (1, 3, 6),
    "max_position_embeddings": (300,),
    "sliding_window": (3, 5, None),
}
# Fields that transformers does not pass on to the mathematics, or that name the model.
_LEFT = ("model_type", "architectures")
ABSENT = object()


@dataclass(frozen=True)
class Outcome:
    """
    kind    equal, refused, or different; invalid: transformers has no such model
    detail  the error's line, or the largest difference of a logit
    """

    kind: str
    detail: str


def outcome_of(fields: Mapping[str, Any], folder: Path) -> Outcome:
    """Save a random model of this config.json, and compare a sequence, in two chunks, with transformers' eager one."""
    path = folder / "config.json"
    path.write_text(json.dumps(fields))
    try:
        read_config(folder)  # most changes end here, before transformers has made a model
    except ConfigError as error:
        return Outcome("refused", str(error))
    try:
        prompt, theirs = _their_logits(folder)
    except Exception as error:  # whatever a class says of a value that it does not know
        return Outcome("invalid", repr(error))
    path.write_text(json.dumps(fields))  # `save_pretrained` has written another
    try:
        runner = load_runner(folder)
    except ConfigError as error:
        return Outcome("refused", str(error))
    if runner.info.max_model_len <= len(prompt):
        return Outcome("refused", f"contexts have at most {runner.info.max_model_len} tokens")
    seq = ShuffledBlocks(runner).sequence(prompt, 1)
    step(runner, [next_chunk(seq, 20)])
    [ours] = step_logits(runner, [next_chunk(seq)])
    difference = float((ours - theirs).abs().max())
    is_equal = difference <= 1e-4 * max(1.0, float(theirs.abs().max()))
    return Outcome("equal" if is_equal else "different", f"{difference:.1e}")


def _their_logits(folder: Path) -> tuple[list[int], torch.Tensor]:
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms, biases and sinks
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    prompt = [token % config.vocab_size for token in random_prompt(_PROMPT_LEN, seed=1)]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    if not logits.isfinite().all():
        raise ValueError("the logits are not finite")
    model.save_pretrained(folder)
    return prompt, logits


def changes(
    config: PreTrainedConfig, saved: Mapping[str, Any], first: int = 0, stride: int = 1
) -> Iterator[tuple[str, Any]]:
    """Fields of a config that may change what is computed, each with other values; ABSENT takes it away.

    first, stride  which of a field's values: at least one
    """
    for name, value in config.to_dict().items():
        if name in _LEFT or (name != "rope_parameters" and is_inert(name, "some value")):
            continue
        if name in saved:
            yield name, ABSENT
        others = [*_other_values(name, value)]
        for other in others[first % min(stride, max(1, len(others))) :: stride]:
            yield name, other


def changed(saved: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    fields = {**saved, name: value}
    if value is ABSENT:
        del fields[name]
    return fields


def _other_values(name: str, value: Any) -> Iterator[Any]:
    if name == "layer_types":
        window, full = "sliding_attention", "full_attention"
        yield from ([window] * 2, [full] * 2, [full, window], [window, full])
    elif name == "rope_parameters":
        kinds = [kind for kind, of_kind in value.items() if isinstance(of_kind, dict)] if value else []
        for variant in _ROPE_VARIANTS:
            yield copy.deepcopy(variant)
            yield from ({**value, kind: copy.deepcopy(variant)} for kind in kinds)
    elif name in _OTHER_SIZES:
        yield from _OTHER_SIZES[name]
    elif name in ("hidden_act", "hidden_activation", "activation_function"):
        yield from _ACTIVATIONS
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value + 2, 1, 2)
    elif isinstance(value, float):
        yield from (value * 1.7 + 0.01, 0.37)
    elif value is None:
        yield from (True, 0.5, 2, [1, 0], "x")
    elif isinstance(value, str):
        yield "x"
    elif isinstance(value, list):
        yield list(reversed(value))

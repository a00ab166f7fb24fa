"""Converts GGUF metadata to config.json, for the architectures of gguf_families.py.

It also finds the sampling that a file recommends.
"""

from __future__ import annotations

import numpy as np

from .folder import CheckpointError
from .gguf_families import ROPE_FACTORS, Family, family_of
from .gguf_family_fields import ModelShape
from .gguf_fields import Fields
from .gguf_file import GgufFile

LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
DEFAULT_TEMPERATURE = 0.8  # llama.cpp's, which a file leaves in place if it recommends other numbers alone


def read_shape(file: GgufFile) -> ModelShape:
    """Read a model's sizes. Raises CheckpointError for an architecture or variant that is not supported."""
    family, fields = family_of(file), Fields(file)
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.name} has no tensor token_embd.weight")
    hidden_size, num_heads = fields.size("embedding_length"), fields.size("attention.head_count")
    head_dim = fields.size("attention.key_length", max(1, hidden_size // num_heads))
    if (length := fields.size("attention.value_length", head_dim)) != head_dim:
        raise fields.error("attention.value_length", f"{length}; only the head size, {head_dim}, is supported")
    rotary_dim = fields.count("rope.dimension_count", head_dim)
    if rotary_dim != head_dim and not (family.rotates_part and rotary_dim <= head_dim):
        raise fields.error("rope.dimension_count", f"{rotary_dim}; only the head size, {head_dim}, is supported")
    if rotary_dim % 2 and rotary_dim < head_dim:
        raise fields.error("rope.dimension_count", f"{rotary_dim}; pairs are rotated")
    num_kv_heads = fields.count("attention.head_count_kv", num_heads)
    if num_kv_heads < 1 or head_dim % 2:
        raise CheckpointError(
            f"{file.name} has {num_heads} heads and {num_kv_heads} key-value heads of {head_dim} values; heads must"
            " exist, and have an even number of values"
        )
    if num_heads % num_kv_heads:
        raise fields.error("attention.head_count_kv", f"{num_kv_heads}, which do not divide {num_heads} heads")
    num_further = fields.count("nextn_predict_layers", 0)
    num_layers = fields.size("block_count") - num_further
    if not 0 < num_layers <= num_layers + num_further <= len(file.tensors):
        raise CheckpointError(f"{file.name} names {num_layers} layers, but holds {len(file.tensors)} tensors in all")
    num_experts = (fields.size if family.experts else fields.count)("expert_count", 0)
    if num_experts and not family.experts:
        raise fields.error("expert_count", f"{num_experts}; experts of this architecture are not supported")
    first, step = fields.count("leading_dense_block_count", 0), fields.size("interleave_moe_layer_step", 1)
    is_expert = tuple(num_experts > 0 and layer >= first and (layer + 1) % step == 0 for layer in range(num_layers))
    if num_experts and not any(is_expert):
        raise fields.error("expert_count", f"{num_experts}, but no layer has experts")
    return ModelShape(
        num_layers=num_layers,
        num_further=num_further,
        hidden_size=hidden_size,
        ffn_size=fields.size("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        biases=frozenset(
            field for field, stems in family.biases.items() if not field or f"blk.0.{stems[0]}.bias" in file.tensors
        ),
        is_tied="output.weight" not in file.tensors,
        num_experts=num_experts,
        is_expert=is_expert,
    )


def config_of(file: GgufFile, shape: ModelShape) -> dict[str, object]:
    """Make config.json, with `rope_theta` and `rope_scaling` where every version of transformers finds them.

    Raises CheckpointError for a field that changes what is computed, but was not read.
    """
    family, fields = family_of(file), Fields(file)
    config: dict[str, object] = {
        "architectures": [family.transformers_class],
        "model_type": family.model_type or file.architecture,
        "dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        family.activation[0]: family.activation[1],
        "max_position_embeddings": _context_len(fields, family),
        family.norm_eps[1]: fields.norm_eps(family.norm_eps[0]),
        "rope_theta": fields.positive("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(fields, shape),
        "tie_word_embeddings": shape.is_tied,
        **{field: field in shape.biases for field in family.biases if field},
    }
    if family.rotates_part:
        config["partial_rotary_factor"] = shape.rotary_dim / shape.head_dim
    config |= family.fields(fields, shape, config)
    for name in ("bos", "eos"):
        if file.has(key := f"tokenizer.ggml.{name}_token_id"):
            config[f"{name}_token_id"] = file.integer(key)
    fields.refuse_unread()
    return config


def _context_len(fields: Fields, family: Family) -> int:
    """The context length, at most a window that is not computed: within it, windows change nothing."""
    context_len = fields.size("context_length")
    if family.has_windows:
        return context_len
    window = fields.count("attention.sliding_window", 0)
    return min(context_len, window) if window else context_len


def _rope_scaling(fields: Fields, shape: ModelShape) -> dict[str, object] | None:
    original = fields.count("rope.scaling.original_context_length", 0)
    if LONG_FACTORS in fields.file.tensors:
        return _longrope(fields, original)
    if ROPE_FACTORS in fields.file.tensors:
        return _llama3_scaling(fields, shape)
    factor = fields.positive("rope.scaling.factor", 1.0)
    # llama.cpp takes a factor without a type for linear.
    kind = fields.text("rope.scaling.type", "none" if factor == 1 else "linear")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise fields.error("rope.scaling.type", f"{kind!r}; supported: linear, yarn, llama3, longrope with its factors")
    scaling: dict[str, object] = {"rope_type": kind, "factor": fields.positive("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = fields.size("rope.scaling.original_context_length")
        for name in ("beta_fast", "beta_slow"):
            if fields.has(key := f"rope.scaling.yarn_{name}"):
                scaling[name] = fields.positive(key)
    return scaling


def _longrope(fields: Fields, original: int) -> dict[str, object]:
    """The factors of each pair of dimensions in short and long contexts (LongRoPE; Ding et al., 2024)."""
    if (kind := fields.text("rope.scaling.type", "longrope")) not in ("longrope", "none"):
        raise fields.error("rope.scaling.type", f"{kind!r} beside tensors of longrope")
    if not original:
        raise CheckpointError(
            f"{fields.file.name} has no metadata field {fields.key('rope.scaling.original_context_length')}"
        )
    scaling: dict[str, object] = {
        "rope_type": "longrope",
        "short_factor": _factors(fields.file, SHORT_FACTORS),
        "long_factor": _factors(fields.file, LONG_FACTORS),
        "original_max_position_embeddings": original,
    }
    if fields.has("rope.scaling.attn_factor"):
        scaling["attention_factor"] = fields.positive("rope.scaling.attn_factor")
    return scaling


def _factors(file: GgufFile, name: str) -> list[float]:
    tensor = file.tensors.get(name)
    if tensor is None or len(tensor.shape) != 1 or tensor.kind != "F32":
        raise CheckpointError(f"{file.name} needs {name}, a list of float32")
    found = tensor.data.view(np.float32)[0]
    if not (np.isfinite(found) & (found > 0)).all():
        raise CheckpointError(f"{file.name}: {name} has values that are not positive numbers")
    return [float(str(value)) for value in found]


def _llama3_scaling(fields: Fields, shape: ModelShape) -> dict[str, object]:
    """Recover the scaling parameters from the frequency factors that the file holds in their place.

    All published models with this scaling share these parameters except `factor`, that of the slowest pair.
    """
    file, size = fields.file, shape.rotary_dim
    factors = file.tensors[ROPE_FACTORS]
    if factors.shape != (size // 2,) or factors.kind != "F32":
        raise _other_factors(file)
    found = factors.data.view(np.float32)[0]
    factor, low_freq_factor, high_freq_factor, original_len = float(found[-1]), 1.0, 4.0, 8192
    theta = fields.positive("rope.freq_base", 10000.0)
    wavelengths = 2 * np.pi * theta ** (np.arange(0, size, 2) / size)
    smooth = (original_len / wavelengths - low_freq_factor) / (high_freq_factor - low_freq_factor)
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = 1 / (np.clip(smooth, 0, 1) + (1 - np.clip(smooth, 0, 1)) / factor)
    if not (factor > 0 and np.allclose(found, expected, rtol=1e-3)):
        raise _other_factors(file)
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low_freq_factor,
        "high_freq_factor": high_freq_factor,
        "original_max_position_embeddings": original_len,
    }


def _other_factors(file: GgufFile) -> CheckpointError:
    return CheckpointError(f"{file.name}: {ROPE_FACTORS} has frequency factors that differ from those of Llama 3")


def recommended_sampling(file: GgufFile) -> dict[str, object]:
    """The sampling that a file recommends, as generation_config.json has it: transformers' names, and their meaning."""
    found: dict[str, object] = {}
    for key, name in (("temp", "temperature"), ("top_p", "top_p"), ("min_p", "min_p")):
        if file.has(f"general.sampling.{key}"):
            found[name] = file.number(f"general.sampling.{key}")
    if file.has("general.sampling.top_k"):
        found["top_k"] = max(0, file.integer("general.sampling.top_k"))  # llama.cpp keeps every token below 1
    if found:
        found = {"do_sample": True, "temperature": DEFAULT_TEMPERATURE, **found}
    if file.number("general.sampling.temp", 1.0) <= 0:  # llama.cpp then takes the most likely token
        found = {"do_sample": False}
    if file.has("general.sampling.penalty_repeat"):
        found["repetition_penalty"] = file.number("general.sampling.penalty_repeat")
    return found

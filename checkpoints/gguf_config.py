"""Converts GGUF metadata to config.json, for the architectures in FAMILIES, where a new family is an entry.

It also finds the sampling that a file recommends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from .folder import CheckpointError, quoted
from .gguf_file import GgufFile

ROPE_FACTORS = "rope_freqs.weight"
GEMMA3_27B_LAYERS = 62
DEFAULT_TEMPERATURE = 0.8  # llama.cpp's, which a file leaves in place if it recommends other numbers alone

_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_SANDWICH_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture's files differ from those of others.

    norms               of a layer: the GGUF's names, and the checkpoint's
    interleaved_rotary  the GGUF keeps the rows of Q and K in the order of interleaved rotary pairs
    qkv_bias            None: the file decides
    norm_offset         what the GGUF has added to the weights of norms
    model_type          in config.json; empty: the GGUF's name of the architecture
    activation          the name and value of its field in config.json
    has_windows         a layer's window is computed; otherwise the context is cut to the window
    fields              further fields of config.json
    """

    transformers_class: str
    norms: Mapping[str, str]
    interleaved_rotary: bool = False
    qkv_bias: bool | None = None
    norm_offset: float = 0.0
    model_type: str = ""
    activation: tuple[str, str] = ("hidden_act", "silu")
    has_windows: bool = False
    fields: Callable[[GgufFile, ModelShape], Mapping[str, object]] = lambda file, shape: {}


def _gemma3_fields(file: GgufFile, shape: ModelShape) -> Mapping[str, object]:
    """What Gemma's files leave out is the same in all sizes, but that the largest scales scores by another size."""
    is_largest = shape.num_layers == GEMMA3_27B_LAYERS
    return {
        "sliding_window": file.integer("gemma3.attention.sliding_window"),
        "rope_local_base_freq": 10_000.0,
        "query_pre_attn_scalar": shape.hidden_size // shape.num_heads if is_largest else shape.head_dim,
    }


FAMILIES = {
    "llama": Family("LlamaForCausalLM", _PRE_NORMS, interleaved_rotary=True),
    "qwen2": Family("Qwen2ForCausalLM", _PRE_NORMS, qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", _PRE_NORMS | _QK_NORMS, qkv_bias=False),
    "olmo2": Family("Olmo2ForCausalLM", _POST_NORMS | _QK_NORMS, qkv_bias=False),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        _SANDWICH_NORMS | _QK_NORMS,
        qkv_bias=False,
        norm_offset=1.0,
        model_type="gemma3_text",
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        has_windows=True,
        fields=_gemma3_fields,
    ),
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that both the configuration and the weights depend on; queries, keys and values share `head_dim`."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    qkv_bias: bool
    mlp_bias: bool
    tied_embeddings: bool


def read_shape(file: GgufFile) -> ModelShape:
    """Read a model's sizes. Raises CheckpointError for an architecture or variant that is not supported."""
    arch = file.architecture
    if arch not in FAMILIES:
        raise CheckpointError(
            f"{file.name}: architecture {quoted(arch)} is not supported; supported: {', '.join(FAMILIES)}"
        )
    if file.integer(f"{arch}.expert_count", 0):
        raise CheckpointError(f"{file.name} holds a mixture of experts, which is not supported")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.name} has no tensor token_embd.weight")
    hidden_size, num_heads = file.integer(f"{arch}.embedding_length"), file.integer(f"{arch}.attention.head_count")
    head_dim = file.integer(f"{arch}.attention.key_length", hidden_size // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (length := file.integer(f"{arch}.{key}", head_dim)) != head_dim:
            raise CheckpointError(
                f"{file.name}: {arch}.{key} is {length}; only the head size, {head_dim}, is supported"
            )
    num_kv_heads = file.integer(f"{arch}.attention.head_count_kv", num_heads)
    if min(num_heads, num_kv_heads, head_dim) < 1 or head_dim % 2:
        raise CheckpointError(
            f"{file.name} has {num_heads} heads and {num_kv_heads} key-value heads of {head_dim} values; heads must"
            " exist, and have an even number of values"
        )
    num_layers = file.integer(f"{arch}.block_count")
    if num_layers > len(file.tensors):
        raise CheckpointError(f"{file.name} names {num_layers} layers, but holds {len(file.tensors)} tensors in all")
    qkv_bias = FAMILIES[arch].qkv_bias
    return ModelShape(
        family=arch,
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_size=file.integer(f"{arch}.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        qkv_bias="blk.0.attn_q.bias" in file.tensors if qkv_bias is None else qkv_bias,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        tied_embeddings="output.weight" not in file.tensors,
    )


def config_of(file: GgufFile, shape: ModelShape) -> dict[str, object]:
    """Make config.json, with `rope_theta` and `rope_scaling` where every version of transformers finds them."""
    arch = shape.family
    config: dict[str, object] = {
        "architectures": [FAMILIES[arch].transformers_class],
        "model_type": FAMILIES[arch].model_type or arch,
        "dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        FAMILIES[arch].activation[0]: FAMILIES[arch].activation[1],
        "max_position_embeddings": _context_len(file),
        "rms_norm_eps": file.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": file.number(f"{arch}.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, shape),
        "tie_word_embeddings": shape.tied_embeddings,
        **FAMILIES[arch].fields(file, shape),
    }
    if arch != "qwen2":  # whose biases are part of the architecture
        config["attention_bias"] = shape.qkv_bias
    if arch == "llama":
        config["mlp_bias"] = shape.mlp_bias
    for name in ("bos", "eos"):
        if file.has(key := f"tokenizer.ggml.{name}_token_id"):
            config[f"{name}_token_id"] = file.integer(key)
    return config


def _context_len(file: GgufFile) -> int:
    """The context length, at most a window that is not computed: within it, windows change nothing."""
    context_len = file.integer(f"{file.architecture}.context_length")
    if FAMILIES[file.architecture].has_windows:
        return context_len
    window = file.integer(f"{file.architecture}.attention.sliding_window", 0)
    return min(context_len, window) if window else context_len


def _rope_scaling(file: GgufFile, shape: ModelShape) -> dict[str, object] | None:
    prefix = f"{shape.family}.rope.scaling"
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, shape)
    kind = file.text(f"{prefix}.type", "none")
    if kind == "none":
        return None
    scaling: dict[str, object] = {"rope_type": kind, "factor": file.number(f"{prefix}.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = file.integer(f"{prefix}.original_context_length")
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if file.has(f"{prefix}.{key}"):
                scaling[name] = file.number(f"{prefix}.{key}")
    elif kind != "linear":
        raise CheckpointError(
            f"{file.name} scales its rotary frequencies by {quoted(repr(kind))}; supported: linear, yarn, llama3"
        )
    return scaling


def _llama3_scaling(file: GgufFile, shape: ModelShape) -> dict[str, object]:
    """Recover the scaling parameters from the frequency factors that the file holds in their place.

    All published Llama 3.1, 3.2 and 3.3 models share these parameters except `factor`, that of the slowest pair.
    """
    factors = file.tensors[ROPE_FACTORS]
    if factors.shape != (shape.head_dim // 2,) or factors.kind != "F32":
        raise _other_factors(file)
    found = factors.data.view(np.float32)[0]
    factor, low_freq_factor, high_freq_factor, original_len = float(found[-1]), 1.0, 4.0, 8192
    theta = file.number(f"{shape.family}.rope.freq_base", 10000.0)
    wavelengths = 2 * np.pi * theta ** (np.arange(0, shape.head_dim, 2) / shape.head_dim)
    smooth = (original_len / wavelengths - low_freq_factor) / (high_freq_factor - low_freq_factor)
    expected = 1 / (np.clip(smooth, 0, 1) + (1 - np.clip(smooth, 0, 1)) / factor)
    if not np.allclose(found, expected, rtol=1e-3):
        raise _other_factors(file)
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low_freq_factor,
        "high_freq_factor": high_freq_factor,
        "original_max_position_embeddings": original_len,
    }


def _other_factors(file: GgufFile) -> CheckpointError:
    return CheckpointError(f"{file.name} has rotary frequency factors that differ from those of Llama 3")


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

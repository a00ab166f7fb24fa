"""Tiny GGUF files of every supported family, written from models that transformers makes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import TokenType
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pagoda_server.checkpoints.synthetic import letters_of_bytes

SIZES = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
}
# Their files hold 1 + weight of each norm, which rounds it.
ROUNDED = {"gemma3": (Gemma3TextConfig, Gemma3ForCausalLM)}
ARCHITECTURES = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
# Whose conversion changes the order of rows for interleaved rotary pairs, and adds 1 to the weights of norms.
PERMUTED = ("llama", "smollm3", "granite", "granitemoe", "arcee", "mistral3", "olmo")
PLUS_ONE = ("gemma", "gemma2", "gemma3", "nemotron")
LAYER_NORM_EPS = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
GATING = {"glm4moe": 2, "dots1": 2, "minimax-m2": 2}
# What transformers calls tensors in memory, and the table.
RENAMED = {
    "block_sparse_moe.router": "block_sparse_moe.router.layer",
    "block_sparse_moe.experts": "mlp.experts",
    "gate.moe_statics": "moe_statics",
    "e_score_correction_bias": "e_score_correction.bias",
    "sinks": "sinks.weight",
    "shared_mlp.output_linear": "mlp.shared_expert.down_proj",
}
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w")]


@dataclass
class TinyModel:
    """A model to write as a GGUF file. Tests may change metadata and tensors first; None removes an entry."""

    family: str
    model: torch.nn.Module
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32
    vectors: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32
    kinds: dict[str, gguf.GGMLQuantizationType] = field(default_factory=dict)  # of tensors by name, in place of these
    metadata: dict[str, object] = field(default_factory=dict)
    tensors: dict[str, np.ndarray | None] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.family)
        for key, value in (_metadata(self.family, self.model) | bpe_vocabulary() | self.metadata).items():
            _add(writer, key, value)
        for name, values in (gguf_tensors(self.family, self.model) | self.tensors).items():
            if values is None:
                continue
            kind = self.kinds.get(name, self.vectors if values.ndim == 1 else self.quantisation)
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def tiny_model(family: str, seed: int = 0, **config: object) -> TinyModel:
    torch.manual_seed(seed)
    config_class, model_class = (MODELS | ROUNDED)[family]
    model = model_class(config_class(**(SIZES | config)))
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, or swapping two of them would go unnoticed
            parameter.normal_(0.0, 0.05)
    return TinyModel(family, model.eval())


def gguf_tensors(family: str, model: torch.nn.Module) -> dict[str, np.ndarray]:
    """The tensors of a model as llama.cpp's conversion writes them, by the names of its own table."""
    config, tensors = model.config, {}
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": getattr(config, "num_key_value_heads", None)}
    for name, parameter in model.state_dict().items():
        if name in ("lm_head.weight", "embed_out.weight") and config.tie_word_embeddings:
            continue
        values = parameter.float().numpy()
        if family in PERMUTED and (projection := name.split(".")[-2]) in heads:
            values = interleave(values, heads[projection])
        if ".act_fn." in name:  # metadata
            continue
        if family == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            values = np.ascontiguousarray(values.T)
        if family == "gptneox" and ".query_key_value." in name:  # of each head, to all queries first
            by_head = values.reshape(config.num_attention_heads, 3, -1, *values.shape[1:])
            values = by_head.swapaxes(0, 1).reshape(values.shape)
        for part, of_part in split_experts(family, name, values).items():
            tensors[names.get_name(part, try_suffixes=(".weight", ".bias"))] = of_part + np.float32(
                family in PLUS_ONE and name.endswith("norm.weight")
            )
    return tensors


def split_experts(family: str, name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """Gate and up of experts apart, as [experts, out, in]; everything by names that the table has."""
    for ours, theirs in RENAMED.items():
        name = name.replace(ours, theirs)
    if name.endswith("shared_expert_gate.weight") or "e_score_correction" in name:
        return {name: values.reshape(-1)}
    if name.endswith("shared_mlp.input_linear.weight"):
        gate, up = np.split(values, 2)
        prefix = name.replace("shared_mlp.input_linear.weight", "mlp.shared_expert")
        return {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up}
    prefix, _, kind = name.rpartition(".")
    if kind not in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"):
        return {name: values}
    suffix = "bias" if kind.endswith("_bias") else "weight"
    if family == "gpt-oss" and suffix == "weight":
        values = values.swapaxes(1, 2)
    if kind.startswith("down"):
        return {f"{prefix}.down_proj.{suffix}": np.ascontiguousarray(values)}
    half = values.shape[1] // 2
    gate, up = (values[:, ::2], values[:, 1::2]) if family == "gpt-oss" else (values[:, :half], values[:, half:])
    return {f"{prefix}.gate_proj.{suffix}": np.array(gate), f"{prefix}.up_proj.{suffix}": np.array(up)}


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """The order of Q's and K's rows in a llama GGUF, where rows of a head's two halves alternate."""
    by_half = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(by_half.swapaxes(1, 2).reshape(values.shape))


def _metadata(family: str, model: torch.nn.Module) -> dict[str, object]:
    """What llama.cpp's conversion reads from config.json, and xIELU's numbers of each layer."""
    config: Any = model.config

    def of(*names: str) -> Any:
        return next((value for name in names if (value := getattr(config, name, None)) is not None), None)

    ropes = config.rope_parameters if hasattr(config, "rope_parameters") else {}
    rope = ropes.get("full_attention", ropes)
    if alpha := rope.get("alpha"):  # Hunyuan's
        rope = {"rope_theta": rope["rope_theta"] * alpha ** (config.head_dim / (config.head_dim - 2))}
    head_dim = of("head_dim") or config.hidden_size // config.num_attention_heads
    kind, layer_types = rope.get("rope_type"), of("layer_types")
    is_yarn, pattern = kind == "yarn", [each == "sliding_attention" for each in layer_types or []]
    has_window = of("sliding_window") is not None and of("use_sliding_window") is not False
    fields = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": of("intermediate_size", "n_inner") or 4 * config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": 1 if of("multi_query") else of("num_key_value_heads"),
        "attention.layer_norm_rms_epsilon": of("rms_norm_eps"),
        "attention.layer_norm_epsilon": 1e-5 if family == "olmo" else of(*LAYER_NORM_EPS),
        "rope.freq_base": rope.get("rope_theta"),
        "rope.freq_base_swa": ropes.get("sliding_attention", {}).get("rope_theta"),
        "rope.scaling.type": kind if kind in ("linear", "yarn") else None,
        "rope.scaling.factor": rope.get("factor") if kind in ("linear", "yarn") else None,
        "rope.scaling.original_context_length": rope.get("original_max_position_embeddings") if is_yarn else None,
        "rope.scaling.yarn_log_multiplier": rope.get("mscale_all_dim"),
        "attention.temperature_scale": rope.get("llama_4_scaling_beta"),
        "attention.sliding_window": config.sliding_window if has_window and family != "starcoder2" else None,
        "attention.sliding_window_pattern": pattern if has_window and any(pattern) else None,
        "attn_logit_softcapping": of("attn_logit_softcapping"),
        "final_logit_softcapping": of("final_logit_softcapping"),
        "embedding_scale": of("embedding_multiplier"),
        "attention.scale": of("attention_multiplier"),
        "residual_scale": of("residual_multiplier"),
        "logit_scale": of("logits_scaling", "logit_scale"),
        "use_parallel_residual": of("use_parallel_residual"),
        "expert_count": of("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
        "expert_used_count": of("num_experts_per_tok", "moe_k"),
        "expert_group_count": of("n_group"),
        "expert_group_used_count": of("topk_group"),
        "expert_feed_forward_length": of("moe_intermediate_size"),
        "expert_shared_count": of("n_shared_experts", "moe_num_shared_experts"),
        "expert_weights_scale": of("routed_scaling_factor"),
        "expert_weights_norm": of("norm_topk_prob") if of("n_routed_experts") else None,
        "expert_gating_func": GATING.get(family),
        "leading_dense_block_count": of("first_k_dense_replace", "moe_layer_start_index"),
        "interleave_moe_layer_step": of("moe_layer_interval"),
    }
    if of("head_dim"):
        fields |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if (share := rope.get("partial_rotary_factor")) is not None:
        fields["rope.dimension_count"] = int(head_dim * share)
    if kind == "longrope":
        fields["rope.scaling.original_context_length"] = config.original_max_position_embeddings
    numbers = {
        f"xielu.{kind}": [layer.mlp.act_fn.state_dict()[kind].item() for layer in model.model.layers]
        for kind in (("alpha_p", "alpha_n", "beta", "eps") if family == "apertus" else ())
    }
    return {f"{family}.{name}": value for name, value in fields.items() if value is not None} | numbers


def bpe_vocabulary() -> dict[str, object]:
    tokens = letters_of_bytes() + ["".join(pair) for pair in WORDS] + SPECIAL
    kinds = [TokenType.NORMAL] * (len(tokens) - len(SPECIAL)) + [TokenType.CONTROL] * len(SPECIAL)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in WORDS],
        "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case str():
            writer.add_string(key, value)
        case float():
            writer.add_float32(key, value)
        case int():
            writer.add_uint32(key, value)
        case list():
            writer.add_array(key, value)

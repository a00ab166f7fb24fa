"""Fields of config.json that not every family has, from the metadata of GGUF files: a function for each family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .folder import CheckpointError
from .gguf_fields import Fields

GATE_UP = "ffn_gate_up_exps"  # gate and up of experts in one tensor, which any family may have
GEMMA3_27B_LAYERS, GEMMA2_27B_LAYERS = 62, 46
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3  # what expert_gating_func means

Config = Mapping[str, Any]  # the fields of config.json that are known already


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What both the configuration and the weights depend on; queries, keys and values share `head_dim`.

    num_further  layers behind those, which predict a token after the next one and are not computed
    ffn_size     width of a dense feed-forward layer
    biases       the groups of biases that the file has, by their fields of config.json
    num_experts  0: all layers are dense
    is_expert    for each layer, whether it has experts
    """

    num_layers: int
    num_further: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    vocab_size: int
    biases: frozenset[str]
    is_tied: bool
    num_experts: int
    is_expert: tuple[bool, ...]


def gemma2(fields: Fields, shape: ModelShape, config: Config) -> Config:
    """What Gemma's files leave out is the same in all sizes, but that the largest scales scores by another size."""
    is_largest = shape.num_layers == GEMMA2_27B_LAYERS
    return {
        "sliding_window": fields.size("attention.sliding_window", 4096),
        "layer_types": fields.layer_types(shape.num_layers, 2),
        "query_pre_attn_scalar": shape.hidden_size // shape.num_heads if is_largest else shape.head_dim,
        "attn_logit_softcapping": fields.positive("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.positive("final_logit_softcapping", 30.0),
    }


def gemma3(fields: Fields, shape: ModelShape, config: Config) -> Config:
    is_largest = shape.num_layers == GEMMA3_27B_LAYERS
    return {
        "sliding_window": fields.size("attention.sliding_window"),
        "layer_types": fields.layer_types(shape.num_layers, 6),
        "rope_local_base_freq": fields.positive("rope.freq_base_swa", 10_000.0),
        "query_pre_attn_scalar": shape.hidden_size // shape.num_heads if is_largest else shape.head_dim,
    }


def olmo3(fields: Fields, shape: ModelShape, config: Config) -> Config:
    """Layers with a window rotate without the scaling of the others."""
    local = fields.positive("rope.freq_base_swa", config["rope_theta"])
    whole = {"rope_theta": config["rope_theta"], **(config["rope_scaling"] or {"rope_type": "default"})}
    return {
        "sliding_window": fields.size("attention.sliding_window"),
        "layer_types": fields.layer_types(shape.num_layers, 4),
        "rope_parameters": {
            "full_attention": whole,
            "sliding_attention": {"rope_theta": local, "rope_type": "default"},
        },
        "rope_scaling": None,
    }


def phi3(fields: Fields, shape: ModelShape, config: Config) -> Config:
    window, scaling = fields.count("attention.sliding_window", 0), config["rope_scaling"]
    if scaling is None or scaling["rope_type"] != "longrope":
        return {"sliding_window": window or None}
    original = scaling["original_max_position_embeddings"]
    return {"sliding_window": window or None, "original_max_position_embeddings": original}


def granite(fields: Fields, shape: ModelShape, config: Config) -> Config:
    fields.expect("rope.scaling.finetuned", True)  # false: llama.cpp does not rotate
    return {
        "embedding_multiplier": fields.positive("embedding_scale", 1.0),
        "attention_multiplier": fields.positive("attention.scale", shape.head_dim**-0.5),
        "residual_multiplier": fields.positive("residual_scale", 1.0),
        "logits_scaling": fields.positive("logit_scale"),
    }


def stablelm(fields: Fields, shape: ModelShape, config: Config) -> Config:
    """As in llama.cpp, sublayers are parallel if layers have one norm."""
    is_parallel = "blk.0.ffn_norm.weight" not in fields.file.tensors
    fields.expect("use_parallel_residual", is_parallel)
    return {"use_parallel_residual": is_parallel}


def gpt_neox(fields: Fields, shape: ModelShape, config: Config) -> Config:
    return {"use_parallel_residual": fields.flag("use_parallel_residual", True)}


def cohere(fields: Fields, shape: ModelShape, config: Config) -> Config:
    return {"logit_scale": fields.positive("logit_scale")}


def cohere2(fields: Fields, shape: ModelShape, config: Config) -> Config:
    local = fields.positive("rope.freq_base_swa", config["rope_theta"])
    if local != config["rope_theta"]:
        raise fields.error("rope.freq_base_swa", f"{local}; only that of all layers is supported")
    return {
        "logit_scale": fields.positive("logit_scale"),
        "sliding_window": fields.size("attention.sliding_window"),
        "layer_types": fields.layer_types(shape.num_layers, 4),
    }


def exaone4(fields: Fields, shape: ModelShape, config: Config) -> Config:
    if not (window := fields.count("attention.sliding_window", 0)):
        return {"sliding_window": None, "layer_types": ["full_attention"] * shape.num_layers}
    return {"sliding_window": window, "layer_types": fields.layer_types(shape.num_layers, 4)}


def ministral3(fields: Fields, shape: ModelShape, config: Config) -> Config:
    rope = {"rope_theta": config["rope_theta"], **(config["rope_scaling"] or {"rope_type": "default"})}
    if fields.has("rope.scaling.yarn_log_multiplier"):
        rope |= {"mscale": 1.0, "mscale_all_dim": fields.positive("rope.scaling.yarn_log_multiplier")}
    if fields.has("attention.temperature_scale"):
        rope["llama_4_scaling_beta"] = fields.positive("attention.temperature_scale")
    return {"rope_parameters": rope, "rope_scaling": None}


def _width(fields: Fields, shape: ModelShape, stem: str) -> int:
    """How many rows a matrix has, of each expert or of the one that computes every token."""
    prefix, tensors = f"blk.{shape.is_expert.index(True)}", fields.file.tensors
    name, fused = f"{prefix}.{stem}.weight", f"{prefix}.{GATE_UP}.weight"
    if name in tensors:
        return tensors[name].shape[-2]
    if stem != "ffn_gate_exps" or fused not in tensors:
        raise CheckpointError(f"{fields.file.name} has no tensor {name}")
    return tensors[fused].shape[-2] // 2


def local_experts(fields: Fields, shape: ModelShape, config: Config) -> Config:
    fields.expect("expert_gating_func", SOFTMAX)
    fields.expect("expert_weights_norm", True)
    return {"num_local_experts": shape.num_experts, "num_experts_per_tok": fields.size("expert_used_count")}


def granite_moe(fields: Fields, shape: ModelShape, config: Config) -> Config:
    return {**granite(fields, shape, config), **local_experts(fields, shape, config)}


def granite_moe_shared(fields: Fields, shape: ModelShape, config: Config) -> Config:
    shared = _width(fields, shape, "ffn_gate_shexp")
    return {**granite_moe(fields, shape, config), "shared_intermediate_size": shared}


def apertus(fields: Fields, shape: ModelShape, config: Config) -> Config:
    return {"rope_scaling": config["rope_scaling"] or {"rope_type": "default"}}


def _qwen_moe(fields: Fields, shape: ModelShape, is_normalized: bool) -> Config:
    fields.expect("expert_gating_func", SOFTMAX)
    return {
        "num_experts": shape.num_experts,
        "num_experts_per_tok": fields.size("expert_used_count"),
        "moe_intermediate_size": _width(fields, shape, "ffn_gate_exps"),
        "norm_topk_prob": fields.flag("expert_weights_norm", is_normalized),
    }


def qwen2_moe(fields: Fields, shape: ModelShape, config: Config) -> Config:
    shared = _width(fields, shape, "ffn_gate_shexp")
    return {**_qwen_moe(fields, shape, False), "shared_expert_intermediate_size": shared}


def qwen3_moe(fields: Fields, shape: ModelShape, config: Config) -> Config:
    return _qwen_moe(fields, shape, True)


def olmoe(fields: Fields, shape: ModelShape, config: Config) -> Config:
    found = dict(_qwen_moe(fields, shape, False))
    return found | {"intermediate_size": found.pop("moe_intermediate_size")}


def deepseek_moe(fields: Fields, shape: ModelShape, config: Config) -> Config:
    """Experts chosen by sigmoids, as in DeepSeek-V3, behind some dense layers."""
    fields.expect("expert_gating_func", SIGMOID)
    return {
        "n_routed_experts": shape.num_experts,
        "num_experts_per_tok": fields.size("expert_used_count"),
        "moe_intermediate_size": _width(fields, shape, "ffn_gate_exps"),
        "n_shared_experts": fields.size("expert_shared_count"),
        "first_k_dense_replace": shape.is_expert.index(True),
        "routed_scaling_factor": fields.positive("expert_weights_scale", 1.0),
        "norm_topk_prob": fields.flag("expert_weights_norm", False),
        "n_group": max(1, fields.count("expert_group_count", 1)),
        "topk_group": max(1, fields.count("expert_group_used_count", 1)),
    }


def glm4_moe(fields: Fields, shape: ModelShape, config: Config) -> Config:
    has_norms = "blk.0.attn_q_norm.weight" in fields.file.tensors
    return {**deepseek_moe(fields, shape, config), "use_qk_norm": has_norms}


def ernie_moe(fields: Fields, shape: ModelShape, config: Config) -> Config:
    fields.expect("expert_gating_func", SOFTMAX)
    return {
        "moe_num_experts": shape.num_experts,
        "moe_k": fields.size("expert_used_count"),
        "moe_intermediate_size": _width(fields, shape, "ffn_gate_exps"),
        "moe_num_shared_experts": fields.size("expert_shared_count"),
        "moe_layer_start_index": fields.count("leading_dense_block_count", 0),
        "moe_layer_interval": fields.size("interleave_moe_layer_step", 1),
        "moe_layer_end_index": -1,
    }


def minimax_m2(fields: Fields, shape: ModelShape, config: Config) -> Config:
    fields.expect("expert_gating_func", SIGMOID)
    return {
        "num_local_experts": shape.num_experts,
        "num_experts_per_tok": fields.size("expert_used_count"),
        "intermediate_size": _width(fields, shape, "ffn_gate_exps"),
        "rotary_dim": shape.rotary_dim,
    }


def gpt_oss(fields: Fields, shape: ModelShape, config: Config) -> Config:
    """OpenAI's model does not round the bounds of yarn to whole dimensions."""
    fields.expect("expert_gating_func", SOFTMAX_OF_CHOSEN)
    scaling = config["rope_scaling"]
    if scaling is not None and scaling["rope_type"] == "yarn":
        scaling = {**scaling, "truncate": False}
    return {
        "num_local_experts": shape.num_experts,
        "num_experts_per_tok": fields.size("expert_used_count"),
        "intermediate_size": _width(fields, shape, "ffn_gate_exps"),
        "sliding_window": fields.size("attention.sliding_window"),
        "layer_types": fields.layer_types(shape.num_layers, 2),
        "rope_scaling": scaling or {"rope_type": "default"},
    }

"""What config.json of each family with experts means, as a ModelConfig.

Values that a family assumes where config.json does not say are those of its class in transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...kernels import Routing
from ..core.errors import ConfigError
from .config import (
    MIXTRAL_NAMES,
    PLAIN_NAMES,
    POST_NORMS,
    ExpertLayers,
    ExpertNames,
    ModelConfig,
    Names,
)
from .config_file import ConfigFile
from .dense_families import SLIDING_WINDOW, granite, qwen_window

# Layers that predict a token after the next one, which transformers does not compute either.
_MORE_TOKENS = ("num_nextn_predict_layers", "num_mtp_layers")


def _with_experts(
    config: ModelConfig,
    routing: Routing,
    ffn_size: int,
    is_expert: Sequence[bool] = (),
    names: ExpertNames = PLAIN_NAMES,
    shared_size: int = 0,
) -> ModelConfig:
    """The model with experts on the layers that have them; none are named: on all."""
    groups, chosen = routing.groups, routing.chosen_groups
    if routing.num_experts % groups or chosen > groups or routing.chosen > routing.num_experts // groups * chosen:
        raise ConfigError(
            f"config.json: {routing.chosen} of {routing.num_experts} experts cannot be chosen in {chosen}"
            f" of {groups} groups"
        )
    layers = tuple(is_expert) or (True,) * config.num_layers
    return replace(config, experts=ExpertLayers(routing, ffn_size, layers, names, shared_size))


def mixtral(file: ConfigFile, name: str) -> ModelConfig:
    """Jiang et al., 2024: Mistral with experts."""
    config = ModelConfig.read(file, name, norm_eps=1e-5, rope_theta=1_000_000.0)
    config = replace(config, windows=(file.optional_size("sliding_window"),) * config.num_layers)
    routing = Routing(file.size("num_local_experts", 8), file.size("num_experts_per_tok", 2))
    return _with_experts(config, routing, config.ffn_size, names=MIXTRAL_NAMES)


def qwen2_moe(file: ConfigFile, name: str) -> ModelConfig:
    """Yang et al., 2024: Qwen 2 with experts, and one that computes every token, weighed by a gate of its own."""
    config = ModelConfig.read(file, name)
    bias, most = file.flag("qkv_bias", True), file.count("max_window_layers", 28)
    window, layers = qwen_window(file), range(config.num_layers)
    usual = tuple(window if number % 2 == 0 and number < most else None for number in layers)
    windows = file.windows(config.num_layers, window, usual)
    names = ExpertNames(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate")
    shared = file.size("shared_expert_intermediate_size", 5632)
    routing = _qwen_routing(file, num_experts=60, chosen=4)
    ffn_size, is_expert = file.size("moe_intermediate_size", 1408), _qwen_layers(file, config.num_layers)
    return _with_experts(replace(config, qkv_bias=bias, windows=windows), routing, ffn_size, is_expert, names, shared)


def qwen3_moe(file: ConfigFile, name: str) -> ModelConfig:
    """Yang et al., 2025: Qwen 3 with experts."""
    config = ModelConfig.read(file, name, head_dim=128)
    bias, window = file.flag("attention_bias", False), qwen_window(file)
    file.ignore("max_window_layers")
    config = replace(config, qkv_bias=bias, output_bias=bias, windows=(window,) * config.num_layers, head_norms="each")
    routing, ffn_size = _qwen_routing(file, num_experts=128, chosen=8), file.size("moe_intermediate_size", 768)
    return _with_experts(config, routing, ffn_size, _qwen_layers(file, config.num_layers))


def _qwen_routing(file: ConfigFile, num_experts: int, chosen: int) -> Routing:
    return Routing(
        file.size("num_experts", file.size("num_local_experts", num_experts)),
        file.size("num_experts_per_tok", chosen),
        is_normalized=file.flag("norm_topk_prob", False),
    )


def _qwen_layers(file: ConfigFile, num_layers: int) -> tuple[bool, ...]:
    """Which layers have experts: every `decoder_sparse_step`-th, except those named in `mlp_only_layers`."""
    step, dense = file.size("decoder_sparse_step", 1), file.layers("mlp_only_layers", num_layers)
    return tuple((number + 1) % step == 0 and number not in dense for number in range(num_layers))


def olmoe(file: ConfigFile, name: str) -> ModelConfig:
    """Muennighoff et al., 2024: Llama with norms over whole queries and keys, and experts."""
    file.refuse("clip_qkv")
    bias = file.flag("attention_bias", False)
    config = ModelConfig.read(file, name, norm_eps=1e-5)
    config = replace(config, qkv_bias=bias, output_bias=bias, head_norms="all")
    return _with_experts(config, _qwen_routing(file, num_experts=64, chosen=8), config.ffn_size)


def flex_olmo(file: ConfigFile, name: str) -> ModelConfig:
    """Shi et al., 2025: OLMo 2 with experts."""
    bias, config = file.flag("attention_bias", False), ModelConfig.read(file, name, rope_theta=500_000.0)
    config = replace(config, qkv_bias=bias, output_bias=bias, norms=POST_NORMS, head_norms="all")
    return _with_experts(config, _qwen_routing(file, num_experts=7, chosen=5), config.ffn_size)


def glm4_moe(file: ConfigFile, name: str) -> ModelConfig:
    """GLM-4.5 Team, 2025: experts chosen by sigmoids, as in DeepSeek-V3, behind some dense layers."""
    config = ModelConfig.read(file, name, head_dim=None, norm_eps=1e-5, rotary_share=0.5)
    config = replace(
        config,
        qkv_bias=file.flag("attention_bias", False),
        head_norms="each" if file.flag("use_qk_norm", False) else "",
    )
    return _deepseek_experts(file, config, num_experts=128, chosen=8, num_dense=1, is_normalized=True)


def dots1(file: ConfigFile, name: str) -> ModelConfig:
    """rednote-hilab, 2025: Qwen 3 with DeepSeek's experts, and a window on the upper layers."""
    config = ModelConfig.read(file, name)
    bias, window = file.flag("attention_bias", False), file.optional_size("sliding_window", absent=SLIDING_WINDOW)
    most = min(file.count("max_window_layers", 62), config.num_layers)
    usual = (None,) * most + (window,) * (config.num_layers - most)
    config = replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        windows=file.windows(config.num_layers, window, usual),
        head_norms="each",
    )
    return _deepseek_experts(file, config, num_experts=None, chosen=None, num_dense=0, is_normalized=False)


def _deepseek_experts(
    file: ConfigFile,
    config: ModelConfig,
    *,
    num_experts: int | None,
    chosen: int | None,
    num_dense: int,
    is_normalized: bool,
) -> ModelConfig:
    """Scores plus a correction choose the experts, and the first layers are dense (DeepSeek-AI, 2024)."""
    routing = Routing(
        file.size("n_routed_experts", num_experts),
        file.size("num_experts_per_tok", chosen),
        "sigmoid",
        is_normalized=file.flag("norm_topk_prob", is_normalized),
        scale=file.number("routed_scaling_factor", 1.0),
        groups=file.size("n_group", 1),
        chosen_groups=file.size("topk_group", 1),
    )
    file.ignore(*_MORE_TOKENS)
    ffn_size, num_dense = file.size("moe_intermediate_size", 1408), file.count("first_k_dense_replace", num_dense)
    names = ExpertNames(correction="mlp.gate.e_score_correction_bias", shared="mlp.shared_experts")
    layers, shared = range(config.num_layers), ffn_size * file.size("n_shared_experts", 1)
    return _with_experts(config, routing, ffn_size, [number >= num_dense for number in layers], names, shared)


def ernie_moe(file: ConfigFile, name: str) -> ModelConfig:
    """Baidu, 2025: Ernie 4.5 with experts on most layers."""
    file.refuse("use_bias")
    file.ignore("moe_capacity", "moe_use_aux_free", *_MORE_TOKENS)
    config = ModelConfig.read(file, name, norm_eps=1e-5, is_tied=True, rope_theta=500_000.0)
    config = replace(config, is_interleaved=True)
    routing = Routing(
        file.size("moe_num_experts", 64), file.size("moe_k", 6), least_sum=file.positive("moe_norm_min", 1e-12)
    )
    ffn_size, shared = file.size("moe_intermediate_size", 1536), file.count("moe_num_shared_experts", 2)
    first, step = file.count("moe_layer_start_index", 1), file.size("moe_layer_interval", 1)
    last = int(file.number("moe_layer_end_index", -1))
    layers = range(config.num_layers)
    is_expert = [
        (number + 1) % step == 0 and first <= number <= (config.num_layers - 1 if last < 0 else last)
        for number in layers
    ]
    names = ExpertNames(
        correction="mlp.moe_statics.e_score_correction_bias", correction_shape=(1,), shared="mlp.shared_experts"
    )
    return _with_experts(config, routing, ffn_size, is_expert, names, shared * ffn_size)


def granite_moe(file: ConfigFile, name: str) -> ModelConfig:
    """IBM, 2024: Granite with experts, each layer's in two tensors."""
    module, config = "block_sparse_moe", granite(file, name)
    routing = Routing(file.size("num_local_experts", 8), file.size("num_experts_per_tok", 2))
    names = ExpertNames(
        router=f"{module}.router.layer",
        fused_gate_up=f"{module}.input_linear",
        fused_down=f"{module}.output_linear",
        has_suffix=True,
    )
    return _with_experts(config, routing, config.ffn_size, names=names)


def granite_moe_shared(file: ConfigFile, name: str) -> ModelConfig:
    """IBM, 2025: with a feed-forward layer beside the experts that computes every token."""
    config, shared = granite_moe(file, name), file.count("shared_intermediate_size", 1024)
    assert config.experts is not None
    experts = replace(config.experts, shared_size=shared)
    experts = replace(experts, names=replace(experts.names, shared="shared_mlp"))
    return replace(config, experts=experts, names=Names(gate_up="input_linear", down="output_linear"))


def minimax_m2(file: ConfigFile, name: str) -> ModelConfig:
    """MiniMax, 2025: experts chosen by sigmoids, norms over whole queries and keys, a part of each head rotated."""
    head_dim = file.size("head_dim", 128)
    share = file.count("rotary_dim", head_dim) / head_dim
    config = ModelConfig.read(file, name, head_dim, rotary_share=share, rope_theta=5_000_000.0)
    names = replace(MIXTRAL_NAMES, correction="block_sparse_moe.e_score_correction_bias")
    routing = Routing(file.size("num_local_experts", 256), file.size("num_experts_per_tok", 8), "sigmoid")
    return _with_experts(replace(config, head_norms="all"), routing, config.ffn_size, names=names)


def gpt_oss(file: ConfigFile, name: str) -> ModelConfig:
    """OpenAI, 2025: experts with biases and a clamped SwiGLU, sinks, and a window on every other layer."""
    file.require("rope_parameters", "rope_scaling")
    file.expect("hidden_act", "silu")
    file.expect("swiglu_alpha", 1.702)
    config = ModelConfig.read(file, name, head_dim=64, norm_eps=1e-5, rope_theta=150_000.0)
    bias, window = file.flag("attention_bias", True), file.optional_size("sliding_window", absent=128)
    usual = tuple(None if number % 2 else window for number in range(config.num_layers))
    windows = file.windows(config.num_layers, window, usual)
    config = replace(config, qkv_bias=bias, output_bias=bias, windows=windows, has_sinks=True)
    routing = Routing(file.size("num_local_experts", 128), file.size("num_experts_per_tok", 4))
    names = ExpertNames(router="mlp.router", is_transposed=True)
    config = _with_experts(config, routing, config.ffn_size, names=names)
    assert config.experts is not None
    limit = file.positive("swiglu_limit", 7.0)
    return replace(config, experts=replace(config.experts, has_bias=True, limit=limit))

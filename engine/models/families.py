"""The families that are served: what each one's config.json means, as a ModelConfig.

Values that a family assumes where config.json does not say are those of its class in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...kernels import Routing
from ..core.errors import ConfigError
from .config import (
    ACTIVATIONS,
    DEFAULT_NORM_EPS,
    MIXTRAL_NAMES,
    PLAIN_NAMES,
    POST_NORMS,
    PRE_NORMS,
    ConfigFile,
    ExpertLayers,
    ExpertNames,
    LayerNorms,
    ModelConfig,
    Names,
)
from .rope import RopeConfig

_SLIDING_WINDOW = 4096
# Layers that predict a token after the next one, which transformers does not compute either.
_MORE_TOKENS = ("num_nextn_predict_layers", "num_mtp_layers")
_NO_ROTATION = RopeConfig(theta=10_000.0, share=0.0)
# One norm that both sublayers read, for blocks that are parallel.
_ONE_NORM = LayerNorms(attention_before="input_layernorm")
_GEMMA_NORMS = LayerNorms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


@dataclass(frozen=True, slots=True)
class Family:
    """
    architecture  the family's name in `architectures` of config.json
    model_type    its name in `model_type`
    configure     reads config.json; raises ConfigError for whatever is not supported
    """

    architecture: str
    model_type: str
    configure: Callable[[ConfigFile, str], ModelConfig]

    @property
    def base_architecture(self) -> str:
        """What a checkpoint of the base model alone has in `architectures`."""
        return self.architecture.replace("ForCausalLM", "Model").replace("LMHeadModel", "Model")


def _llama(file: ConfigFile, name: str) -> ModelConfig:
    """Touvron et al., 2023: each sublayer reads the normalised residual stream."""
    bias = file.flag("attention_bias", False)
    config = ModelConfig.read(file, name, norm_eps=1e-5 if name in ("internlm3", "iquestcoder") else DEFAULT_NORM_EPS)
    return replace(config, qkv_bias=bias, output_bias=bias, mlp_bias=file.flag("mlp_bias", False))


def _mistral(file: ConfigFile, name: str) -> ModelConfig:
    """Jiang et al., 2023: Llama with a sliding window, in Ministral on the layers that the file names."""
    config = ModelConfig.read(file, name)
    window = file.optional_size("sliding_window", absent=_SLIDING_WINDOW)
    return replace(config, windows=file.windows(config.num_layers, window))


def _ministral3(file: ConfigFile, name: str) -> ModelConfig:
    """Mistral AI, 2025: Mistral whose queries grow with their positions, beyond those that RoPE was trained for."""
    file.require("rope_parameters")
    config = ModelConfig.read(file, name, norm_eps=1e-5)
    return replace(config, windows=(file.optional_size("sliding_window"),) * config.num_layers)


def _cwm(file: ConfigFile, name: str) -> ModelConfig:
    """Meta, 2025: Llama with a window on three of four layers."""
    file.require("rope_parameters", "rope_scaling")
    config = ModelConfig.read(file, name, norm_eps=1e-5, rope_theta=1_000_000.0)
    window = file.optional_size("sliding_window", absent=8192)
    usual = tuple(window if number % 4 else None for number in range(config.num_layers))
    windows = file.windows(config.num_layers, window, usual)
    return replace(config, mlp_bias=file.flag("mlp_bias", False), windows=windows)


def _arcee(file: ConfigFile, name: str) -> ModelConfig:
    """Arcee AI, 2025: Llama with relu² and without a gate."""
    config = ModelConfig.read(file, name, norm_eps=1e-5, default_activation="relu2")
    bias, mlp_bias = file.flag("attention_bias", False), file.flag("mlp_bias", False)
    return replace(config, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias, names=Names(gate=""))


def _apertus(file: ConfigFile, name: str) -> ModelConfig:
    """Swiss AI, 2025: xIELU without a gate, and norms of each head."""
    file.require("rope_parameters", "rope_scaling")
    config = ModelConfig.read(file, name, norm_eps=1e-5, default_activation="xielu", rope_theta=12_000_000.0)
    norms = LayerNorms(attention_before="attention_layernorm", mlp_before="feedforward_layernorm")
    bias = file.flag("attention_bias", False)
    return replace(config, qkv_bias=bias, output_bias=bias, norms=norms, head_norms="each", names=Names(gate=""))


def _qwen2(file: ConfigFile, name: str) -> ModelConfig:
    """Yang et al., 2024: Llama with biases on queries, keys and values, and a window on some layers."""
    config = ModelConfig.read(file, name)
    return replace(config, qkv_bias=True, windows=_qwen_windows(file, config.num_layers))


def _qwen3(file: ConfigFile, name: str) -> ModelConfig:
    """Yang et al., 2025: Llama that normalises each head of queries and keys before it rotates them."""
    config = ModelConfig.read(file, name, head_dim=128)
    bias, windows = file.flag("attention_bias", False), _qwen_windows(file, config.num_layers)
    return replace(config, qkv_bias=bias, output_bias=bias, windows=windows, head_norms="each")


def _qwen_windows(file: ConfigFile, num_layers: int) -> tuple[int | None, ...]:
    """Only the upper layers have a window, unless `layer_types` names others."""
    window, num_full = _qwen_window(file), min(file.count("max_window_layers", 28), num_layers)
    return file.windows(num_layers, window, (None,) * num_full + (window,) * (num_layers - num_full))


def _qwen_window(file: ConfigFile) -> int | None:
    is_used = file.flag("use_sliding_window", False)
    window = file.optional_size("sliding_window", absent=_SLIDING_WINDOW) if is_used else None
    file.ignore("sliding_window")
    return window


def _olmo2(file: ConfigFile, name: str) -> ModelConfig:
    """OLMo Team, 2024: norms behind the sublayers, and over whole queries and keys."""
    bias = file.flag("attention_bias", False)
    config = ModelConfig.read(file, name, norm_eps=1e-5)
    return replace(config, qkv_bias=bias, output_bias=bias, norms=POST_NORMS, head_norms="all")


def _olmo3(file: ConfigFile, name: str) -> ModelConfig:
    """OLMo Team, 2025: OLMo 2 with a window on three of four layers, which rotate without an extended context."""
    theta = 500_000.0
    config = ModelConfig.read(file, name, norm_eps=1e-5, layer_kind="full_attention", rope_theta=theta)
    bias = file.flag("attention_bias", False)
    window = file.optional_size("sliding_window", absent=_SLIDING_WINDOW)
    windows = file.windows(config.num_layers, window, every=4)
    whole, kind = config.rotations[0], "sliding_attention"
    is_nested = file.has_rope_of(kind)
    if not is_nested and whole.theta != theta:  # versions of transformers differ in what local layers then get
        raise ConfigError(f"config.json: rope_theta {whole.theta} needs rope_parameters with an object for {kind}")
    local = file.rope(kind=kind, theta=theta) if is_nested else RopeConfig(theta)
    rotations = tuple(whole if each is None else local for each in windows)
    config = replace(config, windows=windows, rotations=rotations, norms=POST_NORMS, head_norms="all")
    return replace(config, qkv_bias=bias, output_bias=bias)


def _smollm3(file: ConfigFile, name: str) -> ModelConfig:
    """Bakouch et al., 2025: Llama without a rotation on every fourth layer."""
    config = ModelConfig.read(file, name, is_tied=True, rope_theta=2_000_000.0)
    is_used = file.flag("use_sliding_window", False)
    window = file.optional_size("sliding_window") if is_used else None
    file.ignore("sliding_window", "max_window_layers")
    bias, interval = file.flag("attention_bias", False), file.size("no_rope_layer_interval", 4)
    turns = file.flags("no_rope_layers") or [(number + 1) % interval > 0 for number in range(config.num_layers)]
    if len(turns) != config.num_layers:
        raise ConfigError(f"config.json: no_rope_layers must have {config.num_layers} entries")
    rotations = tuple(
        rope if turn else replace(rope, share=0.0) for rope, turn in zip(config.rotations, turns, strict=True)
    )
    windows = file.windows(config.num_layers, window, tuple(None if turn else window for turn in turns))
    mlp_bias = file.flag("mlp_bias", False)
    return replace(config, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias, windows=windows, rotations=rotations)


def _granite(file: ConfigFile, name: str) -> ModelConfig:
    """IBM, 2024: Llama with four multipliers."""
    return replace(
        _llama(file, name),
        embedding_scale=file.number("embedding_multiplier", 1.0),
        score_scale=file.number("attention_multiplier", 1.0),
        residual_scale=file.number("residual_multiplier", 1.0),
        logit_scale=1 / file.positive("logits_scaling", 1.0),
    )


def _granite_swa(file: ConfigFile, name: str) -> ModelConfig:
    """IBM, 2026: Granite with sinks, a window on three of four layers, and a rotation of its own for each layer."""
    file.assume("rms_norm_eps", 1e-5)
    file.assume("tie_word_embeddings", True)
    config = _granite(file, name)
    window, rope = file.optional_size("sliding_window", absent=128), config.rotations[0]
    usual = tuple(window if number % 4 else None for number in range(config.num_layers))
    thetas = file.layer_numbers("layer_rope_theta", config.num_layers, rope.theta)
    rotations = tuple(replace(rope, theta=theta) if theta else replace(rope, share=0.0) for theta in thetas)
    for each in rotations:
        each.check(config.head_dim)
    windows = file.windows(config.num_layers, window, usual)
    return replace(config, windows=windows, rotations=rotations, has_sinks=True)


def _hyperclovax(file: ConfigFile, name: str) -> ModelConfig:
    """NAVER, 2025: Granite that multiplies logits where Granite divides, with norms on both sides of each sublayer."""
    config = _llama(file, name)
    norms = LayerNorms("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
    return replace(
        config,
        norms=norms if file.flag("use_post_norm", True) else PRE_NORMS,
        embedding_scale=file.number("embedding_multiplier", 1.0),
        score_scale=file.number("attention_multiplier", config.head_dim**-0.5),
        residual_scale=file.number("residual_multiplier", 1.0),
        logit_scale=file.positive("logits_scaling", 1.0),
    )


def _glm(file: ConfigFile, name: str) -> ModelConfig:
    """GLM Team, 2024: half of each head is rotated, in interleaved pairs; gate and up are one product."""
    config = ModelConfig.read(file, name, head_dim=128, norm_eps=1.5625e-7, rotary_share=0.5)
    return replace(
        config, qkv_bias=file.flag("attention_bias", True), is_interleaved=True, names=Names(gate_up="gate_up_proj")
    )


def _glm4(file: ConfigFile, name: str) -> ModelConfig:
    """GLM-4-0414: GLM with norms on both sides of each sublayer."""
    norms = LayerNorms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    return replace(_glm(file, name), norms=norms)


def _exaone4(file: ConfigFile, name: str) -> ModelConfig:
    """LG AI Research, 2025: norms behind; where some layers have a window, the others do not rotate."""
    config = ModelConfig.read(file, name, norm_eps=1e-5)
    window = file.optional_size("sliding_window", absent=_SLIDING_WINDOW)
    windows = file.windows(config.num_layers, window, every=4)
    rope = config.rotations[0]
    still = replace(rope, share=0.0)
    rotations = tuple(still if each is None and window is not None else rope for each in windows)
    return replace(config, norms=POST_NORMS, head_norms="each", windows=windows, rotations=rotations)


def _seed_oss(file: ConfigFile, name: str) -> ModelConfig:
    """ByteDance Seed, 2025: Llama with biases on queries, keys and values."""
    return replace(
        ModelConfig.read(file, name, head_dim=128),
        qkv_bias=file.flag("attention_bias", True),
        output_bias=file.flag("attention_out_bias", False),
        mlp_bias=file.flag("mlp_bias", False),
    )


def _ernie(file: ConfigFile, name: str) -> ModelConfig:
    """Baidu, 2025: Llama with interleaved rotary pairs."""
    bias = file.flag("use_bias", False)
    config = ModelConfig.read(file, name, head_dim=128, norm_eps=1e-5, is_tied=True, rope_theta=500_000.0)
    return replace(config, qkv_bias=bias, output_bias=bias, mlp_bias=bias, is_interleaved=True)


def _hunyuan(file: ConfigFile, name: str) -> ModelConfig:
    """Tencent, 2025: Llama that normalises each head of queries and keys once it has rotated them."""
    for field in ("use_qk_norm", "use_rotary_pos_emb"):
        file.expect(field, True)
    file.expect("norm_type", "rms")
    # Ids of tokens, and what belongs to parts that a model has only if other fields say so.
    file.ignore("im_start_id", "im_end_id", "im_newline_id", "text_start_id", "text_end_id", "mask_init_id", "pad_id")
    file.ignore("cla_share_factor", "class_num", "dense_list", "org_vocab_size", "pool_type")
    bias, head_dim = file.flag("attention_bias", False), file.size("hidden_size") // file.size("num_attention_heads")
    file.fold_rope_alpha(file.size("head_dim", head_dim))
    config = ModelConfig.read(file, name, norm_eps=1e-5)
    file.expect("attention_head_dim", config.head_dim)
    if config.rotations[0].attention_factor != 1:
        raise ConfigError("config.json: RoPE with an attention factor is not supported before norms of heads")
    names = Names(query_norm="query_layernorm", key_norm="key_layernorm")
    return replace(config, qkv_bias=bias, output_bias=bias, head_norms_behind=True, names=names)


def _helium(file: ConfigFile, name: str) -> ModelConfig:
    """Kyutai, 2025: Llama with interleaved rotary pairs."""
    config = ModelConfig.read(file, name, head_dim=128, norm_eps=1e-8, rope_theta=100_000.0)
    bias = file.flag("attention_bias", False)
    return replace(config, qkv_bias=bias, mlp_bias=file.flag("mlp_bias", False), is_interleaved=True)


def _starcoder2(file: ConfigFile, name: str) -> ModelConfig:
    """Lozhkov et al., 2024: LayerNorm, and GELU without a gate."""
    file.expect("norm_type", "layer_norm")
    file.expect("mlp_type", "default")
    tanh = "gelu_pytorch_tanh"
    config = ModelConfig.read(
        file, name, norm_eps=1e-5, eps_field="norm_epsilon", default_activation=tanh, is_tied=True
    )
    bias, windows = file.flag("use_bias", True), (file.optional_size("sliding_window"),) * config.num_layers
    config = replace(config, qkv_bias=bias, output_bias=bias, mlp_bias=bias, windows=windows)
    return replace(config, subtracts_mean=True, norm_bias=True, names=Names(gate="", up="c_fc", down="c_proj"))


def _stablelm(file: ConfigFile, name: str) -> ModelConfig:
    """Stability AI, 2024: Llama with LayerNorm, which rotates a quarter of each head."""
    config = ModelConfig.read(file, name, norm_eps=1e-5, eps_field="layer_norm_eps", rotary_share=0.25)
    is_parallel = file.flag("use_parallel_residual", False)
    return replace(
        config,
        qkv_bias=file.flag("use_qkv_bias", False),
        subtracts_mean=True,
        norm_bias=True,
        is_parallel=is_parallel,
        norms=_ONE_NORM if is_parallel else PRE_NORMS,
    )


def _gpt_neox(file: ConfigFile, name: str) -> ModelConfig:
    """Black et al., 2022: parallel sublayers with a LayerNorm each, GELU without a gate, heads rotated in part."""
    config = ModelConfig.read(
        file,
        name,
        norm_eps=1e-5,
        eps_field="layer_norm_eps",
        rotary_share=file.number("rotary_pct", 0.25),
        rope_theta=file.number("rotary_emb_base", 10_000.0),
        default_activation="gelu",
    )
    file.expect("num_key_value_heads", config.num_heads)
    bias = file.flag("attention_bias", True)
    names = Names(
        embedding="gpt_neox.embed_in",
        layers="gpt_neox.layers",
        attention="attention",
        qkv="query_key_value",
        output="dense",
        gate="",
        up="dense_h_to_4h",
        down="dense_4h_to_h",
        final_norm="gpt_neox.final_layer_norm",
        head="embed_out",
    )
    return replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=True,
        has_qkv_by_head=True,
        subtracts_mean=True,
        norm_bias=True,
        is_parallel=file.flag("use_parallel_residual", True),
        names=names,
    )


def _gpt2(file: ConfigFile, name: str) -> ModelConfig:
    """Radford et al., 2019: learned positions, LayerNorm, GELU without a gate, and matrices stored transposed."""
    _rename_gpt(file)
    config = ModelConfig.read(file, name, norm_eps=1e-5, default_activation="gelu_new", is_tied=True)
    file.ignore("n_ctx")
    names = Names(
        embedding="transformer.wte",
        positions="transformer.wpe",
        layers="transformer.h",
        attention="attn",
        qkv="c_attn",
        output="c_proj",
        gate="",
        up="c_fc",
        down="c_proj",
        final_norm="transformer.ln_f",
    )
    return replace(
        config,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        subtracts_mean=True,
        norm_bias=True,
        norms=LayerNorms(attention_before="ln_1", mlp_before="ln_2"),
        is_transposed=True,
        rotations=(_NO_ROTATION,) * config.num_layers,
        names=names,
    )


def _gpt_bigcode(file: ConfigFile, name: str) -> ModelConfig:
    """Li et al., 2023: GPT-2 with one key and value for all heads, and matrices that are not transposed."""
    is_shared = file.flag("multi_query", True)
    file.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "num_key_value_heads")
    file.ignore("inference_runner", "pad_key_length", "pre_allocate_kv_cache", "validate_runner_input")
    config = _gpt2(file, name)
    num_kv_heads = 1 if is_shared else config.num_heads
    return replace(config, num_kv_heads=num_kv_heads, is_transposed=False, has_qkv_by_head=not is_shared)


def _rename_gpt(file: ConfigFile) -> None:
    file.rename(
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        hidden_size="n_embd",
        intermediate_size="n_inner",
        max_position_embeddings="n_positions",
        hidden_act="activation_function",
        rms_norm_eps="layer_norm_epsilon",
    )
    file.assume("intermediate_size", 4 * file.size("hidden_size"))


def _gptj(file: ConfigFile, name: str) -> ModelConfig:
    """Wang & Komatsuzaki, 2021: parallel sublayers with one LayerNorm, interleaved rotation of a part of each head."""
    _rename_gpt(file)
    rotary_dim, head_dim = file.size("rotary_dim", 64), file.size("hidden_size") / file.size("num_attention_heads")
    part = min(1.0, rotary_dim / head_dim)
    config = ModelConfig.read(file, name, norm_eps=1e-5, default_activation="gelu_new", rotary_share=part)
    if rotary_dim > head_dim:
        raise file.error("rotary_dim", f"is {rotary_dim}, but a head has {config.head_dim} values")
    names = Names(
        embedding="transformer.wte",
        layers="transformer.h",
        attention="attn",
        output="out_proj",
        gate="",
        up="fc_in",
        down="fc_out",
        final_norm="transformer.ln_f",
    )
    return replace(
        config,
        mlp_bias=True,
        head_bias=True,
        is_interleaved=True,
        subtracts_mean=True,
        norm_bias=True,
        is_parallel=True,
        norms=LayerNorms(attention_before="ln_1"),
        names=names,
    )


def _opt(file: ConfigFile, name: str) -> ModelConfig:
    """Zhang et al., 2022: learned positions, LayerNorm, and ReLU without a gate."""
    file.rename(hidden_act="activation_function", intermediate_size="ffn_dim")
    config = ModelConfig.read(file, name, norm_eps=1e-5, default_activation="relu", is_tied=True)
    file.expect("do_layer_norm_before", True)
    file.expect("layer_norm_elementwise_affine", True)
    file.expect("word_embed_proj_dim", config.hidden_size)
    bias, decoder = file.flag("enable_bias", True), "model.decoder"
    names = Names(
        embedding=f"{decoder}.embed_tokens",
        positions=f"{decoder}.embed_positions",
        layers=f"{decoder}.layers",
        output="out_proj",
        mlp="",
        gate="",
        up="fc1",
        down="fc2",
        final_norm=f"{decoder}.final_layer_norm",
    )
    return replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        subtracts_mean=True,
        norm_bias=True,
        norms=LayerNorms(attention_before="self_attn_layer_norm", mlp_before="final_layer_norm"),
        first_position=2,
        rotations=(_NO_ROTATION,) * config.num_layers,
        names=names,
    )


def _phi(file: ConfigFile, name: str) -> ModelConfig:
    """Li et al., 2023: parallel sublayers with one LayerNorm, and biases everywhere, on logits too."""
    config = ModelConfig.read(
        file, name, norm_eps=1e-5, eps_field="layer_norm_eps", rotary_share=0.5, default_activation="gelu_new"
    )
    names = Names(output="dense", gate="", up="fc1", down="fc2", final_norm="model.final_layernorm")
    return replace(
        config,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
        subtracts_mean=True,
        norm_bias=True,
        is_parallel=True,
        norms=_ONE_NORM,
        names=names,
    )


def _cohere(file: ConfigFile, name: str, theta: float = 500_000.0) -> ModelConfig:
    """Cohere, 2024: parallel sublayers with one LayerNorm, interleaved rotary pairs, scaled logits."""
    config = ModelConfig.read(file, name, norm_eps=1e-5, eps_field="layer_norm_eps", is_tied=True, rope_theta=theta)
    bias = file.flag("attention_bias", False)
    return replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        subtracts_mean=True,
        is_parallel=True,
        norms=_ONE_NORM,
        is_interleaved=True,
        logit_scale=file.positive("logit_scale", 0.0625),
    )


def _cohere2(file: ConfigFile, name: str) -> ModelConfig:
    """Cohere, 2025: Cohere with a window on three of four layers, and no rotation on the others."""
    for field in ("use_parallel_block", "use_gated_activation", "use_embedding_sharing"):
        file.expect(field, True)
    file.expect("position_embedding_type", "rope_gptj")
    file.expect("order_of_interleaved_layers", "local_attn_first")
    file.expect("rotary_pct", 1.0)
    file.ignore("layer_switch")
    config = _cohere(file, name, 10_000.0)
    windows = file.windows(config.num_layers, file.optional_size("sliding_window", absent=_SLIDING_WINDOW), every=4)
    rope = config.rotations[0]
    rotations = tuple(replace(rope, share=0.0) if window is None else rope for window in windows)
    return replace(config, windows=windows, rotations=rotations)


def _nemotron(file: ConfigFile, name: str) -> ModelConfig:
    """Parmar et al., 2024: LayerNorm by 1 + weight, relu² without a gate, half of each head is rotated."""
    config = ModelConfig.read(
        file, name, norm_eps=1e-5, eps_field="norm_eps", rotary_share=0.5, default_activation="relu2"
    )
    bias, mlp_bias = file.flag("attention_bias", False), file.flag("mlp_bias", False)
    config = replace(config, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias, names=Names(gate=""))
    return replace(config, subtracts_mean=True, norm_bias=True, norm_offset=1.0)


def _jais2(file: ConfigFile, name: str) -> ModelConfig:
    """G42, 2025: LayerNorm, and relu² without a gate."""
    config = ModelConfig.read(file, name, norm_eps=1e-5, eps_field="layer_norm_eps", default_activation="relu2")
    bias, mlp_bias = file.flag("attention_bias", True), file.flag("mlp_bias", True)
    config = replace(config, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias, names=Names(gate=""))
    return replace(config, subtracts_mean=True, norm_bias=True)


def _olmo(file: ConfigFile, name: str) -> ModelConfig:
    """Groeneveld et al., 2024: Llama with a LayerNorm that has no weights."""
    config, bias = ModelConfig.read(file, name, norm_eps=1e-5), file.flag("attention_bias", False)
    return replace(config, qkv_bias=bias, output_bias=bias, subtracts_mean=True, has_norm_weights=False)


def _phi3(file: ConfigFile, name: str) -> ModelConfig:
    """Abdin et al., 2024: Llama with fused projections; Phi-4-mini rotates a part of each head."""
    config = ModelConfig.read(file, name, norm_eps=1e-5, rotary_share=1.0)
    if config.rotations[0].variant == "longrope" and not file.has("original_max_position_embeddings"):
        raise ConfigError("config.json has no original_max_position_embeddings, which longrope needs")
    windows = (file.optional_size("sliding_window"),) * config.num_layers
    return replace(config, windows=windows, names=Names(qkv="qkv_proj", gate_up="gate_up_proj"))


def _gemma(file: ConfigFile, name: str, field: str = "hidden_act", kind: str = "") -> ModelConfig:
    """Gemma Team, 2024: norms by 1 + weight, embeddings multiplied by √hidden, GeGLU.

    field, kind  as in `ModelConfig.read`
    """
    file.ignore("hidden_act", "hidden_activation")
    config = ModelConfig.read(
        file,
        name,
        head_dim=256,
        is_tied=True,
        default_activation="gelu_pytorch_tanh",
        activation_field=field,
        # Published files of the first Gemma say "gelu" and mean the approximation.
        activations=ACTIVATIONS | {"gelu": "gelu_tanh"} if field == "hidden_act" else ACTIVATIONS,
        layer_kind=kind,
    )
    bias, scale = file.flag("attention_bias", False), config.hidden_size**0.5
    return replace(config, qkv_bias=bias, output_bias=bias, norm_offset=1.0, embedding_scale=scale)


def _gemma2(file: ConfigFile, name: str) -> ModelConfig:
    """Gemma Team, 2024: norms on both sides, caps of scores and logits; every other layer has a window."""
    config = _gemma(file, name, "hidden_activation")
    window = file.optional_size("sliding_window", absent=_SLIDING_WINDOW)
    usual = tuple(None if number % 2 else window for number in range(config.num_layers))
    return replace(
        config,
        windows=file.windows(config.num_layers, window, usual),
        norms=_GEMMA_NORMS,
        score_scale=file.positive("query_pre_attn_scalar", 256) ** -0.5,
        score_cap=file.optional_positive("attn_logit_softcapping", absent=50.0),
        logit_cap=file.optional_positive("final_logit_softcapping", absent=30.0),
    )


def _vaultgemma(file: ConfigFile, name: str) -> ModelConfig:
    """Google, 2025: Gemma 2 without norms behind its sublayers, trained with differential privacy."""
    norms = LayerNorms(attention_before="input_layernorm", mlp_before="pre_feedforward_layernorm")
    return replace(_gemma2(file, name), norms=norms)


def _gemma3(file: ConfigFile, name: str) -> ModelConfig:
    """Gemma Team, 2025: norms on both sides and of each head; five of six layers have a window and another rotation."""
    config, kind = _gemma(file, name, "hidden_activation", "full_attention"), "sliding_attention"
    window = file.optional_size("sliding_window", absent=_SLIDING_WINDOW)
    windows = file.windows(config.num_layers, window, every=6)
    whole = file.rope(kind="full_attention", theta=1_000_000.0)
    local = file.rope(kind=kind) if file.has_rope_of(kind) else RopeConfig(file.positive("rope_local_base_freq", 1e4))
    return replace(
        config,
        windows=windows,
        rotations=tuple(whole if each is None else local for each in windows),
        norms=_GEMMA_NORMS,
        head_norms="each",
        score_scale=file.positive("query_pre_attn_scalar", 256) ** -0.5,
    )


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


def _mixtral(file: ConfigFile, name: str) -> ModelConfig:
    """Jiang et al., 2024: Mistral with experts."""
    config = ModelConfig.read(file, name, norm_eps=1e-5, rope_theta=1_000_000.0)
    config = replace(config, windows=(file.optional_size("sliding_window"),) * config.num_layers)
    routing = Routing(file.size("num_local_experts", 8), file.size("num_experts_per_tok", 2))
    return _with_experts(config, routing, config.ffn_size, names=MIXTRAL_NAMES)


def _qwen2_moe(file: ConfigFile, name: str) -> ModelConfig:
    """Yang et al., 2024: Qwen 2 with experts, and one that computes every token, weighed by a gate of its own."""
    config = ModelConfig.read(file, name)
    bias, most = file.flag("qkv_bias", True), file.count("max_window_layers", 28)
    window, layers = _qwen_window(file), range(config.num_layers)
    usual = tuple(window if number % 2 == 0 and number < most else None for number in layers)
    windows = file.windows(config.num_layers, window, usual)
    names = ExpertNames(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate")
    shared = file.size("shared_expert_intermediate_size", 5632)
    routing = _qwen_routing(file, num_experts=60, chosen=4)
    ffn_size, is_expert = file.size("moe_intermediate_size", 1408), _qwen_layers(file, config.num_layers)
    return _with_experts(replace(config, qkv_bias=bias, windows=windows), routing, ffn_size, is_expert, names, shared)


def _qwen3_moe(file: ConfigFile, name: str) -> ModelConfig:
    """Yang et al., 2025: Qwen 3 with experts."""
    config = ModelConfig.read(file, name, head_dim=128)
    bias, window = file.flag("attention_bias", False), _qwen_window(file)
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


def _olmoe(file: ConfigFile, name: str) -> ModelConfig:
    """Muennighoff et al., 2024: Llama with norms over whole queries and keys, and experts."""
    file.refuse("clip_qkv")
    bias = file.flag("attention_bias", False)
    config = ModelConfig.read(file, name, norm_eps=1e-5)
    config = replace(config, qkv_bias=bias, output_bias=bias, head_norms="all")
    return _with_experts(config, _qwen_routing(file, num_experts=64, chosen=8), config.ffn_size)


def _flex_olmo(file: ConfigFile, name: str) -> ModelConfig:
    """Shi et al., 2025: OLMo 2 with experts."""
    bias, config = file.flag("attention_bias", False), ModelConfig.read(file, name, rope_theta=500_000.0)
    config = replace(config, qkv_bias=bias, output_bias=bias, norms=POST_NORMS, head_norms="all")
    return _with_experts(config, _qwen_routing(file, num_experts=7, chosen=5), config.ffn_size)


def _glm4_moe(file: ConfigFile, name: str) -> ModelConfig:
    """GLM-4.5 Team, 2025: experts chosen by sigmoids, as in DeepSeek-V3, behind some dense layers."""
    config = ModelConfig.read(file, name, head_dim=None, norm_eps=1e-5, rotary_share=0.5)
    config = replace(
        config,
        qkv_bias=file.flag("attention_bias", False),
        head_norms="each" if file.flag("use_qk_norm", False) else "",
    )
    return _deepseek_experts(file, config, num_experts=128, chosen=8, num_dense=1, is_normalized=True)


def _dots1(file: ConfigFile, name: str) -> ModelConfig:
    """rednote-hilab, 2025: Qwen 3 with DeepSeek's experts, and a window on the upper layers."""
    config = ModelConfig.read(file, name)
    bias, window = file.flag("attention_bias", False), file.optional_size("sliding_window", absent=_SLIDING_WINDOW)
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
    """DeepSeek-AI, 2024: a correction decides with the scores who is chosen; the first layers are dense."""
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


def _ernie_moe(file: ConfigFile, name: str) -> ModelConfig:
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


def _granite_moe(file: ConfigFile, name: str) -> ModelConfig:
    """IBM, 2024: Granite with experts, each layer's in two tensors."""
    module, config = "block_sparse_moe", _granite(file, name)
    routing = Routing(file.size("num_local_experts", 8), file.size("num_experts_per_tok", 2))
    names = ExpertNames(
        router=f"{module}.router.layer",
        fused_gate_up=f"{module}.input_linear",
        fused_down=f"{module}.output_linear",
        has_suffix=True,
    )
    return _with_experts(config, routing, config.ffn_size, names=names)


def _granite_moe_shared(file: ConfigFile, name: str) -> ModelConfig:
    """IBM, 2025: with a feed-forward layer beside the experts that computes every token."""
    config, shared = _granite_moe(file, name), file.count("shared_intermediate_size", 1024)
    assert config.experts is not None
    experts = replace(config.experts, shared_size=shared)
    experts = replace(experts, names=replace(experts.names, shared="shared_mlp"))
    return replace(config, experts=experts, names=Names(gate_up="input_linear", down="output_linear"))


def _minimax_m2(file: ConfigFile, name: str) -> ModelConfig:
    """MiniMax, 2025: experts chosen by sigmoids, norms over whole queries and keys, a part of each head rotated."""
    head_dim = file.size("head_dim", 128)
    share = file.count("rotary_dim", head_dim) / head_dim
    config = ModelConfig.read(file, name, head_dim, rotary_share=share, rope_theta=5_000_000.0)
    names = replace(MIXTRAL_NAMES, correction="block_sparse_moe.e_score_correction_bias")
    routing = Routing(file.size("num_local_experts", 256), file.size("num_experts_per_tok", 8), "sigmoid")
    return _with_experts(replace(config, head_norms="all"), routing, config.ffn_size, names=names)


def _gpt_oss(file: ConfigFile, name: str) -> ModelConfig:
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


FAMILIES = (
    Family("LlamaForCausalLM", "llama", _llama),
    Family("LlamaForCausalLM", "internlm3", _llama),
    Family("LlamaForCausalLM", "iquestcoder", _llama),
    Family("MistralForCausalLM", "mistral", _mistral),
    Family("MinistralForCausalLM", "ministral", _mistral),
    Family("Ministral3ForCausalLM", "ministral3", _ministral3),
    Family("CwmForCausalLM", "cwm", _cwm),
    Family("ArceeForCausalLM", "arcee", _arcee),
    Family("ApertusForCausalLM", "apertus", _apertus),
    Family("Qwen2ForCausalLM", "qwen2", _qwen2),
    Family("Qwen3ForCausalLM", "qwen3", _qwen3),
    Family("Olmo2ForCausalLM", "olmo2", _olmo2),
    Family("Olmo3ForCausalLM", "olmo3", _olmo3),
    Family("SmolLM3ForCausalLM", "smollm3", _smollm3),
    Family("GraniteForCausalLM", "granite", _granite),
    Family("GraniteSWAForCausalLM", "granite_swa", _granite_swa),
    Family("HyperCLOVAXForCausalLM", "hyperclovax", _hyperclovax),
    Family("GlmForCausalLM", "glm", _glm),
    Family("Glm4ForCausalLM", "glm4", _glm4),
    Family("Exaone4ForCausalLM", "exaone4", _exaone4),
    Family("SeedOssForCausalLM", "seed_oss", _seed_oss),
    Family("Ernie4_5ForCausalLM", "ernie4_5", _ernie),
    Family("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", _hunyuan),
    Family("HeliumForCausalLM", "helium", _helium),
    Family("Phi3ForCausalLM", "phi3", _phi3),
    Family("PhiForCausalLM", "phi", _phi),
    Family("Starcoder2ForCausalLM", "starcoder2", _starcoder2),
    Family("StableLmForCausalLM", "stablelm", _stablelm),
    Family("GPTNeoXForCausalLM", "gpt_neox", _gpt_neox),
    Family("GPT2LMHeadModel", "gpt2", _gpt2),
    Family("GPTBigCodeForCausalLM", "gpt_bigcode", _gpt_bigcode),
    Family("GPTJForCausalLM", "gptj", _gptj),
    Family("OPTForCausalLM", "opt", _opt),
    Family("CohereForCausalLM", "cohere", _cohere),
    Family("Cohere2ForCausalLM", "cohere2", _cohere2),
    Family("NemotronForCausalLM", "nemotron", _nemotron),
    Family("Jais2ForCausalLM", "jais2", _jais2),
    Family("OlmoForCausalLM", "olmo", _olmo),
    Family("GemmaForCausalLM", "gemma", _gemma),
    Family("Gemma2ForCausalLM", "gemma2", _gemma2),
    Family("VaultGemmaForCausalLM", "vaultgemma", _vaultgemma),
    Family("Gemma3ForCausalLM", "gemma3_text", _gemma3),
    Family("MixtralForCausalLM", "mixtral", _mixtral),
    Family("Qwen2MoeForCausalLM", "qwen2_moe", _qwen2_moe),
    Family("Qwen3MoeForCausalLM", "qwen3_moe", _qwen3_moe),
    Family("OlmoeForCausalLM", "olmoe", _olmoe),
    Family("FlexOlmoForCausalLM", "flex_olmo", _flex_olmo),
    Family("Glm4MoeForCausalLM", "glm4_moe", _glm4_moe),
    Family("Dots1ForCausalLM", "dots1", _dots1),
    Family("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", _ernie_moe),
    Family("GraniteMoeForCausalLM", "granitemoe", _granite_moe),
    Family("GraniteMoeSharedForCausalLM", "granitemoeshared", _granite_moe_shared),
    Family("GptOssForCausalLM", "gpt_oss", _gpt_oss),
    Family("MiniMaxM2ForCausalLM", "minimax_m2", _minimax_m2),
)

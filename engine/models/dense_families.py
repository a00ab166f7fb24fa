"""What config.json of each family without experts means, as a ModelConfig.

Values that a family assumes where config.json does not say are those of its class in transformers.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.errors import ConfigError
from .config import (
    ACTIVATIONS,
    DEFAULT_NORM_EPS,
    POST_NORMS,
    PRE_NORMS,
    LayerNorms,
    ModelConfig,
    Names,
)
from .config_file import ConfigFile
from .rope import RopeConfig

SLIDING_WINDOW = 4096
_NO_ROTATION = RopeConfig(theta=10_000.0, share=0.0)
# One norm that both sublayers read, for blocks that are parallel.
_ONE_NORM = LayerNorms(attention_before="input_layernorm")
_GEMMA_NORMS = LayerNorms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


def llama(file: ConfigFile, name: str) -> ModelConfig:
    """Touvron et al., 2023: each sublayer reads the normalised residual stream."""
    bias = file.flag("attention_bias", False)
    config = ModelConfig.read(file, name, norm_eps=1e-5 if name in ("internlm3", "iquestcoder") else DEFAULT_NORM_EPS)
    return replace(config, qkv_bias=bias, output_bias=bias, mlp_bias=file.flag("mlp_bias", False))


def mistral(file: ConfigFile, name: str) -> ModelConfig:
    """Jiang et al., 2023: Llama with a sliding window, in Ministral on the layers that the file names."""
    config = ModelConfig.read(file, name)
    window = file.optional_size("sliding_window", absent=SLIDING_WINDOW)
    return replace(config, windows=file.windows(config.num_layers, window))


def ministral3(file: ConfigFile, name: str) -> ModelConfig:
    """Mistral AI, 2025: Mistral whose queries grow with their positions, beyond those that RoPE was trained for."""
    file.require("rope_parameters")
    config = ModelConfig.read(file, name, norm_eps=1e-5)
    return replace(config, windows=(file.optional_size("sliding_window"),) * config.num_layers)


def cwm(file: ConfigFile, name: str) -> ModelConfig:
    """Meta, 2025: Llama with a window on three of four layers."""
    file.require("rope_parameters", "rope_scaling")
    config = ModelConfig.read(file, name, norm_eps=1e-5, rope_theta=1_000_000.0)
    window = file.optional_size("sliding_window", absent=8192)
    usual = tuple(window if number % 4 else None for number in range(config.num_layers))
    windows = file.windows(config.num_layers, window, usual)
    return replace(config, mlp_bias=file.flag("mlp_bias", False), windows=windows)


def arcee(file: ConfigFile, name: str) -> ModelConfig:
    """Arcee AI, 2025: Llama with relu² and without a gate."""
    config = ModelConfig.read(file, name, norm_eps=1e-5, default_activation="relu2")
    bias, mlp_bias = file.flag("attention_bias", False), file.flag("mlp_bias", False)
    return replace(config, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias, names=Names(gate=""))


def apertus(file: ConfigFile, name: str) -> ModelConfig:
    """Swiss AI, 2025: xIELU without a gate, and norms of each head."""
    file.require("rope_parameters", "rope_scaling")
    config = ModelConfig.read(file, name, norm_eps=1e-5, default_activation="xielu", rope_theta=12_000_000.0)
    norms = LayerNorms(attention_before="attention_layernorm", mlp_before="feedforward_layernorm")
    bias = file.flag("attention_bias", False)
    return replace(config, qkv_bias=bias, output_bias=bias, norms=norms, head_norms="each", names=Names(gate=""))


def qwen2(file: ConfigFile, name: str) -> ModelConfig:
    """Yang et al., 2024: Llama with biases on queries, keys and values, and a window on some layers."""
    config = ModelConfig.read(file, name)
    return replace(config, qkv_bias=True, windows=_qwen_windows(file, config.num_layers))


def qwen3(file: ConfigFile, name: str) -> ModelConfig:
    """Yang et al., 2025: Llama that normalises each head of queries and keys before it rotates them."""
    config = ModelConfig.read(file, name, head_dim=128)
    bias, windows = file.flag("attention_bias", False), _qwen_windows(file, config.num_layers)
    return replace(config, qkv_bias=bias, output_bias=bias, windows=windows, head_norms="each")


def _qwen_windows(file: ConfigFile, num_layers: int) -> tuple[int | None, ...]:
    """Only the upper layers have a window, unless `layer_types` names others."""
    window, num_full = qwen_window(file), min(file.count("max_window_layers", 28), num_layers)
    return file.windows(num_layers, window, (None,) * num_full + (window,) * (num_layers - num_full))


def qwen_window(file: ConfigFile) -> int | None:
    is_used = file.flag("use_sliding_window", False)
    window = file.optional_size("sliding_window", absent=SLIDING_WINDOW) if is_used else None
    file.ignore("sliding_window")
    return window


def olmo2(file: ConfigFile, name: str) -> ModelConfig:
    """OLMo Team, 2024: norms behind the sublayers, and over whole queries and keys."""
    bias = file.flag("attention_bias", False)
    config = ModelConfig.read(file, name, norm_eps=1e-5)
    return replace(config, qkv_bias=bias, output_bias=bias, norms=POST_NORMS, head_norms="all")


def olmo3(file: ConfigFile, name: str) -> ModelConfig:
    """OLMo Team, 2025: OLMo 2 with a window on three of four layers, which rotate without an extended context."""
    theta = 500_000.0
    config = ModelConfig.read(file, name, norm_eps=1e-5, layer_kind="full_attention", rope_theta=theta)
    bias = file.flag("attention_bias", False)
    window = file.optional_size("sliding_window", absent=SLIDING_WINDOW)
    windows = file.windows(config.num_layers, window, every=4)
    whole, kind = config.rotations[0], "sliding_attention"
    is_nested = file.has_rope_of(kind)
    if not is_nested and whole.theta != theta:  # versions of transformers differ in what local layers then get
        raise ConfigError(f"config.json: rope_theta {whole.theta} needs rope_parameters with an object for {kind}")
    local = file.rope(kind=kind, theta=theta) if is_nested else RopeConfig(theta)
    rotations = tuple(whole if each is None else local for each in windows)
    config = replace(config, windows=windows, rotations=rotations, norms=POST_NORMS, head_norms="all")
    return replace(config, qkv_bias=bias, output_bias=bias)


def smollm3(file: ConfigFile, name: str) -> ModelConfig:
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


def granite(file: ConfigFile, name: str) -> ModelConfig:
    """IBM, 2024: Llama with four multipliers."""
    return replace(
        llama(file, name),
        embedding_scale=file.number("embedding_multiplier", 1.0),
        score_scale=file.number("attention_multiplier", 1.0),
        residual_scale=file.number("residual_multiplier", 1.0),
        logit_scale=1 / file.positive("logits_scaling", 1.0),
    )


def granite_swa(file: ConfigFile, name: str) -> ModelConfig:
    """IBM, 2026: Granite with sinks, a window on three of four layers, and a rotation of its own for each layer."""
    file.assume("rms_norm_eps", 1e-5)
    file.assume("tie_word_embeddings", True)
    config = granite(file, name)
    window, rope = file.optional_size("sliding_window", absent=128), config.rotations[0]
    usual = tuple(window if number % 4 else None for number in range(config.num_layers))
    thetas = file.layer_numbers("layer_rope_theta", config.num_layers, rope.theta)
    rotations = tuple(replace(rope, theta=theta) if theta else replace(rope, share=0.0) for theta in thetas)
    for each in rotations:
        each.check(config.head_dim)
    windows = file.windows(config.num_layers, window, usual)
    return replace(config, windows=windows, rotations=rotations, has_sinks=True)


def hyperclovax(file: ConfigFile, name: str) -> ModelConfig:
    """NAVER, 2025: Granite that multiplies logits where Granite divides, with norms on both sides of each sublayer."""
    config = llama(file, name)
    norms = LayerNorms("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
    return replace(
        config,
        norms=norms if file.flag("use_post_norm", True) else PRE_NORMS,
        embedding_scale=file.number("embedding_multiplier", 1.0),
        score_scale=file.number("attention_multiplier", config.head_dim**-0.5),
        residual_scale=file.number("residual_multiplier", 1.0),
        logit_scale=file.positive("logits_scaling", 1.0),
    )


def glm(file: ConfigFile, name: str) -> ModelConfig:
    """GLM Team, 2024: half of each head is rotated, in interleaved pairs; gate and up are one product."""
    config = ModelConfig.read(file, name, head_dim=128, norm_eps=1.5625e-7, rotary_share=0.5)
    return replace(
        config, qkv_bias=file.flag("attention_bias", True), is_interleaved=True, names=Names(gate_up="gate_up_proj")
    )


def glm4(file: ConfigFile, name: str) -> ModelConfig:
    """GLM-4-0414: GLM with norms on both sides of each sublayer."""
    norms = LayerNorms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    return replace(glm(file, name), norms=norms)


def exaone4(file: ConfigFile, name: str) -> ModelConfig:
    """LG AI Research, 2025: norms behind; where some layers have a window, the others do not rotate."""
    config = ModelConfig.read(file, name, norm_eps=1e-5)
    window = file.optional_size("sliding_window", absent=SLIDING_WINDOW)
    windows = file.windows(config.num_layers, window, every=4)
    rope = config.rotations[0]
    still = replace(rope, share=0.0)
    rotations = tuple(still if each is None and window is not None else rope for each in windows)
    return replace(config, norms=POST_NORMS, head_norms="each", windows=windows, rotations=rotations)


def seed_oss(file: ConfigFile, name: str) -> ModelConfig:
    """ByteDance Seed, 2025: Llama with biases on queries, keys and values."""
    return replace(
        ModelConfig.read(file, name, head_dim=128),
        qkv_bias=file.flag("attention_bias", True),
        output_bias=file.flag("attention_out_bias", False),
        mlp_bias=file.flag("mlp_bias", False),
    )


def ernie(file: ConfigFile, name: str) -> ModelConfig:
    """Baidu, 2025: Llama with interleaved rotary pairs."""
    bias = file.flag("use_bias", False)
    config = ModelConfig.read(file, name, head_dim=128, norm_eps=1e-5, is_tied=True, rope_theta=500_000.0)
    return replace(config, qkv_bias=bias, output_bias=bias, mlp_bias=bias, is_interleaved=True)


def hunyuan(file: ConfigFile, name: str) -> ModelConfig:
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


def helium(file: ConfigFile, name: str) -> ModelConfig:
    """Kyutai, 2025: Llama with interleaved rotary pairs."""
    config = ModelConfig.read(file, name, head_dim=128, norm_eps=1e-8, rope_theta=100_000.0)
    bias = file.flag("attention_bias", False)
    return replace(config, qkv_bias=bias, mlp_bias=file.flag("mlp_bias", False), is_interleaved=True)


def starcoder2(file: ConfigFile, name: str) -> ModelConfig:
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


def stablelm(file: ConfigFile, name: str) -> ModelConfig:
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


def gpt_neox(file: ConfigFile, name: str) -> ModelConfig:
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


def gpt2(file: ConfigFile, name: str) -> ModelConfig:
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


def gpt_bigcode(file: ConfigFile, name: str) -> ModelConfig:
    """Li et al., 2023: GPT-2 with one key and value for all heads, and matrices that are not transposed."""
    is_shared = file.flag("multi_query", True)
    file.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "num_key_value_heads")
    file.ignore("inference_runner", "pad_key_length", "pre_allocate_kv_cache", "validate_runner_input")
    config = gpt2(file, name)
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


def gptj(file: ConfigFile, name: str) -> ModelConfig:
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


def opt(file: ConfigFile, name: str) -> ModelConfig:
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


def phi(file: ConfigFile, name: str) -> ModelConfig:
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


def cohere(file: ConfigFile, name: str, theta: float = 500_000.0) -> ModelConfig:
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


def cohere2(file: ConfigFile, name: str) -> ModelConfig:
    """Cohere, 2025: Cohere with a window on three of four layers, and no rotation on the others."""
    for field in ("use_parallel_block", "use_gated_activation", "use_embedding_sharing"):
        file.expect(field, True)
    file.expect("position_embedding_type", "rope_gptj")
    file.expect("order_of_interleaved_layers", "local_attn_first")
    file.expect("rotary_pct", 1.0)
    file.ignore("layer_switch")
    config = cohere(file, name, 10_000.0)
    windows = file.windows(config.num_layers, file.optional_size("sliding_window", absent=SLIDING_WINDOW), every=4)
    rope = config.rotations[0]
    rotations = tuple(replace(rope, share=0.0) if window is None else rope for window in windows)
    return replace(config, windows=windows, rotations=rotations)


def nemotron(file: ConfigFile, name: str) -> ModelConfig:
    """Parmar et al., 2024: LayerNorm by 1 + weight, relu² without a gate, half of each head is rotated."""
    config = ModelConfig.read(
        file, name, norm_eps=1e-5, eps_field="norm_eps", rotary_share=0.5, default_activation="relu2"
    )
    bias, mlp_bias = file.flag("attention_bias", False), file.flag("mlp_bias", False)
    config = replace(config, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias, names=Names(gate=""))
    return replace(config, subtracts_mean=True, norm_bias=True, norm_offset=1.0)


def jais2(file: ConfigFile, name: str) -> ModelConfig:
    """G42, 2025: LayerNorm, and relu² without a gate."""
    config = ModelConfig.read(file, name, norm_eps=1e-5, eps_field="layer_norm_eps", default_activation="relu2")
    bias, mlp_bias = file.flag("attention_bias", True), file.flag("mlp_bias", True)
    config = replace(config, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias, names=Names(gate=""))
    return replace(config, subtracts_mean=True, norm_bias=True)


def olmo(file: ConfigFile, name: str) -> ModelConfig:
    """Groeneveld et al., 2024: Llama with a LayerNorm that has no weights."""
    config, bias = ModelConfig.read(file, name, norm_eps=1e-5), file.flag("attention_bias", False)
    return replace(config, qkv_bias=bias, output_bias=bias, subtracts_mean=True, has_norm_weights=False)


def phi3(file: ConfigFile, name: str) -> ModelConfig:
    """Abdin et al., 2024: Llama with fused projections; Phi-4-mini rotates a part of each head."""
    config = ModelConfig.read(file, name, norm_eps=1e-5, rotary_share=1.0)
    if config.rotations[0].variant == "longrope" and not file.has("original_max_position_embeddings"):
        raise ConfigError("config.json has no original_max_position_embeddings, which longrope needs")
    windows = (file.optional_size("sliding_window"),) * config.num_layers
    return replace(config, windows=windows, names=Names(qkv="qkv_proj", gate_up="gate_up_proj"))


def gemma(file: ConfigFile, name: str, field: str = "hidden_act", kind: str = "") -> ModelConfig:
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


def gemma2(file: ConfigFile, name: str) -> ModelConfig:
    """Gemma Team, 2024: norms on both sides, caps of scores and logits; every other layer has a window."""
    config = gemma(file, name, "hidden_activation")
    window = file.optional_size("sliding_window", absent=SLIDING_WINDOW)
    usual = tuple(None if number % 2 else window for number in range(config.num_layers))
    return replace(
        config,
        windows=file.windows(config.num_layers, window, usual),
        norms=_GEMMA_NORMS,
        score_scale=file.positive("query_pre_attn_scalar", 256) ** -0.5,
        score_cap=file.optional_positive("attn_logit_softcapping", absent=50.0),
        logit_cap=file.optional_positive("final_logit_softcapping", absent=30.0),
    )


def vaultgemma(file: ConfigFile, name: str) -> ModelConfig:
    """Google, 2025: Gemma 2 without norms behind its sublayers, trained with differential privacy."""
    norms = LayerNorms(attention_before="input_layernorm", mlp_before="pre_feedforward_layernorm")
    return replace(gemma2(file, name), norms=norms)


def gemma3(file: ConfigFile, name: str) -> ModelConfig:
    """Gemma Team, 2025: norms on both sides and of each head; five of six layers have a window and another rotation."""
    config, kind = gemma(file, name, "hidden_activation", "full_attention"), "sliding_attention"
    window = file.optional_size("sliding_window", absent=SLIDING_WINDOW)
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

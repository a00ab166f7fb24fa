"""The families that are served: what each one's config.json means, as a ModelConfig.

Values that a family assumes where config.json does not say are those of its class in transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..core.errors import ConfigError
from .config import ACTIVATIONS, POST_NORMS, PRE_NORMS, ConfigFile, LayerNorms, ModelConfig, Names
from .rope import RopeConfig

_SLIDING_WINDOW = 4096


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


def _llama(file: ConfigFile, name: str) -> ModelConfig:
    """Touvron et al., 2023: each sublayer reads the normalised residual stream."""
    bias = file.flag("attention_bias", False)
    config = ModelConfig.read(file, name)
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
    is_used = file.flag("use_sliding_window", False)
    window = file.optional_size("sliding_window", absent=_SLIDING_WINDOW) if is_used else None
    file.ignore("sliding_window")
    num_full = min(file.count("max_window_layers", 28), num_layers)
    return file.windows(num_layers, window, (None,) * num_full + (window,) * (num_layers - num_full))


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


def _helium(file: ConfigFile, name: str) -> ModelConfig:
    """Kyutai, 2025: Llama with interleaved rotary pairs."""
    config = ModelConfig.read(file, name, head_dim=128, norm_eps=1e-8, rope_theta=100_000.0)
    bias = file.flag("attention_bias", False)
    return replace(config, qkv_bias=bias, mlp_bias=file.flag("mlp_bias", False), is_interleaved=True)


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


def _gemma3(file: ConfigFile, name: str) -> ModelConfig:
    """Gemma Team, 2025: norms on both sides and of each head; five of six layers have a window and another rotation."""
    config, kind = _gemma(file, name, "hidden_activation", "full_attention"), "sliding_attention"
    window = file.optional_size("sliding_window", absent=_SLIDING_WINDOW)
    windows = file.windows(config.num_layers, window, every=6)
    whole = file.rope(kind="full_attention", theta=1_000_000.0)
    local = file.rope(kind=kind) if file.has_rope_of(kind) else RopeConfig(file.positive("rope_local_base_freq", 1e4))
    norms = LayerNorms(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    )
    return replace(
        config,
        windows=windows,
        rotations=tuple(whole if each is None else local for each in windows),
        norms=norms,
        head_norms="each",
        score_scale=file.positive("query_pre_attn_scalar", 256) ** -0.5,
    )


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
    Family("HyperCLOVAXForCausalLM", "hyperclovax", _hyperclovax),
    Family("GlmForCausalLM", "glm", _glm),
    Family("Glm4ForCausalLM", "glm4", _glm4),
    Family("Exaone4ForCausalLM", "exaone4", _exaone4),
    Family("SeedOssForCausalLM", "seed_oss", _seed_oss),
    Family("Ernie4_5ForCausalLM", "ernie4_5", _ernie),
    Family("HeliumForCausalLM", "helium", _helium),
    Family("Phi3ForCausalLM", "phi3", _phi3),
    Family("GemmaForCausalLM", "gemma", _gemma),
    Family("Gemma3ForCausalLM", "gemma3_text", _gemma3),
)

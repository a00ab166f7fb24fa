"""The settings of a model, in one vocabulary for all families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ...checkpoints.quantized_weights import FP8
from ...kernels import Function, Routing
from ..core.errors import ConfigError, shown
from .config_file import DEFAULT_ROPE_THETA, MAX_SIZES, ConfigFile
from .rope import RopeConfig

DEFAULT_NORM_EPS = 1e-6

# By their names in `hidden_act`.
ACTIVATIONS: dict[str, Function] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The names of a layer's norms before and behind its attention and its feed-forward layer; "": there is none."""

    attention_before: str = ""
    attention_behind: str = ""
    mlp_before: str = ""
    mlp_behind: str = ""


PRE_NORMS = LayerNorms(attention_before="input_layernorm", mlp_before="post_attention_layernorm")
POST_NORMS = LayerNorms(attention_behind="post_attention_layernorm", mlp_behind="post_feedforward_layernorm")


@dataclass(frozen=True, slots=True)
class Names:
    """What a checkpoint calls its tensors, without .weight and .bias. Those of a layer follow `layers` and its number.

    mlp           "": projections of the feed-forward layer follow the layer's number
    qkv, gate_up  fused projections; "": the checkpoint has the single ones
    gate          "": the feed-forward layer has no gate
    positions     the embedding of positions; "": there is none
    """

    embedding: str = "model.embed_tokens"
    positions: str = ""
    layers: str = "model.layers"
    attention: str = "self_attn"
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    qkv: str = ""
    output: str = "o_proj"
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    mlp: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    gate_up: str = ""
    down: str = "down_proj"
    final_norm: str = "model.norm"
    head: str = "lm_head"

    def as_in(self, has: Callable[[str], bool]) -> Names:
        """These names, or those of a checkpoint that holds the base model alone.

        has  whether the checkpoint has a tensor of this name

        What transformers' AutoModel saves, such as Qwen3-Embedding and the first GPT-2, has no `model.` in front.
        """
        outer = ("embedding", "positions", "layers", "final_norm")
        bare = replace(self, **{each: getattr(self, each).partition(".")[2] for each in outer})
        return bare if has(f"{bare.embedding}.weight") and not has(f"{self.embedding}.weight") else self


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of an expert layer's tensors behind that of the layer. {} is the number of an expert.

    gate, up, down          the projections of each expert
    fused_gate_up, fused_down  tensors of all experts, [experts, out, in], which a checkpoint may have in their place
    has_suffix              these are called .weight, as others are
    is_transposed           they are [experts, in, out], and the rows of gate and up lie in turn
    correction              what is added to a router's scores for the choice; "": nothing
    correction_shape        of that tensor, before its last dimension, in which it has a number for each expert
    shared, shared_gate     the feed-forward layer that computes every token, and the product whose sigmoid weighs it
    """

    router: str = "mlp.gate"
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"
    fused_gate_up: str = "mlp.experts.gate_up_proj"
    fused_down: str = "mlp.experts.down_proj"
    has_suffix: bool = False
    is_transposed: bool = False
    correction: str = ""
    correction_shape: tuple[int, ...] = ()
    shared: str = ""
    shared_gate: str = ""


PLAIN_NAMES = ExpertNames()
MIXTRAL_NAMES = ExpertNames(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    down="block_sparse_moe.experts.{}.w2",
)


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """Feed-forward layers whose tokens are computed by the few experts that a router chooses.

    routing                how the router chooses
    ffn_size, shared_size  width of an expert, and of the one that computes every token; 0: there is none
    is_expert              for each layer of the model, whether it has experts
    has_bias               whether the router and the experts have biases
    limit                  that of clamped_silu, which the experts compute then in place of the model's activation
    """

    routing: Routing
    ffn_size: int
    is_expert: tuple[bool, ...]
    names: ExpertNames = PLAIN_NAMES
    shared_size: int = 0
    has_bias: bool = False
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a decoder computes, as data: a family is a function that reads it from config.json.

    family                   the name of the family, as in `model_type`
    ffn_size                 width of a dense feed-forward layer
    max_position_embeddings  positions that the model was trained for, RoPE scaling included
    windows                  for each layer, how many tokens a query sees at most, its own included; None: all
    rotations                for each layer, how it rotates queries and keys
    is_interleaved           the checkpoint rotates dimension 2i with 2i + 1
    qkv_bias, output_bias    whether the attention's projections have biases
    head_norms               queries and keys are normalised before they are rotated: each head, or all heads at once
    head_norms_behind        they are normalised, each head, once they have been rotated
    names                    of the checkpoint's tensors
    subtracts_mean           norms of the stream subtract the mean (Ba et al., 2016); otherwise they are RMSNorm
    norm_bias                norms of the stream have biases
    has_norm_weights         otherwise norms of the stream have no weights
    norm_offset              what is added to the weight of every norm
    is_parallel              both sublayers of a layer read the stream as it was before either added to it
    has_qkv_by_head          the rows of the fused projection are the query, key and value of one head after the other
    is_transposed            the checkpoint has the matrices of layers as [in, out]
    first_position           the row of position 0 in the embedding of positions
    head_bias                whether a bias is added to logits
    score_scale              what scores are multiplied by; None: 1 / √head_dim
    score_cap                scores become score_cap · tanh(score / score_cap); 0: they stay
    embedding_scale          what an embedding is multiplied by
    residual_scale           what is added to the stream is multiplied by it
    logit_scale              what logits are multiplied by
    logit_cap                as `score_cap`, of logits
    has_sinks                each query head has a score that is in the softmax's denominator alone
    experts                  which layers have experts, and what they compute; None: all are dense
    has_grouped_weights      whether the checkpoint holds some weights in groups of 4 to 8 bits
    has_float8_weights       whether it holds some in float8
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    activation: Function
    rotations: tuple[RopeConfig, ...]
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norms: LayerNorms = PRE_NORMS
    head_norms: Literal["", "each", "all"] = ""
    head_norms_behind: bool = False
    is_interleaved: bool = False
    names: Names = Names()
    subtracts_mean: bool = False
    norm_bias: bool = False
    has_norm_weights: bool = True
    norm_offset: float = 0.0
    is_parallel: bool = False
    has_qkv_by_head: bool = False
    is_transposed: bool = False
    first_position: int = 0
    head_bias: bool = False
    score_scale: float | None = None
    score_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    has_sinks: bool = False
    experts: ExpertLayers | None = None
    has_grouped_weights: bool = False
    has_float8_weights: bool = False

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @staticmethod
    def read(
        file: ConfigFile,
        family: str,
        head_dim: int | None = None,
        norm_eps: float = DEFAULT_NORM_EPS,
        eps_field: str = "rms_norm_eps",
        rotary_share: float | None = None,
        rope_theta: float = DEFAULT_ROPE_THETA,
        default_activation: str = "silu",
        activation_field: str = "hidden_act",
        activations: Mapping[str, Function] = ACTIVATIONS,
        layer_kind: str = "",
        is_tied: bool = False,
    ) -> ModelConfig:
        """Reads the fields that all families share, for a model without biases and windows.

        Without `head_dim` a head has its share of the hidden size. `layer_kind` says whose rotation all layers get. The
        others are what the family assumes if config.json does not say.

        Raises ConfigError for what no family here supports.
        """
        activation = file.text(activation_field, default_activation)
        if activation not in activations:
            known = ", ".join(activations)
            raise file.error(activation_field, f"{shown(activation)} is not supported; {known} are")
        num_layers, hidden_size = file.size("num_hidden_layers"), file.size("hidden_size")
        num_heads = file.size("num_attention_heads")
        num_kv_heads = file.size("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ConfigError(f"config.json: {num_heads} attention heads cannot share {num_kv_heads} key-value heads")
        if head_dim is None and not file.has("head_dim") and hidden_size % num_heads:
            raise file.error("hidden_size", f"{hidden_size} is not a multiple of {num_heads} attention heads")
        head_dim = file.size("head_dim", head_dim or hidden_size // num_heads)
        if head_dim % 2:
            raise ConfigError(f"config.json: head_dim must be even, as RoPE turns pairs; it is {head_dim}")
        rope = file.rope(rotary_share, layer_kind, rope_theta)
        rope.check(head_dim)
        max_position_embeddings = rope.max_positions or file.size("max_position_embeddings")
        if max_position_embeddings > MAX_SIZES["max_position_embeddings"]:
            raise ConfigError(f"config.json: RoPE extends the context to {shown(max_position_embeddings)} positions")
        norm_eps = file.number(eps_field, norm_eps)
        if not 0 <= norm_eps <= 1:
            raise file.error(eps_field, f"must be from 0 to 1, not {norm_eps}")
        quantization = file.quantization()
        return ModelConfig(
            family=family,
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            ffn_size=file.size("intermediate_size"),
            vocab_size=file.size("vocab_size"),
            max_position_embeddings=max_position_embeddings,
            norm_eps=norm_eps,
            activation=activations[activation],
            rotations=(rope,) * num_layers,
            tie_word_embeddings=file.flag("tie_word_embeddings", is_tied),
            windows=(None,) * num_layers,
            has_grouped_weights=quantization not in (None, FP8),
            has_float8_weights=quantization == FP8,
        )

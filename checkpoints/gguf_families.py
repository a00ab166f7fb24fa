"""The architectures of GGUF files that are imported: a row of FAMILIES for each, where a new one is an entry.

What the rows say are the conventions of llama.cpp's conversion; what it leaves out of a file because all models of the
architecture share it is a constant here, or in gguf_family_fields.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from . import gguf_family_fields as further
from .folder import CheckpointError, quoted
from .gguf_family_fields import Config, ModelShape
from .gguf_fields import Fields
from .gguf_file import GgufFile

ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class OuterNames:
    """What a checkpoint calls the tensors around its layers, and what precedes the number of a layer."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    positions: str = ""


FurtherFields = Callable[[Fields, ModelShape, Config], Config]


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture's files differ from those of others.

    Names of tensors are those of a layer, the GGUF's and the checkpoint's, without .weight and .bias. A GGUF's name
    that has one of these stands for the checkpoint's whole name.

    tensors          that all layers have
    mlp              those of dense layers
    experts          those of layers with experts. A tensor whose name in the checkpoint has {} is divided among them
    one_row          of these, matrices of one row, which a GGUF may hold as vectors
    optional         of these, what models have in all layers or in none
    biases           which tensors have biases together, by the field of config.json that says so; "": in every file
    has_norm_weight  otherwise the norm behind all layers is in no tensor, as the others are
    has_norm_bias    norms have biases
    has_head_bias    logits have one
    model_type       in config.json; empty: the GGUF's name of the architecture
    is_permuted      the GGUF pairs rows 2i and 2i + 1 of a head of Q and K for the rotation, the checkpoint does not
    has_qkv_by_head  the checkpoint has the query, key and value of one head after the other, the GGUF all queries first
    rotates_part     heads may be rotated in part
    norm_offset      what the GGUF has added to the weights of norms
    numbers          lists of metadata with a number for each layer, and the checkpoint's tensor of it with its shape
    norm_eps         the GGUF's name of the norms' epsilon, and that in config.json
    activation       the name and value of its field in config.json
    has_windows      a layer's window is computed; otherwise the context is cut to the window
    fields           further fields of config.json
    """

    transformers_class: str
    tensors: Mapping[str, str]
    mlp: Mapping[str, str]
    experts: Mapping[str, str] = field(default_factory=dict)
    one_row: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    has_norm_weight: bool = True
    has_norm_bias: bool = False
    has_head_bias: bool = False
    model_type: str = ""
    names: OuterNames = OuterNames()
    is_permuted: bool = False
    has_qkv_by_head: bool = False
    rotates_part: bool = False
    norm_offset: float = 0.0
    numbers: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    norm_eps: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    activation: tuple[str, str] = ("hidden_act", "silu")
    has_windows: bool = False
    fields: FurtherFields = lambda fields, shape, config: {}


_QKV = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
_ATTENTION = {**_QKV, "attn_output": "self_attn.o_proj"}
_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_SANDWICH_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_UNGATED = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_GATED = {"ffn_gate": "mlp.gate_proj", **_UNGATED}
_FUSED = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
_OF_QKV, _OF_ATTENTION, _OF_MLP = tuple(_QKV), tuple(_ATTENTION), tuple(_GATED)
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_CORRECTED_EXPERTS = {
    **_EXPERTS,
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_LAYER_NORM_EPS = "attention.layer_norm_epsilon"


_LLAMA = Family(
    "LlamaForCausalLM",
    _ATTENTION | _PRE_NORMS,
    _GATED,
    biases={"attention_bias": _OF_ATTENTION, "mlp_bias": _OF_MLP},
    is_permuted=True,
)
_OLMO2 = Family("Olmo2ForCausalLM", _ATTENTION | _POST_NORMS | _QK_NORMS, _GATED)
_GRANITE_MOE = replace(
    _LLAMA,
    transformers_class="GraniteMoeForCausalLM",
    mlp={},
    experts={**_EXPERTS, "ffn_gate_inp": "block_sparse_moe.router.layer"},
    biases={"attention_bias": _OF_ATTENTION},
    fields=further.granite_moe,
)
_GPT_BIGCODE = Family(
    "GPTBigCodeForCausalLM",
    {"attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "attn_norm": "ln_1", "ffn_norm": "ln_2"},
    {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    biases={"": ("attn_qkv", "attn_output", "ffn_up", "ffn_down")},
    has_norm_bias=True,
    model_type="gpt_bigcode",
    names=OuterNames("transformer.wte", "transformer.h", "transformer.ln_f", positions="transformer.wpe"),
    norm_eps=(_LAYER_NORM_EPS, "layer_norm_epsilon"),
    activation=("activation_function", "gelu_pytorch_tanh"),
    fields=lambda fields, shape, config: {"multi_query": True},
)

FAMILIES = {
    "llama": _LLAMA,
    "llama with experts": replace(
        _LLAMA,
        transformers_class="MixtralForCausalLM",
        model_type="mixtral",
        experts=_MIXTRAL_EXPERTS,
        biases={},
        fields=further.local_experts,
    ),
    "qwen2": Family("Qwen2ForCausalLM", _ATTENTION | _PRE_NORMS, _GATED, biases={"": _OF_QKV}),
    "qwen3": Family("Qwen3ForCausalLM", _ATTENTION | _PRE_NORMS | _QK_NORMS, _GATED),
    "olmo2": _OLMO2,
    "olmo2 with windows": replace(
        _OLMO2, transformers_class="Olmo3ForCausalLM", model_type="olmo3", has_windows=True, fields=further.olmo3
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        _ATTENTION | _PRE_NORMS,
        _GATED,
        norm_offset=1.0,
        activation=("hidden_act", "gelu_pytorch_tanh"),
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _ATTENTION | _SANDWICH_NORMS,
        _GATED,
        norm_offset=1.0,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        has_windows=True,
        fields=further.gemma2,
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        _ATTENTION | _SANDWICH_NORMS | _QK_NORMS,
        _GATED,
        norm_offset=1.0,
        model_type="gemma3_text",
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        has_windows=True,
        fields=further.gemma3,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj", **_PRE_NORMS},
        _FUSED,
        rotates_part=True,
        has_windows=True,
        fields=further.phi3,
    ),
    # Files do not say which layers rotate: three of four do.
    "smollm3": replace(_LLAMA, transformers_class="SmolLM3ForCausalLM"),
    "granite": replace(_LLAMA, transformers_class="GraniteForCausalLM", fields=further.granite),
    "hunyuan-dense": Family(
        "HunYuanDenseV1ForCausalLM",
        {
            **_ATTENTION,
            **_PRE_NORMS,
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
        _GATED,
        biases={"attention_bias": _OF_ATTENTION},
        model_type="hunyuan_v1_dense",
    ),
    "olmo": Family(
        "OlmoForCausalLM",
        _ATTENTION,
        _GATED,
        has_norm_weight=False,
        is_permuted=True,
        norm_eps=(_LAYER_NORM_EPS, "rms_norm_eps"),
    ),
    "phi2": Family(
        "PhiForCausalLM",
        {**_QKV, "attn_output": "self_attn.dense", "attn_norm": "input_layernorm"},
        {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        biases={"": (*_OF_ATTENTION, "ffn_up", "ffn_down")},
        has_norm_bias=True,
        has_head_bias=True,
        model_type="phi",
        names=OuterNames(final_norm="model.final_layernorm"),
        rotates_part=True,
        norm_eps=(_LAYER_NORM_EPS, "layer_norm_eps"),
        activation=("hidden_act", "gelu_new"),
    ),
    "jais2": Family(
        "Jais2ForCausalLM",
        _ATTENTION | _PRE_NORMS,
        _UNGATED,
        biases={"attention_bias": _OF_ATTENTION, "mlp_bias": tuple(_UNGATED)},
        has_norm_bias=True,
        norm_eps=(_LAYER_NORM_EPS, "layer_norm_eps"),
        activation=("hidden_act", "relu2"),
    ),
    "arcee": replace(
        _LLAMA,
        transformers_class="ArceeForCausalLM",
        mlp=_UNGATED,
        biases={"attention_bias": _OF_ATTENTION, "mlp_bias": tuple(_UNGATED)},
        activation=("hidden_act", "relu2"),
    ),
    "apertus": Family(
        "ApertusForCausalLM",
        {**_ATTENTION, **_QK_NORMS, "attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        _UNGATED,
        biases={"attention_bias": _OF_ATTENTION},
        numbers={
            "xielu.alpha_p": ("mlp.act_fn.alpha_p", (1,)),
            "xielu.alpha_n": ("mlp.act_fn.alpha_n", (1,)),
            "xielu.beta": ("mlp.act_fn.beta", ()),
            "xielu.eps": ("mlp.act_fn.eps", ()),
        },
        activation=("hidden_act", "xielu"),
        fields=further.apertus,
    ),
    "mistral3": replace(
        _LLAMA,
        transformers_class="Ministral3ForCausalLM",
        model_type="ministral3",
        biases={},
        fields=further.ministral3,
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        {
            **_ATTENTION,
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        _FUSED,
        biases={"attention_bias": _OF_QKV},
        rotates_part=True,
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        _ATTENTION | _POST_NORMS | _QK_NORMS,
        _GATED,
        has_windows=True,
        fields=further.exaone4,
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        {**_ATTENTION, "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"},
        _GATED,
        biases={"attention_bias": _OF_QKV, "attention_out_bias": ("attn_output",), "mlp_bias": _OF_MLP},
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        _ATTENTION | _PRE_NORMS,
        _GATED,
        biases={"use_bias": (*_OF_ATTENTION, *_OF_MLP)},
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        _ATTENTION | _PRE_NORMS,
        {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        biases={"use_bias": (*_OF_ATTENTION, "ffn_up", "ffn_down")},
        has_norm_bias=True,
        norm_eps=(_LAYER_NORM_EPS, "norm_epsilon"),
        activation=("hidden_act", "gelu_pytorch_tanh"),
    ),
    "stablelm": Family(
        "StableLmForCausalLM",
        _ATTENTION | _PRE_NORMS,
        _GATED,
        optional=frozenset({"ffn_norm"}),
        biases={"use_qkv_bias": _OF_QKV},
        has_norm_bias=True,
        rotates_part=True,
        norm_eps=(_LAYER_NORM_EPS, "layer_norm_eps"),
        fields=further.stablelm,
    ),
    "nemotron": Family(
        "NemotronForCausalLM",
        _ATTENTION | _PRE_NORMS,
        _UNGATED,
        biases={"attention_bias": _OF_ATTENTION, "mlp_bias": tuple(_UNGATED)},
        has_norm_bias=True,
        rotates_part=True,
        norm_offset=1.0,
        norm_eps=(_LAYER_NORM_EPS, "norm_eps"),
        activation=("hidden_act", "relu2"),
    ),
    "command-r": Family(
        "CohereForCausalLM",
        {**_ATTENTION, "attn_norm": "input_layernorm"},
        _GATED,
        model_type="cohere",
        norm_eps=(_LAYER_NORM_EPS, "layer_norm_eps"),
        fields=further.cohere,
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        {**_ATTENTION, "attn_norm": "input_layernorm"},
        _GATED,
        norm_eps=(_LAYER_NORM_EPS, "layer_norm_eps"),
        has_windows=True,
        fields=further.cohere2,
    ),
    "gptneox": Family(
        "GPTNeoXForCausalLM",
        {
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
        },
        {"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"},
        biases={"attention_bias": ("attn_qkv", "attn_output"), "": ("ffn_up", "ffn_down")},
        has_norm_bias=True,
        model_type="gpt_neox",
        names=OuterNames("gpt_neox.embed_in", "gpt_neox.layers", "gpt_neox.final_layer_norm", "embed_out"),
        has_qkv_by_head=True,
        rotates_part=True,
        norm_eps=(_LAYER_NORM_EPS, "layer_norm_eps"),
        activation=("hidden_act", "gelu"),
        fields=further.gpt_neox,
    ),
    "starcoder": _GPT_BIGCODE,
    # GPT-2's checkpoints are transposed, but those of GPT-BigCode with keys for each head are the same model.
    "gpt2": replace(_GPT_BIGCODE, has_qkv_by_head=True, fields=lambda fields, shape, config: {"multi_query": False}),
    "qwen2moe": Family(
        "Qwen2MoeForCausalLM",
        _ATTENTION | _PRE_NORMS,
        {},
        {
            **_EXPERTS,
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
        one_row=frozenset({"ffn_gate_inp_shexp"}),
        biases={"": _OF_QKV},
        model_type="qwen2_moe",
        fields=further.qwen2_moe,
    ),
    "qwen3moe": Family(
        "Qwen3MoeForCausalLM",
        _ATTENTION | _PRE_NORMS | _QK_NORMS,
        {},
        _EXPERTS,
        model_type="qwen3_moe",
        fields=further.qwen3_moe,
    ),
    "olmoe": Family("OlmoeForCausalLM", _ATTENTION | _PRE_NORMS | _QK_NORMS, {}, _EXPERTS, fields=further.olmoe),
    "granitemoe": _GRANITE_MOE,
    "granitemoe with shared experts": replace(
        _GRANITE_MOE,
        transformers_class="GraniteMoeSharedForCausalLM",
        model_type="granitemoeshared",
        experts={
            **_GRANITE_MOE.experts,
            "ffn_gate_shexp": "shared_mlp.gate_proj",
            "ffn_up_shexp": "shared_mlp.up_proj",
            "ffn_down_shexp": "shared_mlp.output_linear",
        },
        fields=further.granite_moe_shared,
    ),
    "glm4moe": Family(
        "Glm4MoeForCausalLM",
        {
            **_ATTENTION,
            **_QK_NORMS,
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
        },
        _GATED,
        _CORRECTED_EXPERTS,
        optional=frozenset(_QK_NORMS),
        biases={"attention_bias": _OF_QKV},
        model_type="glm4_moe",
        rotates_part=True,
        fields=further.glm4_moe,
    ),
    "dots1": Family(
        "Dots1ForCausalLM",
        _ATTENTION | _PRE_NORMS | _QK_NORMS,
        _GATED,
        _CORRECTED_EXPERTS,
        fields=further.deepseek_moe,
    ),
    "ernie4_5-moe": Family(
        "Ernie4_5_MoeForCausalLM",
        _ATTENTION | _PRE_NORMS,
        _GATED,
        {**_CORRECTED_EXPERTS, "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        one_row=frozenset({"exp_probs_b"}),
        model_type="ernie4_5_moe",
        fields=further.ernie_moe,
    ),
    "minimax-m2": Family(
        "MiniMaxM2ForCausalLM",
        _ATTENTION | _PRE_NORMS | _QK_NORMS,
        {},
        {**_MIXTRAL_EXPERTS, "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
        model_type="minimax_m2",
        rotates_part=True,
        fields=further.minimax_m2,
    ),
    "gpt-oss": Family(
        "GptOssForCausalLM",
        {
            **_ATTENTION,
            "attn_sinks.weight": "self_attn.sinks",
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
        },
        {},
        {**_EXPERTS, "ffn_gate_inp": "mlp.router"},
        biases={"": (*_OF_ATTENTION, "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")},
        model_type="gpt_oss",
        has_windows=True,
        fields=further.gpt_oss,
    ),
}


def family_of(file: GgufFile) -> Family:
    """The row of a file's architecture. Raises CheckpointError if there is none."""
    name, fields = file.architecture, Fields(file)
    if name == "llama" and fields.count("expert_count", 0):
        name = "llama with experts"
    if name == "olmo2" and fields.count("attention.sliding_window", 0):
        name = "olmo2 with windows"
    if name == "granitemoe" and "blk.0.ffn_gate_shexp.weight" in file.tensors:
        name = "granitemoe with shared experts"
    if name not in FAMILIES:
        raise CheckpointError(
            f"{file.name}: architecture {quoted(name)} is not supported; supported: {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]

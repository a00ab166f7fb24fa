"""Every field of config.json is read, known to have no effect, or refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GptOssConfig, Qwen3MoeConfig

from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.models import read_config

_COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
}


def _sizes(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int, positions: int) -> dict[str, Any]:
    names = "num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads vocab_size"
    return dict(zip(names.split(), (layers, hidden, ffn, heads, kv_heads, vocab), strict=True)) | {
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6,
    }


_LLAMA3_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_LONGROPE = {"type": "longrope", "long_factor": [1.1] * 48, "short_factor": [1.0] * 48}  # of 96 rotated dimensions
# The fields of config.json as these models were published.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Hy-MT2-7B": {
        "architectures": ["HunYuanDenseV1ForCausalLM"],
        "model_type": "hunyuan_v1_dense",
        **_sizes(32, 4096, 14336, 32, 8, 128167, 262144),
        "add_classification_head": False,
        "attention_bias": False,
        "attention_head_dim": 128,
        "cla_share_factor": 2,
        "class_num": 0,
        "dense_list": [4096, 0],
        "head_dim": 128,
        "hidden_act": "silu",
        "im_end_id": 5,
        "im_newline_id": 11,
        "im_start_id": 4,
        "mask_init_id": 12,
        "mlp_bias": False,
        "norm_type": "rms",
        "org_vocab_size": 128167,
        "pad_id": 127961,
        "pool_type": "last",
        "pretraining_tp": 1,
        "rope_scaling": {
            "alpha": 1000.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "type": "dynamic",
        },
        "rope_theta": 10000.0,
        "text_end_id": 7,
        "text_start_id": 6,
        "tie_word_embeddings": True,
        "use_cla": False,
        "use_qk_norm": True,
        "use_rotary_pos_emb": True,
    },
    "Llama-3.2-1B-Instruct": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_sizes(16, 2048, 8192, 32, 8, 128256, 131072),
        "attention_bias": False,
        "head_dim": 64,
        "hidden_act": "silu",
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_scaling": _LLAMA3_ROPE,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "SmolLM2-135M-Instruct": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_sizes(30, 576, 1536, 9, 3, 49152, 8192),
        "attention_bias": False,
        "hidden_act": "silu",
        "is_llama_config": True,
        "mlp_bias": False,
        "pad_token_id": 2,
        "pretraining_tp": 1,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    },
    "Qwen2.5-0.5B-Instruct": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        **_sizes(24, 896, 4864, 14, 2, 151936, 32768),
        "hidden_act": "silu",
        "max_window_layers": 21,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_mrope": False,
        "use_sliding_window": False,
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **_sizes(28, 1024, 3072, 16, 8, 151936, 40960),
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_window_layers": 28,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "gemma-3-270m": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **_sizes(18, 640, 2048, 4, 1, 262144, 32768),
        "_sliding_window_pattern": 6,
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "use_bidirectional_attention": False,
    },
    "gemma-2b": {
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",
        **_sizes(18, 2048, 16384, 8, 1, 256000, 8192),
        "attention_bias": False,
        "head_dim": 256,
        "hidden_act": "gelu",
        "pad_token_id": 0,
        "rope_scaling": None,
        "rope_theta": 10000.0,
    },
    "Phi-3-mini-128k-instruct": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        **_sizes(32, 3072, 8192, 32, 32, 32064, 131072),
        "_name_or_path": "Phi-3-mini-128k-instruct",
        "attention_bias": False,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "embd_pdrop": 0.0,
        "hidden_act": "silu",
        "original_max_position_embeddings": 4096,
        "resid_pdrop": 0.0,
        "rope_scaling": _LONGROPE,
        "rope_theta": 10000.0,
        "sliding_window": 262144,
        "tie_word_embeddings": False,
    },
    "Phi-4-mini-instruct": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        **_sizes(32, 3072, 8192, 24, 8, 200064, 131072),
        "attention_bias": False,
        "embd_pdrop": 0.0,
        "full_attn_mod": 1,
        "hidden_act": "silu",
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "mlp_bias": False,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "resid_pdrop": 0.0,
        "rope_scaling": _LONGROPE,
        "rope_theta": 10000.0,
        "sliding_window": 262144,
        "tie_word_embeddings": True,
    },
    "Mistral-7B-Instruct-v0.3": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        **_sizes(32, 4096, 14336, 32, 8, 32768, 32768),
        "hidden_act": "silu",
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "granite-3.3-2b-instruct": {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        **_sizes(40, 2048, 8192, 32, 8, 49159, 131072),
        "attention_bias": False,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "hidden_act": "silu",
        "logits_scaling": 8.0,
        "mlp_bias": False,
        "residual_multiplier": 0.22,
        "rope_scaling": None,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": True,
    },
    "SmolLM3-3B": {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        **_sizes(36, 2048, 11008, 16, 4, 128256, 65536),
        "attention_bias": False,
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * 36,
        "max_window_layers": 28,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "pad_token_id": 128004,
        "pretraining_tp": 2,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "GLM-4-9B-0414": {
        "architectures": ["Glm4ForCausalLM"],
        "model_type": "glm4",
        **_sizes(40, 4096, 13696, 32, 2, 151552, 32768),
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "pad_token_id": 151329,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "EXAONE-4.0-1.2B": {
        "architectures": ["Exaone4ForCausalLM"],
        "model_type": "exaone4",
        **_sizes(30, 2048, 4096, 32, 8, 102400, 65536),
        "head_dim": 64,
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * 30,
        "pad_token_id": 0,
        "rope_scaling": {**_LLAMA3_ROPE, "factor": 16.0},
        "rope_theta": 1000000,
        "sliding_window": None,
        "sliding_window_pattern": None,
        "tie_word_embeddings": True,
    },
}


def write_config(folder: Path, fields: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_published_config_is_read(model: str, tmp_path: Path) -> None:
    fields = PUBLISHED[model] | _COMMON
    assert read_config(write_config(tmp_path, fields)).num_layers == fields["num_hidden_layers"]


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_field_that_no_family_reads_is_refused_unless_it_switches_something_off(model: str, tmp_path: Path) -> None:
    for value in (True, 1, 0.5, "on", [1], {"factor": 1}):
        fields = PUBLISHED[model] | _COMMON | {"dual_chunk_attention_config": value}
        with pytest.raises(ConfigError, match=r"dual_chunk_attention_config is .* which this family does not compute"):
            read_config(write_config(tmp_path, fields))
    for value in (None, False, 0, "", [], {}):
        read_config(write_config(tmp_path, fields | {"dual_chunk_attention_config": value}))


def test_longrope_serves_short_contexts_unless_longer_ones_are_wanted(tmp_path: Path) -> None:
    write_config(tmp_path, PUBLISHED["Phi-3-mini-128k-instruct"] | _COMMON)
    assert read_config(tmp_path).max_position_embeddings == 4096
    assert read_config(tmp_path).rotations[0].pair_factors[0] == 1.0
    assert read_config(tmp_path, max_model_len=4096).rotations[0].pair_factors[0] == 1.0
    assert read_config(tmp_path, max_model_len=4097).max_position_embeddings == 131072
    assert read_config(tmp_path, max_model_len=4097).rotations[0].pair_factors[0] == 1.1


@pytest.mark.parametrize("thetas", ["x", [1e4], [1e4, -1.0], [1e4, float("nan")], [1e4, None], [1e4, 1e-320]])
def test_a_theta_for_each_layer_must_give_frequencies(thetas: Any, tmp_path: Path) -> None:
    fields = {"model_type": "granite_swa", **_sizes(2, 48, 80, 6, 2, 199, 256), "layer_rope_theta": thetas}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=r"config\.json: (layer_rope_theta must|the parameters of default RoPE give)"):
        read_config(tmp_path)


@pytest.mark.parametrize("dense", [["0"], [0.0], [True], [-1], [99], "0", {"0": 1}])
def test_dense_layers_are_whole_numbers_of_layers(dense: Any, tmp_path: Path) -> None:
    config = Qwen3MoeConfig(num_hidden_layers=4, mlp_only_layers=[0], architectures=["Qwen3MoeForCausalLM"]).to_dict()
    assert read_config(write_config(tmp_path, config)).experts is not None
    with pytest.raises(ConfigError, match=r"config\.json: mlp_only_layers must be a list of layers below 4, not "):
        read_config(write_config(tmp_path, config | {"mlp_only_layers": dense}))


@pytest.mark.parametrize("field", ["intermediate_size", "num_local_experts"])
def test_experts_that_no_memory_holds_are_refused_by_their_size(field: str, tmp_path: Path) -> None:
    config = GptOssConfig(architectures=["GptOssForCausalLM"]).to_dict()
    with pytest.raises(ConfigError, match=rf"config\.json: {field} is 16777216, at most "):
        read_config(write_config(tmp_path, config | {field: 1 << 24}))


@pytest.mark.parametrize("alpha", [-3.0, "x", 1e308, float("nan"), [2.0]])
def test_an_alpha_without_frequencies_is_refused(alpha: Any, tmp_path: Path) -> None:
    fields = PUBLISHED["Hy-MT2-7B"] | {"rope_scaling": {"type": "dynamic", "alpha": alpha}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=r"config\.json: (alpha|rope_theta) .*RoPE"):
        read_config(tmp_path)


_GPTJ = {"model_type": "gptj", "n_layer": 2, "n_embd": 48, "n_head": 6, "n_positions": 256, "rotary_dim": 8,
         "vocab_size": 199}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"n_embd": "many"}, "n_embd must be a positive whole number"),
        ({"n_layer": 10**9}, "n_layer is 1000000000, at most"),
        ({"n_positions": None}, "has no n_positions"),
        ({"layer_norm_epsilon": 7}, "layer_norm_epsilon must be from 0 to 1"),
        ({"activation_function": "step"}, "activation_function 'step' is not supported"),
        ({"n_head": 4096}, "n_embd 48 is not a multiple of 4096 attention heads"),
        ({"rotary_dim": 64}, "rotary_dim is 64, but a head has 8 values"),
        ({"model_type": "cohere", "num_attention_heads": 6, "num_hidden_layers": 2, "hidden_size": 48, "logit_scale": 0,
          "intermediate_size": 80, "max_position_embeddings": 256}, "logit_scale must be above 0"),
    ],
)  # fmt: skip
def test_an_error_names_the_field_as_the_file_does(fields: dict[str, Any], problem: str, tmp_path: Path) -> None:
    read_config(write_config(tmp_path, _GPTJ))
    with pytest.raises(ConfigError, match=f"config\\.json:? {problem}"):
        read_config(write_config(tmp_path, _GPTJ | fields))

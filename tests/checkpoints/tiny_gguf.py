"""Tiny GGUF files of every supported family, written from models that transformers makes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

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
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
POST_NORMS = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
NORMS = {"olmo2": POST_NORMS, "gemma3": POST_NORMS | {"pre_feedforward_layernorm": "ffn_norm"}}
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
        for key, value in (_metadata(self.family, self.model.config) | bpe_vocabulary() | self.metadata).items():
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
    config, tensors = model.config, {}
    names = GGUF_NAMES | NORMS.get(family, {})
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        prefix, kind = name.rsplit(".", 1)
        if prefix.startswith("model.layers."):
            _, _, layer, rest = prefix.split(".", 3)
            gguf_name = f"blk.{layer}.{names[rest]}.{kind}"
        else:
            gguf_name = f"{names[prefix]}.{kind}"
        values = parameter.float().numpy()
        if family == "llama" and ".attn_q." in gguf_name:
            values = interleave(values, config.num_attention_heads)
        if family == "llama" and ".attn_k." in gguf_name:
            values = interleave(values, config.num_key_value_heads)
        tensors[gguf_name] = values + np.float32(family == "gemma3" and "norm" in gguf_name)
    return tensors


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """The order of Q's and K's rows in a llama GGUF, where rows of a head's two halves alternate."""
    by_half = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(by_half.swapaxes(1, 2).reshape(values.shape))


def _metadata(family: str, config: object) -> dict[str, object]:
    rope = config.rope_parameters
    metadata: dict[str, object] = {
        f"{family}.block_count": config.num_hidden_layers,
        f"{family}.context_length": config.max_position_embeddings,
        f"{family}.embedding_length": config.hidden_size,
        f"{family}.feed_forward_length": config.intermediate_size,
        f"{family}.attention.head_count": config.num_attention_heads,
        f"{family}.attention.head_count_kv": config.num_key_value_heads,
        f"{family}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{family}.rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
    }
    if family == "gemma3":
        metadata["gemma3.attention.sliding_window"] = config.sliding_window
    if head_dim := getattr(config, "head_dim", None):
        metadata[f"{family}.attention.key_length"] = head_dim
        metadata[f"{family}.attention.value_length"] = head_dim
    return metadata


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

"""Tiny models with random weights, as transformers saves them, and plans that run them by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    ApertusConfig,
    ArceeConfig,
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    CwmConfig,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    FlexOlmoConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeSharedConfig,
    GraniteSWAConfig,
    HeliumConfig,
    HunYuanDenseV1Config,
    HyperCLOVAXConfig,
    InternLM3Config,
    IQuestCoderConfig,
    Jais2Config,
    LlamaConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
    VaultGemmaConfig,
)

from pagoda_server.engine.core.sequence import BlockTable, Request, SamplingParams, Sequence, WindowTable
from pagoda_server.engine.core.step import Chunk, StepPlan
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.settings.engine import EngineConfig

VOCAB_SIZE = 199
_NO_TOKENS: dict[str, Any] = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}  # beyond the vocabulary
BLOCK_SIZE = 4

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Large enough that attention is far from uniform, and a mistake shows.
    "initializer_range": 0.3,
}


def _rope(kind: str, **parameters: float) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0, **parameters}


_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_GPT_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 6,
    "n_positions": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OWN_KEYS = {name: size for name, size in _SIZES.items() if name != "num_key_value_heads"}  # for each head
_LLAMA3_ROPE = _rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROUTED: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}

MODELS: dict[str, PreTrainedConfig] = {
    "llama with biases": LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True),
    "llama": LlamaConfig(**_SIZES),
    "smollm": LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "mistral with a sliding window": MistralConfig(**_SIZES, sliding_window=7),
    "mistral": MistralConfig(**_SIZES, head_dim=16, sliding_window=None),
    "qwen2 with a sliding window on its upper layer": Qwen2Config(
        **_SIZES, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen2 with a sliding window": Qwen2Config(
        **_SIZES, use_sliding_window=True, sliding_window=9, max_window_layers=0
    ),
    "qwen2": Qwen2Config(**_SIZES),
    "qwen3": Qwen3Config(**_SIZES, head_dim=16),
    "olmo2": Olmo2Config(**_SIZES, rms_norm_eps=1e-5),
    "olmo2 with biases, tied": Olmo2Config(**_SIZES, attention_bias=True, tie_word_embeddings=True),
    "olmo3": Olmo3Config(
        **_SIZES,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": _rope("yarn", original_max_position_embeddings=64),
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        **_NO_TOKENS,
    ),
    "ministral": MinistralConfig(
        **_SIZES, head_dim=8, sliding_window=7, layer_types=["sliding_attention", "full_attention"], **_NO_TOKENS
    ),
    "ministral3": Ministral3Config(
        **_SIZES,
        head_dim=8,
        rope_parameters=_rope("yarn", original_max_position_embeddings=256, llama_4_scaling_beta=0.1),
        **_NO_TOKENS,
    ),
    "arcee": ArceeConfig(**_SIZES, head_dim=8, attention_bias=True, mlp_bias=True, **_NO_TOKENS),
    "apertus": ApertusConfig(**_SIZES, rope_parameters=_LLAMA3_ROPE, **_NO_TOKENS),
    "cwm": CwmConfig(
        **_SIZES,
        head_dim=8,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=_LLAMA3_ROPE,
        eos_token_id=2,
    ),
    "internlm3": InternLM3Config(**_SIZES, head_dim=16),
    "iquestcoder": IQuestCoderConfig(**_SIZES, head_dim=16),
    "hyperclovax": HyperCLOVAXConfig(
        **_SIZES,
        head_dim=8,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.4,
        logits_scaling=2.5,
        **_NO_TOKENS,
    ),
    "smollm3": SmolLM3Config(**_SIZES, no_rope_layers=[1, 0], **_NO_TOKENS),
    "granite": GraniteConfig(
        **_SIZES,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.4,
        logits_scaling=2.5,
        attention_bias=True,
        mlp_bias=True,
    ),
    "granite, tied": GraniteConfig(
        **_SIZES, embedding_multiplier=3.0, attention_multiplier=0.2, logits_scaling=2.5, tie_word_embeddings=True
    ),
    "granite_swa": GraniteSWAConfig(
        **_SIZES,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.4,
        logits_scaling=2.5,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
        layer_rope_theta=[500.0, 0],
        **_NO_TOKENS,
    ),
    "glm": GlmConfig(**_SIZES, head_dim=8, **_NO_TOKENS),
    "glm4": Glm4Config(**_SIZES, head_dim=16, **_NO_TOKENS),
    "exaone4": Exaone4Config(
        **_SIZES, sliding_window=7, layer_types=["sliding_attention", "full_attention"], **_NO_TOKENS
    ),
    "exaone4 without a window": Exaone4Config(
        **_SIZES, sliding_window=None, layer_types=["full_attention"] * 2, **_NO_TOKENS
    ),
    "seed_oss": SeedOssConfig(**_SIZES, head_dim=16, attention_out_bias=True),
    "ernie4_5": Ernie4_5Config(**_SIZES, head_dim=16, use_bias=True),
    "hunyuan_v1_dense": HunYuanDenseV1Config(
        **_SIZES,
        head_dim=16,
        attention_bias=True,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 1.0, "alpha": 50.0},
    ),
    "helium": HeliumConfig(**(_SIZES | {"hidden_size": 96}), head_dim=16),
    "phi": PhiConfig(**_SIZES, **_NO_TOKENS),
    "starcoder2": Starcoder2Config(**_SIZES, sliding_window=9, **_NO_TOKENS),
    "stablelm": StableLmConfig(
        **_SIZES, rope_parameters={**_DEFAULT_ROPE, "partial_rotary_factor": 0.25}, use_qkv_bias=True, **_NO_TOKENS
    ),
    "stablelm, parallel": StableLmConfig(
        **_SIZES,
        rope_parameters={**_DEFAULT_ROPE, "partial_rotary_factor": 0.5},
        use_parallel_residual=True,
        **_NO_TOKENS,
    ),
    "gpt_neox": GPTNeoXConfig(
        **_OWN_KEYS, rope_parameters={**_DEFAULT_ROPE, "partial_rotary_factor": 0.25}, **_NO_TOKENS
    ),
    "gpt_neox, not parallel": GPTNeoXConfig(**_OWN_KEYS, use_parallel_residual=False, **_NO_TOKENS),
    "gpt2": GPT2Config(**_GPT_SIZES, n_inner=80),
    "gpt_bigcode": GPTBigCodeConfig(**_GPT_SIZES, n_inner=80),
    "gpt_bigcode, keys of each head": GPTBigCodeConfig(**_GPT_SIZES, multi_query=False),
    "gptj": GPTJConfig(**_GPT_SIZES, rotary_dim=4),
    "opt": OPTConfig(
        **{name: size for name, size in _OWN_KEYS.items() if name != "intermediate_size"},
        ffn_dim=80,
        word_embed_proj_dim=48,
        init_std=0.3,
        dropout=0.0,
        **(_NO_TOKENS | {"pad_token_id": 1}),
    ),
    "cohere": CohereConfig(**_SIZES, logit_scale=0.3, **_NO_TOKENS),
    "cohere2": Cohere2Config(
        **_SIZES, sliding_window=7, layer_types=["sliding_attention", "full_attention"], **_NO_TOKENS
    ),
    "nemotron": NemotronConfig(**_SIZES, head_dim=8, **_NO_TOKENS),
    "jais2": Jais2Config(**_SIZES, head_dim=8, **_NO_TOKENS),
    "olmo": OlmoConfig(**_SIZES, attention_bias=True, **_NO_TOKENS),
    "gemma": GemmaConfig(**_SIZES, head_dim=16, **_NO_TOKENS),
    "gemma2": Gemma2Config(
        **_SIZES,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=7,
        attn_logit_softcapping=0.3,
        final_logit_softcapping=8.0,  # at less, most logits of these weights are at the cap and tie
        **_NO_TOKENS,
    ),
    "vaultgemma": VaultGemmaConfig(
        **_SIZES,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=7,
        attn_logit_softcapping=0.3,
        final_logit_softcapping=8.0,
        **_NO_TOKENS,
    ),
    "gemma3": Gemma3TextConfig(
        **_SIZES,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
        **_NO_TOKENS,
    ),
    "phi3": Phi3Config(**_SIZES, sliding_window=9, **_NO_TOKENS),
    "phi3 with a part of each head rotated": Phi3Config(
        **_SIZES,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        **_NO_TOKENS,
    ),
    "phi3 with longrope": Phi3Config(
        **(_SIZES | {"max_position_embeddings": 1024}),
        original_max_position_embeddings=256,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0, 1.5, 2.0, 4.0],
            "long_factor": [2.0, 3.0, 4.0, 5.0],
        },
        **_NO_TOKENS,
    ),
    "mixtral": MixtralConfig(**_SIZES, num_local_experts=5, num_experts_per_tok=2, **_NO_TOKENS),
    "mixtral with a sliding window": MixtralConfig(
        **_SIZES, num_local_experts=4, num_experts_per_tok=1, sliding_window=7, **_NO_TOKENS
    ),
    "qwen2_moe": Qwen2MoeConfig(**_SIZES, **_EXPERTS, shared_expert_intermediate_size=40),
    "qwen2_moe with a dense layer": Qwen2MoeConfig(
        **_SIZES, **_EXPERTS, shared_expert_intermediate_size=40, mlp_only_layers=[0], norm_topk_prob=True
    ),
    "qwen3_moe": Qwen3MoeConfig(**_SIZES, **_EXPERTS, head_dim=16, norm_topk_prob=True),
    "qwen3_moe with a sliding window and a dense layer": Qwen3MoeConfig(
        **_SIZES, **_EXPERTS, head_dim=16, decoder_sparse_step=2, use_sliding_window=True, sliding_window=7
    ),
    "olmoe": OlmoeConfig(**(_SIZES | {"hidden_size": 96}), num_experts=9, num_experts_per_tok=3, **_NO_TOKENS),
    "flex_olmo": FlexOlmoConfig(**_SIZES, num_experts=5, num_experts_per_tok=5, **_NO_TOKENS),
    "glm4_moe": Glm4MoeConfig(**_SIZES, **_ROUTED, head_dim=16, use_qk_norm=True, attention_bias=True),
    "glm4_moe with groups of experts": Glm4MoeConfig(
        **_SIZES, **_ROUTED, n_group=4, topk_group=2, n_shared_experts=2, routed_scaling_factor=1.7
    ),
    "dots1": Dots1Config(
        **_SIZES,
        **_ROUTED,
        n_shared_experts=1,
        first_k_dense_replace=1,
        sliding_window=7,
        max_window_layers=1,
        norm_topk_prob=True,
    ),
    "ernie4_5_moe": Ernie4_5_MoeConfig(**_SIZES, moe_num_experts=6, moe_k=2, moe_intermediate_size=24),
    "gpt_oss": GptOssConfig(
        **_SIZES,
        head_dim=16,
        num_local_experts=6,
        num_experts_per_tok=2,
        sliding_window=7,
        swiglu_limit=0.9,
        rope_parameters=_rope("yarn", truncate=False, original_max_position_embeddings=64),
        **_NO_TOKENS,
    ),
    "granitemoe": GraniteMoeConfig(
        **_SIZES,
        num_local_experts=5,
        num_experts_per_tok=2,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.4,
        logits_scaling=2.5,
    ),
    "granitemoeshared": GraniteMoeSharedConfig(
        **_SIZES,
        num_local_experts=5,
        num_experts_per_tok=2,
        shared_intermediate_size=56,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.4,
        logits_scaling=2.5,
    ),
    "minimax_m2": MiniMaxM2Config(**_SIZES, num_local_experts=6, num_experts_per_tok=3, head_dim=16, **_NO_TOKENS),
    "linear rope": LlamaConfig(**_SIZES, rope_parameters=_rope("linear")),
    "llama3 rope": LlamaConfig(**_SIZES, rope_parameters=_LLAMA3_ROPE),
    "yarn rope": LlamaConfig(**_SIZES, rope_parameters=_rope("yarn", original_max_position_embeddings=64)),
    "yarn rope, not truncated": LlamaConfig(
        **_SIZES,
        rope_parameters=_rope(
            "yarn",
            original_max_position_embeddings=64,
            beta_fast=8.0,
            beta_slow=2.0,
            mscale=1.0,
            mscale_all_dim=0.5,
            truncate=False,
        ),
    ),
}

# The first model of each family, for tests that are too slow for all models.
ONE_OF_EACH_FAMILY = list({config.model_type: name for name, config in reversed(MODELS.items())}.values())


def save_model(config: PreTrainedConfig, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Save a model with random weights, norms and biases included; return transformers' model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        has_own = any(kind in name for kind in ("norm", "bias", "sinks"))
        if has_own and parameter.is_floating_point():  # a mask may be called bias
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model = model.to(dtype).eval()
    model.save_pretrained(folder)
    return model


def saved_model(name: str, factory: pytest.TempPathFactory) -> Path:
    """Return the folder of one of MODELS, new for a module's tests."""
    folder = factory.mktemp("model")
    save_model(MODELS[name], folder)
    return folder


def load_runner(folder: Path, **settings: Any) -> ModelRunner:
    defaults = {"device": "cpu", "dtype": "float32", "block_size": BLOCK_SIZE, "kv_cache_gb": 0.002, "threads": 1}
    return ModelRunner(EngineConfig(str(folder), **(defaults | settings)))


def random_prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


class ShuffledBlocks:
    """Sequences whose blocks lie anywhere in the cache."""

    def __init__(self, runner: ModelRunner) -> None:
        self._block_size = runner.info.kv_cache.block_size
        self._num_windows = len(runner.info.kv_cache.groups.windows) - 1
        self._free = list(range(runner.info.num_blocks))
        random.Random(0).shuffle(self._free)
        self._num_sequences = 0

    def sequence(self, prompt: Items[int], max_tokens: int, params: SamplingParams | None = None) -> Sequence:
        num_blocks = -(-(len(prompt) + max_tokens) // self._block_size)
        wanted = num_blocks * (1 + self._num_windows)
        if wanted > len(self._free):
            raise AssertionError(f"the test's cache has {len(self._free)} free blocks; {wanted} are wanted")
        params = params or SamplingParams()
        self._num_sequences += 1
        seq = Sequence(self._num_sequences, list(prompt), Request(len(prompt)), params)
        seq.blocks = BlockTable(
            self._take(num_blocks), windows=[WindowTable(self._take(num_blocks)) for _ in range(self._num_windows)]
        )
        return seq

    def _take(self, count: int) -> list[int]:
        return [self._free.pop() for _ in range(count)]


def next_chunk(seq: Sequence, at_most: int = 10_000) -> Chunk:
    length = min(at_most, seq.remaining_len)
    return Chunk(seq, seq.num_computed, length, samples=length == seq.remaining_len)


def step(runner: ModelRunner, chunks: list[Chunk]) -> None:
    """Execute a plan and do with its outcome what the scheduler would. Fail on any fault."""
    sampled = runner.execute(StepPlan(chunks))
    assert not sampled.faults, sampled.faults
    for chunk, token in zip(chunks, sampled.tokens, strict=True):
        chunk.seq.num_computed = chunk.end
        if token >= 0:
            chunk.seq.tokens.append(token)


def generate(runner: ModelRunner, seq: Sequence, count: int, chunk_size: int = 10_000) -> list[int]:
    """Run a sequence alone until it has `count` tokens of output; return them."""
    while seq.output_len < count:
        step(runner, [next_chunk(seq, chunk_size)])
    return seq.tokens[seq.request.prompt_len :]


def step_logits(runner: ModelRunner, chunks: list[Chunk]) -> torch.Tensor:
    """Return a row of logits for each chunk of a plan that samples."""
    with torch.inference_mode():
        inputs = runner._arrays.pack(chunks, runner._ops, runner._cache[0])
        return runner._model.forward(inputs, runner._cache)

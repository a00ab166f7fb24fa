"""The parameters of a Llama-family model: merged for few, large products, and found by their names in a checkpoint."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from pagoda_server.checkpoints.grouped_weights import GROUP_SIZE
from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.models.config import ModelConfig
from pagoda_server.kernels import Int4Weight

Weight = Tensor | Int4Weight
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_OUTPUT = ("self_attn.o_proj",)
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_DOWN = ("mlp.down_proj",)
_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """One decoder layer. Query, key and value projections stand above each other, and so do gate and up.

    A weight is an Int4Weight if all of it is in 4 bits in the checkpoint, and the backend takes that.

    qkv_weight      [(heads + 2 * kv_heads) * head_dim, hidden]
    output_weight   [hidden, heads * head_dim]
    gate_up_weight  [2 * ffn, hidden]
    down_weight     [hidden, ffn]
    """

    input_norm: Tensor
    qkv_weight: Weight
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output_weight: Weight
    output_bias: Tensor | None
    post_attention_norm: Tensor
    gate_up_weight: Weight
    gate_up_bias: Tensor | None
    down_weight: Weight
    down_bias: Tensor | None

    @staticmethod
    def allocate(
        config: ModelConfig, device: torch.device, dtype: torch.dtype, prefix: str, int4: Set[str]
    ) -> LayerParameters:
        empty = partial(torch.empty, device=device, dtype=dtype)
        hidden, query, ffn = config.hidden_size, config.query_size, config.ffn_size
        qkv = query + 2 * config.kv_size

        def weight(parts: tuple[str, ...], out_size: int, in_size: int) -> Weight:
            names = [f"{prefix}{part}.weight" for part in parts]
            if all(name in int4 for name in names):
                return _allocate_int4(names[0], out_size, in_size)
            return empty(out_size, in_size)

        return LayerParameters(
            input_norm=empty(hidden),
            qkv_weight=weight(_QKV, qkv, hidden),
            qkv_bias=empty(qkv) if config.qkv_bias else None,
            query_norm=empty(config.head_dim) if config.qk_norm else None,
            key_norm=empty(config.head_dim) if config.qk_norm else None,
            output_weight=weight(_OUTPUT, hidden, query),
            output_bias=empty(hidden) if config.output_bias else None,
            post_attention_norm=empty(hidden),
            gate_up_weight=weight(_GATE_UP, 2 * ffn, hidden),
            gate_up_bias=empty(2 * ffn) if config.mlp_bias else None,
            down_weight=weight(_DOWN, hidden, ffn),
            down_bias=empty(hidden) if config.mlp_bias else None,
        )

    def by_name(self, prefix: str, config: ModelConfig) -> dict[str, Weight]:
        query, kv, ffn = config.query_size, config.kv_size, config.ffn_size
        places: dict[str, Weight | None] = {
            "input_layernorm.weight": self.input_norm,
            "self_attn.q_norm.weight": self.query_norm,
            "self_attn.k_norm.weight": self.key_norm,
            "post_attention_layernorm.weight": self.post_attention_norm,
        }
        merged: tuple[tuple[tuple[str, ...], list[int], Weight, Tensor | None], ...] = (
            (_QKV, [query, kv, kv], self.qkv_weight, self.qkv_bias),
            (_OUTPUT, [config.hidden_size], self.output_weight, self.output_bias),
            (_GATE_UP, [ffn, ffn], self.gate_up_weight, self.gate_up_bias),
            (_DOWN, [config.hidden_size], self.down_weight, self.down_bias),
        )
        for parts, sizes, weight, bias in merged:
            places |= {f"{part}.weight": rows for part, rows in zip(parts, weight.split(sizes), strict=True)}
            if bias is not None:
                places |= {f"{part}.bias": rows for part, rows in zip(parts, bias.split(sizes), strict=True)}
        return {prefix + name: place for name, place in places.items() if place is not None}


@dataclass(frozen=True, slots=True)
class Parameters:
    """
    embedding, head  [vocab, hidden]; one tensor if they are tied. The embedding is never in 4 bits
    """

    embedding: Tensor
    layers: list[LayerParameters]
    final_norm: Tensor
    head: Weight

    @staticmethod
    def allocate(
        config: ModelConfig, device: torch.device, dtype: torch.dtype, int4: Set[str] = frozenset()
    ) -> Parameters:
        """With whatever the memory held: to be filled through `by_name`.

        int4  names of weights that stay in 4 bits

        Raises ConfigError if one of them cannot have the size that `config` gives it.
        """
        embedding = torch.empty(config.vocab_size, config.hidden_size, device=device, dtype=dtype)
        head: Weight = embedding
        if not config.tie_word_embeddings:
            shape = config.vocab_size, config.hidden_size
            head = _allocate_int4(_HEAD, *shape) if _HEAD in int4 else torch.empty_like(embedding)
        prefixes = (_prefix(number) for number in range(config.num_layers))
        return Parameters(
            embedding=embedding,
            layers=[LayerParameters.allocate(config, device, dtype, prefix, int4) for prefix in prefixes],
            final_norm=torch.empty(config.hidden_size, device=device, dtype=dtype),
            head=head,
        )

    @property
    def num_bytes(self) -> int:
        layers = [getattr(layer, field.name) for layer in self.layers for field in fields(layer)]
        tensors = [self.embedding, self.final_norm, *layers]
        if self.head is not self.embedding:
            tensors.append(self.head)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def by_name(self, config: ModelConfig) -> dict[str, Weight]:
        """Each tensor of a checkpoint, by its name there, and the view of a parameter that it belongs in."""
        places: dict[str, Weight] = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.final_norm}
        if not config.tie_word_embeddings:
            places[_HEAD] = self.head
        for number, layer in enumerate(self.layers):
            places |= layer.by_name(_prefix(number), config)
        return places


def _allocate_int4(name: str, out_size: int, in_size: int) -> Int4Weight:
    if in_size % GROUP_SIZE:
        raise ConfigError(
            f"tensor {name} is in 4 bits, of which {GROUP_SIZE} inputs share a scale, but config.json gives it"
            f" {in_size} inputs: not a multiple of {GROUP_SIZE}"
        )
    return Int4Weight.allocate(out_size, in_size)


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}."

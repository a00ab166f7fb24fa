"""The parameters of a Llama-family model: merged for few, large products, and found by their names in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """One decoder layer. Query, key and value projections stand above each other, and so do gate and up.

    qkv_weight      [(heads + 2 * kv_heads) * head_dim, hidden]
    output_weight   [hidden, heads * head_dim]
    gate_up_weight  [2 * ffn, hidden]
    down_weight     [hidden, ffn]
    """

    input_norm: Tensor
    qkv_weight: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output_weight: Tensor
    output_bias: Tensor | None
    post_attention_norm: Tensor
    gate_up_weight: Tensor
    gate_up_bias: Tensor | None
    down_weight: Tensor
    down_bias: Tensor | None

    @staticmethod
    def allocate(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> LayerParameters:
        empty = partial(torch.empty, device=device, dtype=dtype)
        hidden, query, ffn = config.hidden_size, config.query_size, config.ffn_size
        qkv = query + 2 * config.kv_size
        return LayerParameters(
            input_norm=empty(hidden),
            qkv_weight=empty(qkv, hidden),
            qkv_bias=empty(qkv) if config.qkv_bias else None,
            query_norm=empty(config.head_dim) if config.qk_norm else None,
            key_norm=empty(config.head_dim) if config.qk_norm else None,
            output_weight=empty(hidden, query),
            output_bias=empty(hidden) if config.output_bias else None,
            post_attention_norm=empty(hidden),
            gate_up_weight=empty(2 * ffn, hidden),
            gate_up_bias=empty(2 * ffn) if config.mlp_bias else None,
            down_weight=empty(hidden, ffn),
            down_bias=empty(hidden) if config.mlp_bias else None,
        )

    def by_name(self, prefix: str, config: ModelConfig) -> dict[str, Tensor]:
        query, kv, ffn = config.query_size, config.kv_size, config.ffn_size
        places: dict[str, Tensor | None] = {
            "input_layernorm.weight": self.input_norm,
            "self_attn.q_norm.weight": self.query_norm,
            "self_attn.k_norm.weight": self.key_norm,
            "self_attn.o_proj.weight": self.output_weight,
            "self_attn.o_proj.bias": self.output_bias,
            "post_attention_layernorm.weight": self.post_attention_norm,
            "mlp.down_proj.weight": self.down_weight,
            "mlp.down_proj.bias": self.down_bias,
        }
        for kind, qkv, gate_up in (
            ("weight", self.qkv_weight, self.gate_up_weight),
            ("bias", self.qkv_bias, self.gate_up_bias),
        ):
            if qkv is not None:
                for name, rows in zip("qkv", torch.split(qkv, [query, kv, kv]), strict=True):
                    places[f"self_attn.{name}_proj.{kind}"] = rows
            if gate_up is not None:
                for name, rows in zip(("gate", "up"), torch.split(gate_up, [ffn, ffn]), strict=True):
                    places[f"mlp.{name}_proj.{kind}"] = rows
        return {prefix + name: place for name, place in places.items() if place is not None}


@dataclass(frozen=True, slots=True)
class Parameters:
    """
    embedding, head  [vocab, hidden]; one tensor if they are tied
    """

    embedding: Tensor
    layers: list[LayerParameters]
    final_norm: Tensor
    head: Tensor

    @staticmethod
    def allocate(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Parameters:
        """With whatever the memory held: to be filled through `by_name`."""
        embedding = torch.empty(config.vocab_size, config.hidden_size, device=device, dtype=dtype)
        return Parameters(
            embedding=embedding,
            layers=[LayerParameters.allocate(config, device, dtype) for _ in range(config.num_layers)],
            final_norm=torch.empty(config.hidden_size, device=device, dtype=dtype),
            head=embedding if config.tie_word_embeddings else torch.empty_like(embedding),
        )

    @property
    def num_bytes(self) -> int:
        layers = [getattr(layer, field.name) for layer in self.layers for field in fields(layer)]
        tensors = [self.embedding, self.final_norm, *layers]
        if self.head is not self.embedding:
            tensors.append(self.head)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def by_name(self, config: ModelConfig) -> dict[str, Tensor]:
        """Each tensor of a checkpoint, by its name there, and the view of a parameter that it belongs in."""
        places = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.final_norm}
        if not config.tie_word_embeddings:
            places["lm_head.weight"] = self.head
        for number, layer in enumerate(self.layers):
            places |= layer.by_name(f"model.layers.{number}.", config)
        return places

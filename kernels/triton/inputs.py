"""Inputs of the ops, at the shapes of real models, for compiling, tuning and measuring.

On the meta device they have shapes and types but no data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..grouped_weight import GroupedFormat, GroupedWeight
from ..paged import GREATEST, AttentionPlan, PagedKV
from ..rope_and_store_kv import quantize_heads
from ..row_sampling import MAX_BIASES, MAX_STOPS, SamplingRows, allocate_rows

BLOCK_SIZE = 16
# What codes of 4 bits stand for in GGUF's IQ4_NL.
IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model; `tied`: the embedding's table is also the head's weight."""

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    ffn_size: int
    vocab_size: int
    tied: bool = False

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """The sizes [out, in] of a layer's weights and of the head."""
        return {
            "qkv": (self.qkv_size, self.hidden_size),
            "output": (self.hidden_size, self.num_heads * self.head_dim),
            "gate_up": (2 * self.ffn_size, self.hidden_size),
            "down": (self.hidden_size, self.ffn_size),
            "head": (self.vocab_size, self.hidden_size),
        }


LLAMA_8B = ModelShape("llama-3.1-8b", 32, 32, 8, 128, 4096, 14336, 128256)
LLAMA_1B = ModelShape("llama-3.2-1b", 16, 32, 8, 64, 2048, 8192, 128256, tied=True)
SMOLLM2 = ModelShape("smollm2-135m", 30, 9, 3, 64, 576, 1536, 49152, tied=True)


def normal(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device)


def random_groups(form: GroupedFormat, out_size: int, in_size: int, device: torch.device) -> GroupedWeight:
    """A weight with all codes of its format, and elements about as large as those of `normal`."""
    weight = GroupedWeight.allocate(form, out_size, in_size, device)
    levels = 1 << form.bits
    if form.is_float:
        weight.values.copy_(normal(*weight.values.shape, dtype=torch.bfloat16, device=device))
        weight.scales.uniform_(0.5, 1.5)
        return weight
    if form.bits == 4:
        weight.values.random_(0, 256)
    else:
        least = 0 if form.has_minimum and form.bits < 8 else -levels // 2
        weight.values.random_(least, least + levels)
    step = 4 / levels if form.table is None else 4 / max(map(abs, form.table))
    weight.scales.uniform_(step / 2, 3 * step / 2)
    if weight.minimums is not None:
        weight.minimums.uniform_(-3, -1)
    return weight


def random_pages(model: ModelShape, batch: int, context: int, dtype: torch.dtype, device: torch.device) -> PagedKV:
    """The pages of `batch` sequences of length `context`, filled to the last slot; in 8 bits they have scales."""
    shape = (batch * -(-context // BLOCK_SIZE), BLOCK_SIZE, model.num_kv_heads, model.head_dim)
    if dtype not in GREATEST:
        return PagedKV(*(torch.randn(shape, dtype=dtype, device=device) for _ in range(2)))
    (keys, key_scales), (values, value_scales) = (
        quantize_heads(torch.randn(shape, dtype=torch.bfloat16, device=device), dtype) for _ in range(2)
    )
    return PagedKV(keys, values, key_scales, value_scales)


def attention_plan(batch: int, context: int, query_len: int, device: torch.device) -> AttentionPlan:
    """A plan for `batch` sequences of length `context` whose blocks are shuffled among those of `random_pages`."""
    blocks_each = -(-context // BLOCK_SIZE)
    return AttentionPlan(
        query_start=torch.arange(0, (batch + 1) * query_len, query_len, dtype=torch.int32, device=device),
        context_len=torch.full((batch,), context, dtype=torch.int32, device=device),
        block_table=torch.randperm(batch * blocks_each, device=device).int().view(batch, blocks_each),
        sliding_window=None,
        num_decodes=batch if query_len == 1 else 0,
    )


def sampling_rows(
    batch: int, vocab: int, device: torch.device, *, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0
) -> SamplingRows:
    """Rows with as many stop ids and biases as a server's can have, none of which they use."""
    rows = allocate_rows(batch, vocab, MAX_STOPS, MAX_BIASES, device)
    rows.temperature.fill_(temperature)
    rows.top_k.fill_(top_k)
    rows.top_p.fill_(top_p)
    rows.seed_low.copy_(torch.arange(batch, device=device))
    return rows

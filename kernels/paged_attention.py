"""Attention over a paged KV cache: the contract, and the reference that every backend is compared with."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagoda_server.kernels.paged import AttentionPlan, PagedKV


def plan_attention(
    query_start: np.ndarray, context_len: np.ndarray, block_table: np.ndarray, kv: PagedKV, sliding_window: int | None
) -> AttentionPlan:
    """What one step's attention needs, from host arrays (int32; shapes as in AttentionPlan), which are copied.

    kv  any layer's pages: its shape, dtype and device are what counts
    """
    return AttentionPlan(
        query_start=torch.tensor(query_start, device=kv.device),
        context_len=torch.tensor(context_len, device=kv.device),
        block_table=torch.tensor(block_table, device=kv.device),
        sliding_window=sliding_window,
    )


def paged_attention(q: Tensor, kv: PagedKV, plan: AttentionPlan) -> Tensor:
    """Causal attention of packed queries over a paged KV cache (PagedAttention; Kwon et al., 2023).

    q       [num_tokens, num_heads, head_dim]; rows of one sequence are adjacent, in position order
    kv      keys and values, each [num_blocks, block_size, num_kv_heads, head_dim]
    plan    made by the same backend's plan_attention for this step
    return  [num_tokens, num_heads, head_dim], q's dtype

    Scores are scaled by 1 / sqrt(head_dim). Query head h reads KV head h // (num_heads / num_kv_heads). Softmax is in
    float32. Slots that hold no token of a sequence may hold anything, NaN included. Padding's rows of the result are 0.
    """
    out = torch.zeros_like(q)
    starts = plan.query_start.tolist()
    rows = range(len(plan.context_len)) if plan.rows is None else plan.rows.tolist()
    for seq, context in enumerate(plan.context_len.tolist()):
        if context == 0:
            continue
        queries = slice(starts[seq], starts[seq + 1])
        blocks = plan.block_table[rows[seq], : -(-context // kv.block_size)].long()
        keys = _read(kv.keys, kv.key_scales, blocks)[:context]
        values = _read(kv.values, kv.value_scales, blocks)[:context]
        out[queries] = _attend(q[queries], keys, values, plan.sliding_window)
    return out


def _read(pages: Tensor, scales: Tensor | None, blocks: Tensor) -> Tensor:
    """[len(blocks) * block_size, num_kv_heads, head_dim] float32"""
    read = pages[blocks].float()
    return (read if scales is None else read * scales[blocks][..., None]).flatten(0, 1)


def _attend(q: Tensor, keys: Tensor, values: Tensor, sliding_window: int | None) -> Tensor:
    """The last len(q) tokens of one sequence over its whole context [context, num_kv_heads, head_dim] float32."""
    heads_per_kv_head = q.shape[1] // keys.shape[1]
    keys = keys.repeat_interleave(heads_per_kv_head, dim=1)
    values = values.repeat_interleave(heads_per_kv_head, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * q.shape[-1] ** -0.5
    hidden = ~visible(len(q), len(keys), sliding_window, first_key=0).to(q.device)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def visible(num_queries: int, context_len: int, sliding_window: int | None, first_key: int) -> Tensor:
    """Which keys, from `first_key` on, each of the context's last `num_queries` tokens sees.

    return  [num_queries, context_len - first_key] bool
    """
    query = torch.arange(context_len - num_queries, context_len)[:, None]
    key = torch.arange(first_key, context_len)
    seen = key <= query
    return seen if sliding_window is None else seen & (key > query - sliding_window)

"""Attention over a paged KV cache on a CPU: pages are gathered, sequences of similar length attend together.

A group's gathered keys stay in the processor's cache until they are used, which is why groups are bounded. Padding
repeats a sequence's own first slot: whatever an unwritten slot holds never reaches a product.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kernels.paged import AttentionPlan, DecodeGroup, PagedKV, PrefillChunk
from kernels.paged_attention import visible

# Measured: attending to a group costs about as much as this many slots of padding do.
GROUP_COST_SLOTS = 512
# A group's keys and values of 8192 slots take some megabytes: about what stays in the last level of cache.
GROUP_LIMIT_SLOTS = 8192


def plan_attention_cpu(
    query_start: np.ndarray, context_len: np.ndarray, block_table: np.ndarray, kv: PagedKV, sliding_window: int | None
) -> AttentionPlan:
    """`plan_attention` with the slots to gather, their masks, and the room to gather them into."""
    query_len = np.diff(query_start)
    first_key = np.zeros_like(context_len)
    if sliding_window is not None:
        first_key = np.maximum(context_len - query_len + 1 - sliding_window, 0)
    num_keys = context_len - first_key

    groups = list(_similar_lengths(np.flatnonzero(query_len == 1), num_keys))
    chunks = np.flatnonzero(query_len > 1)
    most_slots = max((len(g) * int(num_keys[g].max()) for g in groups), default=0)
    most_slots = max(most_slots, int(num_keys[chunks].max(initial=0)))
    room = torch.empty(2, most_slots, kv.num_kv_heads, kv.head_dim, dtype=kv.dtype)

    def decode(group: np.ndarray) -> DecodeGroup:
        padded_len = int(num_keys[group].max())
        offset = np.arange(padded_len)
        is_padding = offset >= num_keys[group, None]
        position = first_key[group, None] + np.where(is_padding, 0, offset)
        slots = _slots(block_table[group], position, kv.block_size)
        shape = (len(group), padded_len, kv.num_kv_heads, kv.head_dim)
        return DecodeGroup(
            rows=torch.from_numpy(query_start[group].astype(np.int64)),
            slots=torch.from_numpy(slots.reshape(-1)),
            mask=_additive(torch.from_numpy(~is_padding), kv.dtype)[:, None, None] if is_padding.any() else None,
            keys=room[0, : slots.size].view(shape),
            values=room[1, : slots.size].view(shape),
        )

    def prefill(seq: int) -> PrefillChunk:
        num_queries, context, first = int(query_len[seq]), int(context_len[seq]), int(first_key[seq])
        position = np.arange(first, context)
        is_causal = num_queries == context and (sliding_window is None or context <= sliding_window)
        mask = None if is_causal else _additive(visible(num_queries, context, sliding_window, first), kv.dtype)
        return PrefillChunk(
            start=int(query_start[seq]),
            end=int(query_start[seq + 1]),
            slots=torch.from_numpy(_slots(block_table[seq : seq + 1], position[None], kv.block_size)[0]),
            mask=mask,
            keys=room[0, : len(position)],
            values=room[1, : len(position)],
        )

    return AttentionPlan(
        query_start=torch.tensor(query_start),
        context_len=torch.tensor(context_len),
        block_table=torch.tensor(block_table),
        sliding_window=sliding_window,
        decodes=tuple(decode(group) for group in groups),
        prefills=tuple(prefill(int(seq)) for seq in chunks),
    )


def paged_attention_cpu(q: Tensor, kv: PagedKV, plan: AttentionPlan) -> Tensor:
    """`paged_attention` by gathering a group's pages and torch's fused attention."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for group in plan.decodes:
        out.index_copy_(0, group.rows, _attend_decodes(q.index_select(0, group.rows), kv, group))
    for chunk in plan.prefills:
        out[chunk.start : chunk.end] = _attend_prefill(q[chunk.start : chunk.end], kv, chunk)
    return out


def _attend_decodes(q: Tensor, kv: PagedKV, group: DecodeGroup) -> Tensor:
    """The heads that share a KV head stand where the queries of a sequence usually do: a key is read once for all."""
    _gather(kv, group.slots, group.keys, group.values)
    grouped = q.view(len(q), kv.num_kv_heads, -1, kv.head_dim)
    keys, values = group.keys.transpose(1, 2), group.values.transpose(1, 2)
    return functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask).reshape(q.shape)


def _attend_prefill(q: Tensor, kv: PagedKV, chunk: PrefillChunk) -> Tensor:
    _gather(kv, chunk.slots, chunk.keys, chunk.values)
    grouped = q.reshape(len(q), kv.num_kv_heads, -1, kv.head_dim).permute(1, 2, 0, 3)
    keys, values = (
        pages.transpose(0, 1)[:, None].expand(-1, grouped.shape[1], -1, -1) for pages in (chunk.keys, chunk.values)
    )
    attended = functional.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=chunk.mask, is_causal=chunk.mask is None
    )
    return attended.permute(2, 0, 1, 3).reshape(q.shape)


def _gather(kv: PagedKV, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    shape = (len(slots), kv.num_kv_heads, kv.head_dim)
    torch.index_select(kv.keys.flatten(0, 1), 0, slots, out=keys.view(shape))
    torch.index_select(kv.values.flatten(0, 1), 0, slots, out=values.view(shape))


def _similar_lengths(seqs: np.ndarray, num_keys: np.ndarray) -> Iterator[np.ndarray]:
    """Parts `seqs`, longest first: a group ends where more padding would cost more than another group does."""
    by_length = seqs[np.argsort(-num_keys[seqs], kind="stable")]
    begin, padding = 0, 0
    for end, seq in enumerate(by_length):
        longest = int(num_keys[by_length[begin]])
        padding += longest - int(num_keys[seq])
        if end > begin and (padding > GROUP_COST_SLOTS or (end + 1 - begin) * longest > GROUP_LIMIT_SLOTS):
            yield by_length[begin:end]
            begin, padding = end, 0
    if len(by_length):
        yield by_length[begin:]


def _slots(block_table: np.ndarray, position: np.ndarray, block_size: int) -> np.ndarray:
    """[seqs, positions] int64, of block tables [seqs, max_blocks] and positions [seqs, positions]."""
    blocks = np.take_along_axis(block_table, position // block_size, axis=1).astype(np.int64)
    slots: np.ndarray = blocks * block_size + position % block_size
    return slots


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))

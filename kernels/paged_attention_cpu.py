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

from pagoda_server.kernels.paged import AttentionPlan, DecodeGroup, PagedKV, PrefillChunk
from pagoda_server.kernels.paged_attention import visible

# A softmax sums its terms in vectors. With lengths that are multiples of a vector, a row's result is the same to the
# last bit whatever padding its group needs: alone and in any batch.
LENGTH_MULTIPLE = 16
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
    padded_len = -(-num_keys // LENGTH_MULTIPLE) * LENGTH_MULTIPLE

    groups = list(_similar_lengths(np.flatnonzero(query_len == 1), padded_len))
    chunks = np.flatnonzero(query_len > 1)[:, None]
    most_slots = max(len(group) * int(padded_len[group].max()) for group in (*groups, *chunks))
    room = torch.empty(2, most_slots, kv.num_kv_heads, kv.head_dim, dtype=kv.dtype)

    def gathered(group: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Slots of a group's contexts [group, padded_len], and room for their keys and values."""
        offset = np.arange(int(padded_len[group].max()))
        position = first_key[group, None] + np.where(offset < num_keys[group, None], offset, 0)
        blocks = np.take_along_axis(block_table[group], position // kv.block_size, axis=1).astype(np.int64)
        slots = torch.from_numpy(blocks * kv.block_size + position % kv.block_size)
        shape = (*slots.shape, kv.num_kv_heads, kv.head_dim)
        return slots, room[0, : slots.numel()].view(shape), room[1, : slots.numel()].view(shape)

    def decode(group: np.ndarray) -> DecodeGroup:
        slots, keys, values = gathered(group)
        is_key = torch.arange(slots.shape[1]) < torch.from_numpy(num_keys[group])[:, None]
        mask = None if is_key.all() else _additive(is_key, kv.dtype)[:, None, None]
        return DecodeGroup(torch.from_numpy(query_start[group]).long(), slots.view(-1), mask, keys, values)

    def prefill(group: np.ndarray) -> PrefillChunk:
        slots, keys, values = gathered(group)
        (seq,) = group
        seen = visible(int(query_len[seq]), int(context_len[seq]), sliding_window, int(first_key[seq]))
        seen = functional.pad(seen, (0, slots.shape[1] - seen.shape[1]), value=False)
        rows = slice(int(query_start[seq]), int(query_start[seq + 1]))
        return PrefillChunk(rows, slots[0], _additive(seen, kv.dtype), keys[0], values[0])

    return AttentionPlan(
        query_start=torch.tensor(query_start),
        context_len=torch.tensor(context_len),
        block_table=torch.tensor(block_table),
        sliding_window=sliding_window,
        decodes=tuple(decode(group) for group in groups),
        prefills=tuple(prefill(chunk) for chunk in chunks),
    )


def paged_attention_cpu(q: Tensor, kv: PagedKV, plan: AttentionPlan) -> Tensor:
    """`paged_attention` by gathering a group's pages and torch's fused attention."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for group in plan.decodes:
        out.index_copy_(0, group.rows, _attend_decodes(q.index_select(0, group.rows), kv, group))
    for chunk in plan.prefills:
        out[chunk.rows] = _attend_prefill(q[chunk.rows], kv, chunk)
    return out


def _attend_decodes(q: Tensor, kv: PagedKV, group: DecodeGroup) -> Tensor:
    """The heads that share a KV head stand where the queries of a sequence usually do: a key is read once for all."""
    _gather(kv, group.slots, group.keys, group.values)
    grouped = q.view(len(q), kv.num_kv_heads, -1, kv.head_dim)
    keys, values = group.keys.transpose(1, 2), group.values.transpose(1, 2)
    return functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask).reshape(q.shape)


def _attend_prefill(q: Tensor, kv: PagedKV, chunk: PrefillChunk) -> Tensor:
    """KV heads stand where the sequences of a batch usually do, so that their keys need not be repeated."""
    _gather(kv, chunk.slots, chunk.keys, chunk.values)
    grouped = q.reshape(len(q), kv.num_kv_heads, -1, kv.head_dim).permute(1, 2, 0, 3)
    keys = chunk.keys.transpose(0, 1)[:, None].expand(-1, grouped.shape[1], -1, -1)
    values = chunk.values.transpose(0, 1)[:, None].expand(-1, grouped.shape[1], -1, -1)
    attended = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=chunk.mask)
    return attended.permute(2, 0, 1, 3).reshape(q.shape)


def _gather(kv: PagedKV, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    shape = (len(slots), kv.num_kv_heads, kv.head_dim)
    torch.index_select(kv.keys.flatten(0, 1), 0, slots, out=keys.view(shape))
    torch.index_select(kv.values.flatten(0, 1), 0, slots, out=values.view(shape))


def _similar_lengths(seqs: np.ndarray, lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Parts `seqs`, longest first: a group ends where more padding would cost more than another group does."""
    by_length = seqs[np.argsort(-lengths[seqs], kind="stable")]
    begin, padding = 0, 0
    for end, seq in enumerate(by_length):
        longest = int(lengths[by_length[begin]])
        padding += longest - int(lengths[seq])
        if end > begin and (padding > GROUP_COST_SLOTS or (end + 1 - begin) * longest > GROUP_LIMIT_SLOTS):
            yield by_length[begin:end]
            begin, padding = end, 0
    if len(by_length):
        yield by_length[begin:]


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))

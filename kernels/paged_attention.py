"""Attention over a paged KV cache: the reference, torch on a CPU, and compiled code (kernels/native/attention.h).

Torch's version gathers pages and attends sequences of similar length together. Groups are bounded so that their
gathered keys stay in the processor's cache until they are used. Padding repeats a sequence's own first slot, so that
the content of an unwritten slot never reaches a product.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .native_module import DTYPES, address, native, takes
from .paged import PLAIN_SCORING, AttentionPlan, DecodeGroup, PagedKV, PrefillChunk, Scoring, is_int8
from .recording import empty

# A softmax sums its terms in vectors. With lengths that are multiples of a vector, a row's result is the same to the
# last bit in any batch, whatever padding its group needs.
LENGTH_MULTIPLE = 16
# Measured: attending a group costs about as much as this many slots of padding.
GROUP_COST_SLOTS = 512
# Keys and values of 8192 slots take some megabytes, about what stays in the last level of cache.
GROUP_LIMIT_SLOTS = 8192
HEAD_DIMS = frozenset((16, 32, 64, 80, 96, 128, 256))


def plan_attention(
    query_start: np.ndarray,
    context_len: np.ndarray,
    block_table: np.ndarray,
    kv: PagedKV,
    sliding_window: int | None,
    one_order: bool = False,
) -> AttentionPlan:
    """Plan one step's attention from host arrays (int32; shapes as in AttentionPlan), which are copied.

    kv         any layer's pages, for their shape, dtype and device
    one_order  a query's sums must have the same order in every batch, chunk and step
    """
    return AttentionPlan(
        query_start=torch.tensor(query_start, device=kv.device),
        context_len=torch.tensor(context_len, device=kv.device),
        block_table=torch.tensor(block_table, device=kv.device),
        sliding_window=sliding_window,
    )


def paged_attention(q: Tensor, kv: PagedKV, plan: AttentionPlan, scoring: Scoring = PLAIN_SCORING) -> Tensor:
    """Causal attention of packed queries over a paged KV cache (PagedAttention; Kwon et al., 2023).

    q        [num_tokens, num_heads, head_dim]; rows of one sequence are adjacent, in position order
    kv       keys and values, each [num_blocks, block_size, num_kv_heads, head_dim]
    plan     made by the same backend's plan_attention for this step
    scoring  how the layer's scores become weights
    return   [num_tokens, num_heads, head_dim], q's dtype

    Scores are scaled by 1 / sqrt(head_dim). Query head h reads KV head h // (num_heads / num_kv_heads). Softmax is in
    float32. Slots that hold no token of a sequence may hold anything, even NaN. Rows of padding are 0 in the result.
    """
    out = torch.zeros_like(q)
    starts = plan.query_start.tolist()
    rows = range(len(plan.context_len)) if plan.rows is None else plan.rows.tolist()
    for seq, context in enumerate(plan.context_len.tolist()):
        if context == 0:
            continue
        queries = slice(starts[seq], starts[seq + 1])
        num_queries, window = queries.stop - queries.start, plan.sliding_window
        first = 0 if window is None else max(0, context - num_queries + 1 - window)  # no query sees what is before
        first_block = first // kv.block_size
        blocks = plan.block_table[rows[seq], first_block : -(-context // kv.block_size)].long()
        seen = slice(first - first_block * kv.block_size, context - first_block * kv.block_size)
        keys, values = _read(kv.keys, kv.key_scales, blocks)[seen], _read(kv.values, kv.value_scales, blocks)[seen]
        out[queries] = _attend(q[queries], keys, values, window, scoring)
    return out


def _read(pages: Tensor, scales: Tensor | None, blocks: Tensor) -> Tensor:
    """[len(blocks) * block_size, num_kv_heads, head_dim] float32"""
    read = pages[blocks].float()
    return (read if scales is None else read * scales[blocks][..., None]).flatten(0, 1)


def _attend(q: Tensor, keys: Tensor, values: Tensor, sliding_window: int | None, scoring: Scoring) -> Tensor:
    """Attend the last len(q) tokens of a sequence to its context [context, num_kv_heads, head_dim] float32."""
    heads_per_kv_head = q.shape[1] // keys.shape[1]
    keys = keys.repeat_interleave(heads_per_kv_head, dim=1)
    values = values.repeat_interleave(heads_per_kv_head, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * q.shape[-1] ** -0.5
    hidden = ~visible(len(q), len(keys), sliding_window, first_key=0).to(q.device)
    if scoring.softcap:
        scores = scoring.softcap * (scores / scoring.softcap).tanh()
    scores = scores.masked_fill(hidden, float("-inf"))
    if scoring.sinks is not None:
        scores = torch.cat((scores, scoring.sinks[:, None, None].expand(-1, len(q), 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(keys)]
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def visible(num_queries: int, context_len: int, sliding_window: int | None, first_key: int) -> Tensor:
    """Which keys, from `first_key` on, each of the last `num_queries` tokens of a context sees.

    return  [num_queries, context_len - first_key] bool
    """
    query = torch.arange(context_len - num_queries, context_len)[:, None]
    key = torch.arange(first_key, context_len)
    seen = key <= query
    return seen if sliding_window is None else seen & (key > query - sliding_window)


def plan_attention_cpu(
    query_start: np.ndarray,
    context_len: np.ndarray,
    block_table: np.ndarray,
    kv: PagedKV,
    sliding_window: int | None,
    one_order: bool = False,
) -> AttentionPlan:
    """`plan_attention` with the slots to gather, their masks, and buffers to gather them into."""
    query_len = np.diff(query_start)
    first_key = np.zeros_like(context_len)
    if sliding_window is not None:
        first_key = np.maximum(context_len - query_len + 1 - sliding_window, 0)
    num_keys = context_len - first_key
    padded_len = -(-num_keys // LENGTH_MULTIPLE) * LENGTH_MULTIPLE

    groups = list(_similar_lengths(np.flatnonzero(query_len == 1), padded_len))
    chunks = np.flatnonzero(query_len > 1)[:, None]
    most_slots = max(len(group) * int(padded_len[group].max()) for group in (*groups, *chunks))
    dtype = torch.float32 if kv.key_scales is not None else kv.dtype
    room = torch.empty(2, most_slots, kv.num_kv_heads, kv.head_dim, dtype=dtype)

    def gathered(group: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """The slots of a group's contexts [group, padded_len], and buffers for their keys and values."""
        offset = np.arange(int(padded_len[group].max()))
        position = first_key[group, None] + np.where(offset < num_keys[group, None], offset, 0)
        blocks = np.take_along_axis(block_table[group], position // kv.block_size, axis=1).astype(np.int64)
        slots = torch.from_numpy(blocks * kv.block_size + position % kv.block_size)
        shape = (*slots.shape, kv.num_kv_heads, kv.head_dim)
        return slots, room[0, : slots.numel()].view(shape), room[1, : slots.numel()].view(shape)

    def decode(group: np.ndarray) -> DecodeGroup:
        slots, keys, values = gathered(group)
        is_key = torch.arange(slots.shape[1]) < torch.from_numpy(num_keys[group])[:, None]
        mask = None if is_key.all() else _additive(is_key, dtype)[:, None, None]
        return DecodeGroup(torch.from_numpy(query_start[group]).long(), slots.view(-1), mask, keys, values)

    def prefill(group: np.ndarray) -> PrefillChunk:
        slots, keys, values = gathered(group)
        (seq,) = group
        seen = visible(int(query_len[seq]), int(context_len[seq]), sliding_window, int(first_key[seq]))
        seen = functional.pad(seen, (0, slots.shape[1] - seen.shape[1]), value=False)
        rows = slice(int(query_start[seq]), int(query_start[seq + 1]))
        return PrefillChunk(rows, slots[0], _additive(seen, dtype), keys[0], values[0])

    return AttentionPlan(
        query_start=torch.tensor(query_start),
        context_len=torch.tensor(context_len),
        block_table=torch.tensor(block_table),
        sliding_window=sliding_window,
        decodes=tuple(decode(group) for group in groups),
        prefills=tuple(prefill(chunk) for chunk in chunks),
    )


def paged_attention_cpu(q: Tensor, kv: PagedKV, plan: AttentionPlan, scoring: Scoring = PLAIN_SCORING) -> Tensor:
    """`paged_attention` by torch's fused attention, which scores plainly, over the gathered pages of each group."""
    if not scoring.is_plain:
        return paged_attention(q, kv, plan, scoring)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for group in plan.decodes:
        out.index_copy_(0, group.rows, _attend_decodes(q.index_select(0, group.rows), kv, group))
    for chunk in plan.prefills:
        out[chunk.rows] = _attend_prefill(q[chunk.rows], kv, chunk)
    return out


def _attend_decodes(q: Tensor, kv: PagedKV, group: DecodeGroup) -> Tensor:
    """Heads that share a KV head take the place of a sequence's queries, so that a key is read once for all of them."""
    _gather(kv, group.slots, group.keys, group.values)
    grouped = q.to(group.keys.dtype).view(len(q), kv.num_kv_heads, -1, kv.head_dim)
    keys, values = group.keys.transpose(1, 2), group.values.transpose(1, 2)
    return (
        functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask)
        .reshape(q.shape)
        .to(q.dtype)
    )


def _attend_prefill(q: Tensor, kv: PagedKV, chunk: PrefillChunk) -> Tensor:
    """KV heads take the place of a batch's sequences, so that their keys need not be repeated."""
    _gather(kv, chunk.slots, chunk.keys, chunk.values)
    grouped = q.to(chunk.keys.dtype).reshape(len(q), kv.num_kv_heads, -1, kv.head_dim).permute(1, 2, 0, 3)
    keys = chunk.keys.transpose(0, 1)[:, None].expand(-1, grouped.shape[1], -1, -1)
    values = chunk.values.transpose(0, 1)[:, None].expand(-1, grouped.shape[1], -1, -1)
    attended = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=chunk.mask)
    return attended.permute(2, 0, 1, 3).reshape(q.shape)


def _gather(kv: PagedKV, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    shape = (len(slots), kv.num_kv_heads, kv.head_dim)
    for pages, scales, out in ((kv.keys, kv.key_scales, keys), (kv.values, kv.value_scales, values)):
        if scales is None:
            torch.index_select(pages.flatten(0, 1), 0, slots, out=out.view(shape))
        else:
            read, scale = pages.flatten(0, 1)[slots].float(), scales.flatten(0, 1)[slots]
            torch.mul(read, scale[..., None], out=out.view(shape))


def _similar_lengths(seqs: np.ndarray, lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Split `seqs` into groups, longest first; a group ends where more padding would cost more than a new group."""
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


def is_read_in_place(kv: PagedKV) -> bool:
    """Whether compiled code supports pages of this dtype and head size, and so need not gather them."""
    return native is not None and kv.head_dim in HEAD_DIMS and (takes(kv.keys) or is_int8(kv))


def plan_attention_native(
    query_start: np.ndarray,
    context_len: np.ndarray,
    block_table: np.ndarray,
    kv: PagedKV,
    sliding_window: int | None,
    one_order: bool = False,
) -> AttentionPlan:
    """`plan_attention` without copies: the plan holds views of the arrays, whose last dimension must be contiguous.

    With `one_order` chunks are cut, so that every query is attended in the order of a decode's sums. Compiled code must
    support the pages then: `is_read_in_place`.
    """
    if one_order:
        assert is_read_in_place(kv)
        query_start, context_len, block_table = _cut_chunks(query_start, context_len, block_table)
    elif not is_read_in_place(kv):
        return plan_attention_cpu(query_start, context_len, block_table, kv, sliding_window)
    return AttentionPlan(
        query_start=torch.from_numpy(query_start),
        context_len=torch.from_numpy(context_len),
        block_table=torch.from_numpy(block_table),
        sliding_window=sliding_window,
    )


def _cut_chunks(
    query_start: np.ndarray, context_len: np.ndarray, block_table: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same queries in chunks so short that compiled code attends each query as it attends a decode."""
    assert native is not None
    most = native.FEW_QUERIES
    num_parts = -(-np.diff(query_start) // most)
    if not (num_parts > 1).any():
        return query_start, context_len, block_table
    seq = np.repeat(np.arange(len(num_parts)), num_parts)
    number = np.arange(len(seq)) - (np.cumsum(num_parts) - num_parts)[seq]  # of a part in its chunk
    first, end = query_start[seq] + number * most, query_start[seq + 1]
    context_len = (context_len[seq] - (end - np.minimum(first + most, end))).astype(np.int32)
    return np.append(first, query_start[-1]).astype(np.int32), context_len, block_table[seq]


def paged_attention_native(q: Tensor, kv: PagedKV, plan: AttentionPlan, scoring: Scoring = PLAIN_SCORING) -> Tensor:
    """`paged_attention` that reads pages in place. A decode's result is the same to the last bit in any batch.

    Queries are in float32 or bfloat16.
    """
    if native is None or plan.decodes or plan.prefills:  # made by plan_attention_cpu
        return paged_attention_cpu(q, kv, plan, scoring)
    q = q.contiguous()
    out = empty(*q.shape, dtype=q.dtype)
    native.paged_attention(
        DTYPES[q.dtype],
        q.data_ptr(),
        kv.keys.data_ptr(),
        kv.values.data_ptr(),
        address(kv.key_scales),
        address(kv.value_scales),
        plan.query_start.data_ptr(),
        plan.context_len.data_ptr(),
        plan.block_table.data_ptr(),
        out.data_ptr(),
        plan.context_len.shape[0],
        plan.block_table.stride(0),
        kv.block_size,
        q.shape[1],
        kv.num_kv_heads,
        kv.head_dim,
        plan.sliding_window or 0,
        address(scoring.sinks),
        scoring.softcap,
    )
    return out

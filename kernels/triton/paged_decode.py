"""Attention of one query per sequence over its pages, on a GPU. Contexts are split so that every processor has work.

An item of work is a part of one sequence's context and one KV head, with all query heads that share it, so that a key
is read once for them. The result of a context with one part is written directly. The parts of a longer one are merged
(Flash-Decoding; Dao et al., 2023) by the program that finishes last, so that there is no second launch.

Contexts are split into parts of about equal work, by the lengths on the device. A part has about one of `num_shares`
shares of all tokens to be read, rounded up, so there are at most as many parts as shares and sequences together: the
grid is known before the lengths are. A context's parts have equal length. A sequence without tokens has one empty part.

How many parts a context has depends on content, which must not decide what is launched: a graph replays it. A launch
that only merges would therefore run for every step and layer, mostly for nothing. Instead, each program of a divided
context stores its part, and then adds one to a counter in `AttentionPlan.arrivals`. The barrier before it and the
atomic's release order all of the program's stores before the count; the atomic's acquire orders the last program's
loads behind the counts of all others. It merges the parts in the order of the context, not of their arrival, so that
results are reproducible to the last bit, and sets the counter back to 0 for the next launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..paged import AttentionPlan, PagedKV, Scoring
from .attention_tile import (
    METADATA,
    SEQS,
    add_sinks,
    attend_tile,
    find_tokens,
    score_cap,
    score_scale,
    score_tile,
    table_row,
    tile_dim,
)
from .configs import IS_INTERPRETED, num_processors, tuned
from .dependent_launch import await_previous, dependent_launch

ROWS_LIMIT = 64  # query heads of a tile; a KV head shared by more has several tiles
MERGED = 2048  # floats of parts that are loaded at once to be merged: few enough that attention needs more registers
MIN_TILES = tl.constexpr(4)  # of a part: a shorter one would not pay for its merge


@dataclass(frozen=True, slots=True)
class Config:
    """A launch configuration.

    tile_keys     tokens of a tile of keys
    items_per_sm  average number of parts for each processor: more of them balance better and cost more to merge
    """

    tile_keys: int
    items_per_sm: int
    num_warps: int
    num_stages: int


def default_config(dim: int, itemsize: int) -> Config:
    """The default for products in a type of `itemsize` bytes.

    Tiles have up to 8 KB of keys and as much of values, so that a Hopper processor has registers and memory for five or
    more programs and runs all of its items at once. Two of five stages are for the block table, which is read before
    the pages. In float32, for which no matrix instruction is exact, both operands are in registers.
    """
    if itemsize == 4:
        return Config(tile_keys=min(max(2048 // dim, 16), 64), items_per_sm=4, num_warps=8, num_stages=5)
    return Config(tile_keys=min(max(4096 // dim, 16), 128), items_per_sm=4, num_warps=4, num_stages=5)


def paged_decode_triton(q: Tensor, kv: PagedKV, plan: AttentionPlan, scoring: Scoring, out: Tensor) -> None:
    """`paged_attention` of the plan's first `num_decodes` sequences, written to the first rows of `out`.

    q, out  [num_tokens, num_heads, head_dim], contiguous, like the pages

    Rows of padding (context 0) become 0.
    """
    num_seqs, (_, num_heads, head_dim) = plan.num_decodes, q.shape
    group, dim = num_heads // kv.num_kv_heads, tile_dim(head_dim)
    key = f"{kv.dtype} {head_dim} {group}".removeprefix("torch.")
    config = tuned("paged_decode", key, default_config(dim, q.dtype.itemsize))
    rows = min(max(triton.next_power_of_2(group), 16), ROWS_LIMIT)
    head_tiles = kv.num_kv_heads * triton.cdiv(group, rows)
    num_shares = triton.cdiv(config.items_per_sm * num_processors(q.device), head_tiles)
    num_items = num_seqs + num_shares  # an upper bound: each sequence has at most one part that is not full
    partial = torch.empty(num_items, num_heads, head_dim, dtype=torch.float32, device=q.device)
    log_sums = torch.empty(num_items, num_heads, dtype=torch.float32, device=q.device)
    arrivals = plan.arrivals
    if arrivals is None:
        arrivals = torch.zeros(num_seqs * head_tiles, dtype=torch.int32, device=q.device)
    assert arrivals.numel() >= num_seqs * head_tiles
    merged_heads = min(triton.next_power_of_2(group), rows)
    _attend_split[(head_tiles, num_items)](
        q,
        kv.keys,
        kv.values,
        kv.key_scales,
        kv.value_scales,
        plan.context_len,
        plan.block_table,
        plan.rows,
        scoring.sinks,
        out,
        partial,
        log_sums,
        arrivals,
        num_seqs,
        num_shares,
        table_stride=plan.block_table.stride(0),
        scale=score_scale(head_dim),
        KV_HEADS=kv.num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        DIM=dim,
        BLOCK_SIZE=kv.block_size,
        WINDOW=plan.sliding_window or 0,
        TILE=config.tile_keys,
        CAP=score_cap(scoring.softcap, head_dim),
        ROWS=rows,
        MERGED_HEADS=merged_heads,
        MERGED_PARTS=max(MERGED // (merged_heads * dim), 1),
        UPCAST=IS_INTERPRETED,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **dependent_launch(),
    )


@triton.jit
def visible_len(context_len_ptr, seq, num_seqs, WINDOW: tl.constexpr):
    """The number of tokens that a sequence's query sees; 0 beyond the last sequence."""
    num_keys = tl.load(context_len_ptr + seq, mask=seq < num_seqs, other=0)
    return tl.minimum(num_keys, WINDOW) if WINDOW else num_keys


@triton.jit
def part_limit(context_len_ptr, num_seqs, num_shares, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """The most tokens of a part, a multiple of TILE: one share of all tokens to be read."""
    num_keys = 0
    # Summing vectors across the loop would hide the alignment of the addresses below from Triton.
    for first in range(0, num_seqs, SEQS):
        num_keys += tl.sum(visible_len(context_len_ptr, first + tl.arange(0, SEQS), num_seqs, WINDOW), axis=0)
    share = tl.cdiv(num_keys, num_shares)
    return tl.maximum(tl.cdiv(share, TILE), MIN_TILES) * TILE


@triton.jit
def count_parts(context_len_ptr, seq, num_seqs, limit, WINDOW: tl.constexpr):
    """The number of parts of a sequence, at least 1; 0 beyond the last sequence."""
    parts = tl.cdiv(visible_len(context_len_ptr, seq, num_seqs, WINDOW), limit)
    return tl.where(seq < num_seqs, tl.maximum(parts, 1), 0)


@triton.jit
def find_part(item, context_len_ptr, num_seqs, num_shares, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """An item's sequence (num_seqs: no work), first and last token (exclusive), first part's item, number of parts."""
    limit = part_limit(context_len_ptr, num_seqs, num_shares, WINDOW, TILE)
    # The sequences whose items all come before this one, their items, and all items so far.
    seq, first_item, num_items = 0, 0, 0
    for first in range(0, num_seqs, SEQS):
        parts = count_parts(context_len_ptr, first + tl.arange(0, SEQS), num_seqs, limit, WINDOW)
        ends = num_items + tl.cumsum(parts, axis=0)
        seq += tl.sum((ends <= item).to(tl.int32), axis=0)
        first_item = tl.maximum(first_item, tl.max(tl.where(ends <= item, ends, 0), axis=0))
        num_items += tl.sum(parts, axis=0)
    seq = tl.minimum(seq, num_seqs)
    context = tl.load(context_len_ptr + seq, mask=seq < num_seqs, other=0)
    num_keys = visible_len(context_len_ptr, seq, num_seqs, WINDOW)
    num_parts = count_parts(context_len_ptr, seq, num_seqs, limit, WINDOW)
    length = tl.cdiv(tl.cdiv(num_keys, tl.maximum(num_parts, 1)), TILE) * TILE
    begin = context - num_keys + (item - first_item) * length
    return seq, begin, tl.minimum(begin + length, context), first_item, num_parts


@triton.jit(do_not_specialize=["num_seqs", "num_shares", "table_stride"], do_not_specialize_on_alignment=METADATA)
def _attend_split(
    q_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    context_len_ptr,
    block_table_ptr,
    rows_ptr,
    sinks_ptr,
    out_ptr,
    partial_ptr,
    log_sums_ptr,
    arrivals_ptr,
    num_seqs,
    num_shares,
    table_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    CAP: tl.constexpr,
    ROWS: tl.constexpr,
    MERGED_HEADS: tl.constexpr,
    MERGED_PARTS: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    HEAD_TILES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    HEADS: tl.constexpr = KV_HEADS * GROUP
    kv_head = tl.program_id(0) // HEAD_TILES
    first_row = tl.program_id(0) % HEAD_TILES * ROWS
    item = tl.program_id(1)

    await_previous(PDL)
    seq, begin, end, first_item, num_parts = find_part(item, context_len_ptr, num_seqs, num_shares, WINDOW, TILE)
    if seq == num_seqs:
        return

    row = first_row + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    head = kv_head * GROUP + row
    inside = (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    query = (seq * HEADS + head).to(tl.int64)
    q = tl.load(q_ptr + query[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    table_ptr = table_row(block_table_ptr, rows_ptr, table_stride, seq)
    attended = tl.zeros([ROWS, DIM], dtype=tl.float32)
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        is_key = position < end
        token = find_tokens(table_ptr, position, is_key, kv_head, BLOCK_SIZE, KV_HEADS)
        scores = score_tile(q, token, is_key, keys_ptr, key_scales_ptr, HEAD_DIM, DIM, CAP)
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        attended, top, total = attend_tile(
            scores, attended, top, total, token, is_key, values_ptr, value_scales_ptr, scale, q.dtype, HEAD_DIM, DIM
        )
    if num_parts == 1:
        total = add_sinks(total, top, head, row < GROUP, sinks_ptr)
    attended = attended / tl.where(begin < end, total, 1.0)[:, None]
    if num_parts == 1:
        places = out_ptr + query[:, None] * HEAD_DIM + dim[None, :]
        tl.store(places, attended.to(out_ptr.dtype.element_ty), mask=inside)
        return

    part = item * HEADS + head
    tl.store(partial_ptr + part[:, None] * HEAD_DIM + dim[None, :], attended, mask=inside)
    tl.store(log_sums_ptr + part, top + tl.log2(total), mask=row < GROUP)
    arrivals = arrivals_ptr + seq * tl.num_programs(0) + tl.program_id(0)
    tl.debug_barrier()  # one thread counts, after the stores of all
    if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == num_parts - 1:
        tl.store(arrivals, 0)
        _merge_parts(
            partial_ptr,
            log_sums_ptr,
            sinks_ptr,
            out_ptr + (seq * HEADS).to(tl.int64) * HEAD_DIM,
            first_item,
            num_parts,
            kv_head,
            first_row + tl.arange(0, MERGED_HEADS),
            HEADS,
            GROUP,
            HEAD_DIM,
            DIM,
            MERGED_PARTS,
        )


@triton.jit
def _merge_parts(
    partial_ptr,
    log_sums_ptr,
    sinks_ptr,
    out_ptr,
    first_item,
    num_parts,
    kv_head,
    row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Merge the parts of a sequence's heads, weighted by their sums of softmax weights, and store the result.

    log_sums_ptr  log2 of these sums
    row           [rows] of the query heads that share the KV head
    """
    dim = tl.arange(0, DIM)
    head, is_head = kv_head * GROUP + row, row < GROUP
    inside = is_head[:, None] & (dim < HEAD_DIM)[None, :]
    attended = tl.zeros([row.shape[0], DIM], dtype=tl.float32)
    top = tl.full([row.shape[0]], float("-inf"), dtype=tl.float32)
    total = tl.zeros([row.shape[0]], dtype=tl.float32)
    for first in range(0, num_parts, PARTS):
        number = first + tl.arange(0, PARTS)
        is_part = number < num_parts
        part = (first_item + number)[:, None] * HEADS + head[None, :]
        log_sum = tl.load(log_sums_ptr + part, mask=is_part[:, None] & is_head[None, :], other=0.0)
        log_sum = tl.where(is_part[:, None], log_sum, float("-inf"))
        places = partial_ptr + part[:, :, None] * HEAD_DIM + dim[None, None, :]
        partial = tl.load(places, mask=is_part[:, None, None] & inside[None, :, :], other=0.0)
        new_top = tl.maximum(top, tl.max(log_sum, axis=0))
        weight = tl.exp2(log_sum - new_top[None, :])
        fade = tl.exp2(top - new_top)
        attended = attended * fade[:, None] + tl.sum(partial * weight[:, :, None], axis=0)
        total = total * fade + tl.sum(weight, axis=0)
        top = new_top
    total = add_sinks(total, top, head, is_head, sinks_ptr)
    places = out_ptr + head[:, None] * HEAD_DIM + dim[None, :]
    tl.store(places, (attended / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)

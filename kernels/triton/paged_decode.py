"""Attention of one query per sequence over its pages, on a GPU. Contexts are split so that every processor has work.

An item of work is a part of one sequence's context and one KV head, with all query heads that share it, so that a key
is read once for them. A second kernel merges the parts of a context (Flash-Decoding; Dao et al., 2023); the result of a
context with one part is written directly.

Contexts are split into parts of about equal work, by the lengths on the device. A part has about one of `num_shares`
shares of all tokens to be read, rounded up, so there are at most as many parts as shares and sequences together: the
grid is known before the lengths are. A context's parts have equal length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda_server.kernels.paged import AttentionPlan, PagedKV
from pagoda_server.kernels.triton.attention_tile import (
    METADATA,
    SEQS,
    attend_tile,
    find_tokens,
    score_scale,
    score_tile,
    table_row,
    tile_dim,
)
from pagoda_server.kernels.triton.configs import IS_INTERPRETED, tuned

ROWS_LIMIT = 64  # query heads of a tile; a KV head shared by more has several tiles
MERGE_SPLITS = tl.constexpr(16)  # parts that are merged together
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


def paged_decode_triton(q: Tensor, kv: PagedKV, plan: AttentionPlan, out: Tensor) -> None:
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
    num_shares = triton.cdiv(config.items_per_sm * _num_sms(q.device), head_tiles)
    num_items = num_seqs + num_shares  # an upper bound: each sequence has at most one part that is not full
    partial = torch.empty(num_items, num_heads, head_dim, dtype=torch.float32, device=q.device)
    weight = torch.empty(num_items, num_heads, dtype=torch.float32, device=q.device)
    splitting = {
        "num_seqs": num_seqs,
        "num_shares": num_shares,
        "WINDOW": plan.sliding_window or 0,
        "TILE": config.tile_keys,
    }
    _attend_split[(head_tiles, num_items)](
        q,
        kv.keys,
        kv.values,
        kv.key_scales,
        kv.value_scales,
        plan.context_len,
        plan.block_table,
        plan.rows,
        out,
        partial,
        weight,
        table_stride=plan.block_table.stride(0),
        scale=score_scale(head_dim),
        KV_HEADS=kv.num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        DIM=dim,
        BLOCK_SIZE=kv.block_size,
        ROWS=rows,
        UPCAST=IS_INTERPRETED,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **splitting,
    )
    _merge_splits[(num_heads, num_seqs)](
        partial, weight, plan.context_len, out, HEAD_DIM=head_dim, DIM=dim, num_warps=2, **splitting
    )


@cache
def _num_sms(device: torch.device) -> int:
    """The number of processors; 1 without a GPU, since the interpreter runs programs one by one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


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
def find_part(item, context_len_ptr, num_seqs, num_shares, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """An item's sequence, first and last token (exclusive) and number of parts; no work: sequence num_seqs."""
    limit = part_limit(context_len_ptr, num_seqs, num_shares, WINDOW, TILE)
    seq, first_item, num_items = (
        0,
        0,
        0,
    )  # sequences whose items all come before this one, their items, and all items so far
    for first in range(0, num_seqs, SEQS):
        splits = tl.cdiv(visible_len(context_len_ptr, first + tl.arange(0, SEQS), num_seqs, WINDOW), limit)
        ends = num_items + tl.cumsum(splits, axis=0)
        seq += tl.sum((ends <= item).to(tl.int32), axis=0)
        first_item = tl.maximum(first_item, tl.max(tl.where(ends <= item, ends, 0), axis=0))
        num_items += tl.sum(splits, axis=0)
    seq = tl.minimum(seq, num_seqs)
    context = tl.load(context_len_ptr + seq, mask=seq < num_seqs, other=0)
    num_keys = visible_len(context_len_ptr, seq, num_seqs, WINDOW)
    num_splits = tl.cdiv(num_keys, limit)
    length = tl.cdiv(tl.cdiv(num_keys, tl.maximum(num_splits, 1)), TILE) * TILE
    begin = context - num_keys + (item - first_item) * length
    return seq, begin, tl.minimum(begin + length, context), num_splits


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
    out_ptr,
    partial_ptr,
    weight_ptr,
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
    ROWS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    HEAD_TILES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    kv_head = tl.program_id(0) // HEAD_TILES
    head_tile = tl.program_id(0) % HEAD_TILES
    item = tl.program_id(1)

    seq, begin, end, num_splits = find_part(item, context_len_ptr, num_seqs, num_shares, WINDOW, TILE)
    if seq == num_seqs:
        return

    row = head_tile * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    head = kv_head * GROUP + row
    inside = (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    query = (seq * (KV_HEADS * GROUP) + head).to(tl.int64)
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
        scores = score_tile(q, token, is_key, keys_ptr, key_scales_ptr, HEAD_DIM, DIM)
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        attended, top, total = attend_tile(
            scores, attended, top, total, token, is_key, values_ptr, value_scales_ptr, scale, q.dtype, HEAD_DIM, DIM
        )
    attended = attended / total[:, None]
    if num_splits == 1:
        places = out_ptr + query[:, None] * HEAD_DIM + dim[None, :]
        tl.store(places, attended.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        part = item * (KV_HEADS * GROUP) + head
        tl.store(partial_ptr + part[:, None] * HEAD_DIM + dim[None, :], attended, mask=inside)
        tl.store(weight_ptr + part, top + tl.log2(total), mask=row < GROUP)


@triton.jit(do_not_specialize=["num_seqs", "num_shares"], do_not_specialize_on_alignment=METADATA)
def _merge_splits(
    partial_ptr,
    weight_ptr,
    context_len_ptr,
    out_ptr,
    num_seqs,
    num_shares,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
):
    """Merge one query head's parts, weighted by their sums of softmax weights; `weight` holds log2 of these sums."""
    head = tl.program_id(0)
    seq = tl.program_id(1)
    num_heads = tl.num_programs(0)
    limit = part_limit(context_len_ptr, num_seqs, num_shares, WINDOW, TILE)
    num_splits = tl.cdiv(visible_len(context_len_ptr, seq, num_seqs, WINDOW), limit)
    if num_splits == 1:
        return
    first_item = 0
    for first in range(0, seq, SEQS):
        before = tl.cdiv(visible_len(context_len_ptr, first + tl.arange(0, SEQS), seq, WINDOW), limit)
        first_item += tl.sum(before, axis=0)

    dim = tl.arange(0, DIM)
    inside = dim < HEAD_DIM
    attended = tl.zeros([DIM], dtype=tl.float32)
    top = float("-inf")
    total = 0.0
    for first in range(0, num_splits, MERGE_SPLITS):
        split = first + tl.arange(0, MERGE_SPLITS)
        is_split = split < num_splits
        part = (first_item + split) * num_heads + head
        weight = tl.load(weight_ptr + part, mask=is_split, other=float("-inf"))
        places = partial_ptr + part[:, None] * HEAD_DIM + dim[None, :]
        partial = tl.load(places, mask=is_split[:, None] & inside[None, :], other=0.0)
        new_top = tl.maximum(top, tl.max(weight, axis=0))
        weight = tl.exp2(weight - new_top)
        fade = tl.exp2(top - new_top)
        attended = attended * fade + tl.sum(partial * weight[:, None], axis=0)
        total = total * fade + tl.sum(weight, axis=0)
        top = new_top
    attended = attended / tl.where(num_splits > 0, total, 1.0)
    out = (seq * num_heads + head).to(tl.int64) * HEAD_DIM
    tl.store(out_ptr + out + dim, attended.to(out_ptr.dtype.element_ty), mask=inside)

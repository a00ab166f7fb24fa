"""Attention of one query a sequence over its pages, on a GPU: contexts are split, so that every processor has work.

An item of work is a part of one sequence's context (parts.py) and one KV head, with all query heads that share it: a
key is read once for them. Parts of a context are merged by a second kernel (Flash-Decoding; Dao et al., 2023); a
context of one part is written at once.
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
from pagoda_server.kernels.triton.parts import find_part, part_limit, visible_len

ROWS_LIMIT = 64  # query heads of a tile; more that share a KV head have several
MERGE_SPLITS = tl.constexpr(16)  # parts that are merged together


@dataclass(frozen=True, slots=True)
class Config:
    """
    tile_keys     tokens of a tile of keys
    items_per_sm  parts that contexts are split into, as many on average for each processor: more of them balance
                  better, and leave more to merge
    """

    tile_keys: int
    items_per_sm: int
    num_warps: int
    num_stages: int


def default_config(dim: int, itemsize: int) -> Config:
    """Tiles of up to 8 KB of keys, and as much of values: a processor of a Hopper then has registers and room for five
    programs or more, and all of its items run at once. Of five stages two are for the block table, which is read
    before the pages: two tiles of each are on their way. Products are in a type of `itemsize` bytes; in float32, where
    no matrix instruction is exact, both operands are in registers.
    """
    if itemsize == 4:
        return Config(tile_keys=min(max(2048 // dim, 16), 64), items_per_sm=4, num_warps=8, num_stages=5)
    return Config(tile_keys=min(max(4096 // dim, 16), 128), items_per_sm=4, num_warps=4, num_stages=5)


def paged_decode_triton(q: Tensor, kv: PagedKV, plan: AttentionPlan, out: Tensor) -> None:
    """`paged_attention` of the plan's first `num_decodes` sequences, written to the first rows of `out`.

    q, out  [num_tokens, num_heads, head_dim], contiguous, as are the pages
    The rows of padding (context 0) become 0.
    """
    num_seqs, (_, num_heads, head_dim) = plan.num_decodes, q.shape
    group, dim = num_heads // kv.num_kv_heads, tile_dim(head_dim)
    key = f"{kv.dtype} {head_dim} {group}".removeprefix("torch.")
    config = tuned("paged_decode", key, default_config(dim, q.dtype.itemsize))
    rows = min(max(triton.next_power_of_2(group), 16), ROWS_LIMIT)
    head_tiles = kv.num_kv_heads * triton.cdiv(group, rows)
    num_shares = triton.cdiv(config.items_per_sm * _num_sms(q.device), head_tiles)
    num_items = num_seqs + num_shares  # no more than that: each sequence has at most one part that is not full
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
    """One where there is no GPU: the interpreter runs programs one by one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


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
    """One query head of a sequence: its parts, each by its share of the weights. `weight`: log2 of their sums."""
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

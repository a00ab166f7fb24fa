"""Attention of chunks of several queries over their pages, on a GPU.

A tile's rows are queries times the query heads of a KV head, so that even a chunk of few queries fills one. Keys that
no row of a tile sees are skipped. Tiles of keys are masked only at the diagonal and at a window's edge.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ..paged import AttentionPlan, PagedKV, Scoring
from .attention_tile import (
    METADATA,
    add_sinks,
    attend_keys,
    find_keys,
    find_tile,
    score_cap,
    score_scale,
    table_row,
    tile_dim,
)
from .configs import IS_INTERPRETED, capability, tuned
from .dependent_launch import await_previous, dependent_launch


@dataclass(frozen=True, slots=True)
class Config:
    """A launch configuration: a tile's rows (queries times heads) and keys."""

    tile_rows: int
    tile_keys: int
    num_warps: int
    num_stages: int


def default_config(dim: int, itemsize: int, page_itemsize: int, capability: int) -> Config:
    """The default for products in a type of `itemsize` bytes, with as many keys as registers hold.

    capability  90 for an H100; from there on matrix instructions take their operands from shared memory

    Two of five stages are for the block table, which is read before the pages. In float32, for which no matrix
    instruction is exact, operands are in registers too.
    """
    if itemsize == 4:
        return Config(tile_rows=16, tile_keys=16, num_warps=8, num_stages=3)
    if capability >= 90:
        stages = 4 if page_itemsize == 1 and capability >= 100 else 5  # a fifth would spill widened values
        return Config(tile_rows=128, tile_keys=min(8192 // dim, 128), num_warps=8, num_stages=stages)
    return Config(tile_rows=128 if dim <= 128 else 64, tile_keys=min(4096 // dim, 64), num_warps=8, num_stages=5)


def paged_prefill_triton(q: Tensor, kv: PagedKV, plan: AttentionPlan, scoring: Scoring, out: Tensor) -> None:
    """`paged_attention` of all sequences after the plan's first `num_decodes`, written to their rows of `out`.

    q, out  [num_tokens, num_heads, head_dim], contiguous, like the pages

    Rows of padding (context 0) become 0.
    """
    num_tokens, num_heads, head_dim = q.shape
    group, dim = num_heads // kv.num_kv_heads, tile_dim(head_dim)
    key = f"{kv.dtype} {head_dim} {group}".removeprefix("torch.")
    config = tuned("paged_prefill", key, default_config(dim, q.dtype.itemsize, kv.dtype.itemsize, capability()))
    num_seqs = len(plan.context_len) - plan.num_decodes
    # An upper bound: each sequence has at most one tile that is not full.
    num_tiles = (num_tokens - plan.num_decodes) * group // config.tile_rows + num_seqs
    _attend_chunks[(num_tiles, kv.num_kv_heads)](
        q,
        kv.keys,
        kv.values,
        kv.key_scales,
        kv.value_scales,
        plan.query_start,
        plan.context_len,
        plan.block_table,
        plan.rows,
        scoring.sinks,
        out,
        first_seq=plan.num_decodes,
        num_seqs=num_seqs,
        table_stride=plan.block_table.stride(0),
        scale=score_scale(head_dim),
        KV_HEADS=kv.num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        DIM=dim,
        BLOCK_SIZE=kv.block_size,
        WINDOW=plan.sliding_window or 0,
        ROWS=config.tile_rows,
        TILE=config.tile_keys,
        CAP=score_cap(scoring.softcap, head_dim),
        UPCAST=IS_INTERPRETED,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **dependent_launch(),
    )


@triton.jit(do_not_specialize=["first_seq", "num_seqs", "table_stride"], do_not_specialize_on_alignment=METADATA)
def _attend_chunks(
    q_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    query_start_ptr,
    context_len_ptr,
    block_table_ptr,
    rows_ptr,
    sinks_ptr,
    out_ptr,
    first_seq,
    num_seqs,
    table_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    CAP: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    # A sequence's later tiles have more keys. They go first, so that the launch ends with short ones.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)

    seq, first_token, num_tokens, first_row = find_tile(tile, query_start_ptr, first_seq, num_seqs, GROUP, ROWS)
    if first_row >= num_tokens * GROUP:
        return
    context = tl.load(context_len_ptr + first_seq + seq)

    row = first_row + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    inside = (row < num_tokens * GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    query = (first_token + row // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
    q = tl.load(q_ptr + query[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    position, first_position, last_position, begin, end = find_keys(
        first_row, context, num_tokens, GROUP, WINDOW, ROWS, TILE
    )
    table_ptr = table_row(block_table_ptr, rows_ptr, table_stride, first_seq + seq)
    attended = tl.zeros([ROWS, DIM], dtype=tl.float32)
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    # One loop that tests whether to mask: with several loops, ptxas would not let products overlap.
    for start in range(begin, end, TILE):
        attended, top, total = attend_keys(
            start, end, q, position, first_position, last_position, table_ptr, kv_head, keys_ptr, values_ptr,
            key_scales_ptr, value_scales_ptr, scale, attended, top, total, KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, WINDOW,
            TILE, CAP,
        )  # fmt: skip
    total = add_sinks(total, top, kv_head * GROUP + row % GROUP, row < num_tokens * GROUP, sinks_ptr)
    attended = attended / tl.where(context > 0, total, 1.0)[:, None]
    places = out_ptr + query[:, None] * HEAD_DIM + dim[None, :]
    tl.store(places, attended.to(out_ptr.dtype.element_ty), mask=inside)

"""Attention whose sums have the same order for a query in every batch, chunk and step, on a GPU.

Keys are cut into parts of PART_TILES tiles, from the first key of a sequence on. A running softmax goes over a part's
tiles, and the parts are merged in their order. Decodes and chunks have the same tiles, so the same instructions compute
a query: what differs is the other rows of their operands, and keys that the query does not see, whose weight is 0.

Few decodes do not occupy a GPU with a program for each. Then several programs share the parts of a sequence and store
them, and a second launch merges them by the same instructions. Which program computes a part changes no bit of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..paged import PLAIN_SCORING, AttentionPlan, PagedKV, Scoring
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
from .configs import IS_INTERPRETED, capability, num_processors
from .dependent_launch import await_previous, dependent_launch
from .paged_prefill import Config

PART_TILES = 8


def fixed_config(dim: int, itemsize: int, page_itemsize: int, capability: int) -> Config:
    """The configuration for products in a type of `itemsize` bytes, whatever a step contains.

    In 16 bits, tiles have the 64 rows of one matrix instruction of a Hopper's warp group; a decode fills few of them.
    A program holds two sums, of a part and of all parts, so a tile has half the rows that chunks have otherwise.
    """
    if itemsize == 4:
        return Config(tile_rows=16, tile_keys=16, num_warps=8, num_stages=3)
    if capability >= 90:
        return Config(tile_rows=64, tile_keys=min(8192 // dim, 64), num_warps=8, num_stages=4)
    rows = 32 if page_itemsize == 1 else 64  # with 64 rows, widened values would spill
    return Config(tile_rows=rows, tile_keys=min(4096 // dim, 64), num_warps=8, num_stages=4)


def paged_attention_fixed_triton(
    q: Tensor, kv: PagedKV, plan: AttentionPlan, scoring: Scoring = PLAIN_SCORING
) -> Tensor:
    """`paged_attention_triton` with sums in a fixed order."""
    q = q.contiguous()
    out = torch.empty_like(q)
    decodes, seqs = plan.num_decodes, len(plan.context_len)
    if decodes > 0:
        num_shares = max(num_processors(q.device) // (decodes * kv.num_kv_heads), 1)
        attend_parts(q, kv, plan, scoring, out, slice(0, decodes), num_tokens=decodes, num_shares=num_shares)
    if decodes < seqs:
        attend_parts(q, kv, plan, scoring, out, slice(decodes, seqs), num_tokens=len(q) - decodes, num_shares=1)
    return out


def attend_parts(
    q: Tensor,
    kv: PagedKV,
    plan: AttentionPlan,
    scoring: Scoring,
    out: Tensor,
    seqs: slice,
    num_tokens: int,
    num_shares: int,
) -> None:
    """Attend some sequences, which have `num_tokens` queries in all, and write to their rows of `out`.

    num_shares  programs that share the parts of a sequence; more than one for the step's first decodes only
    """
    num_seqs, (_, num_heads, head_dim) = seqs.stop - seqs.start, q.shape
    group, dim, window = num_heads // kv.num_kv_heads, tile_dim(head_dim), plan.sliding_window or 0
    config = fixed_config(dim, q.dtype.itemsize, kv.dtype.itemsize, capability())
    part = PART_TILES * config.tile_keys
    most_parts = triton.cdiv(plan.block_table.shape[1] * kv.block_size, part)
    num_shares = min(num_shares, most_parts)
    num_stored = num_tokens * num_heads * most_parts if num_shares > 1 else 0
    attended = torch.empty(num_stored, head_dim, dtype=torch.float32, device=q.device)
    tops = torch.empty(num_stored, dtype=torch.float32, device=q.device)
    totals = torch.empty_like(tops)
    # An upper bound: each sequence has at most one tile that is not full.
    num_tiles = num_tokens * group // config.tile_rows + num_seqs
    _attend_parts[(num_tiles, kv.num_kv_heads, num_shares)](
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
        attended,
        tops,
        totals,
        first_seq=seqs.start,
        num_seqs=num_seqs,
        table_stride=plan.block_table.stride(0),
        most_parts=most_parts,
        scale=score_scale(head_dim),
        KV_HEADS=kv.num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        DIM=dim,
        BLOCK_SIZE=kv.block_size,
        WINDOW=window,
        ROWS=config.tile_rows,
        TILE=config.tile_keys,
        PART=part,
        CAP=score_cap(scoring.softcap, head_dim),
        UPCAST=IS_INTERPRETED,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **dependent_launch(),
    )
    if num_shares > 1:
        _merge_parts[(num_seqs, kv.num_kv_heads)](
            attended,
            tops,
            totals,
            plan.context_len,
            scoring.sinks,
            out,
            most_parts,
            KV_HEADS=kv.num_kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            DIM=dim,
            WINDOW=window,
            ROWS=triton.next_power_of_2(group),
            PART=part,
            num_warps=4,
            **dependent_launch(),
        )


@triton.jit
def _merge(attended, top, total, part_attended, part_top, part_total):
    """Add a part to a running softmax. Multiplications and additions are fused here, so that no compiler chooses."""
    new_top = tl.maximum(top, part_top)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # as in `attend_tile`
    fade, weight = tl.exp2(top - shift), tl.exp2(part_top - shift)
    attended = tl.fma(part_attended, weight[:, None], attended * fade[:, None])
    return attended, new_top, tl.fma(part_total, weight, total * fade)


@triton.jit(
    do_not_specialize=["first_seq", "num_seqs", "table_stride", "most_parts"], do_not_specialize_on_alignment=METADATA
)
def _attend_parts(
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
    attended_ptr,
    tops_ptr,
    totals_ptr,
    first_seq,
    num_seqs,
    table_stride,
    most_parts,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
    CAP: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend a tile of rows, or store its share of the parts: [rows, most_parts], with HEAD_DIM values each."""
    await_previous(PDL)
    # A sequence's later tiles have more keys. They go first, so that the launch ends with short ones.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    share, num_shares = tl.program_id(2), tl.num_programs(2)
    seq, first_token, num_tokens, first_row = find_tile(tile, query_start_ptr, first_seq, num_seqs, GROUP, ROWS)
    if first_row >= num_tokens * GROUP:
        return
    context = tl.load(context_len_ptr + first_seq + seq)

    row = first_row + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    is_row = row < num_tokens * GROUP
    inside = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    query = (first_token + row // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
    places = query[:, None] * HEAD_DIM + dim[None, :]
    q = tl.load(q_ptr + places, mask=inside, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    position, first_position, last_position, begin, end = find_keys(
        first_row, context, num_tokens, GROUP, WINDOW, ROWS, TILE
    )
    table_ptr = table_row(block_table_ptr, rows_ptr, table_stride, first_seq + seq)
    attended = tl.zeros([ROWS, DIM], dtype=tl.float32)
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    for part in range(begin // PART + share, tl.cdiv(end, PART), num_shares):
        part_attended = tl.zeros([ROWS, DIM], dtype=tl.float32)
        part_top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        part_total = tl.zeros([ROWS], dtype=tl.float32)
        for start in range(tl.maximum(begin, part * PART), tl.minimum(end, part * PART + PART), TILE):
            part_attended, part_top, part_total = attend_keys(
                start, end, q, position, first_position, last_position, table_ptr, kv_head, keys_ptr, values_ptr,
                key_scales_ptr, value_scales_ptr, scale, part_attended, part_top, part_total, KV_HEADS, HEAD_DIM, DIM,
                BLOCK_SIZE, WINDOW, TILE, CAP,
            )  # fmt: skip
        if num_shares == 1:
            attended, top, total = _merge(attended, top, total, part_attended, part_top, part_total)
        else:
            place = query * most_parts + part
            tl.store(attended_ptr + place[:, None] * HEAD_DIM + dim[None, :], part_attended, mask=inside)
            tl.store(tops_ptr + place, part_top, mask=is_row)
            tl.store(totals_ptr + place, part_total, mask=is_row)
    if num_shares == 1:
        total = add_sinks(total, top, kv_head * GROUP + row % GROUP, is_row, sinks_ptr)
        attended = attended / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(out_ptr + places, attended.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["most_parts"], do_not_specialize_on_alignment=["context_len_ptr"])
def _merge_parts(
    attended_ptr,
    tops_ptr,
    totals_ptr,
    context_len_ptr,
    sinks_ptr,
    out_ptr,
    most_parts,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the parts of a decode's query heads that share a KV head."""
    await_previous(PDL)
    seq, kv_head = tl.program_id(0), tl.program_id(1)
    context = tl.load(context_len_ptr + seq)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    is_row = row < GROUP
    inside = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    query = seq.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + row
    first = 0
    if WINDOW:
        first = tl.maximum(context - WINDOW, 0) // PART
    attended = tl.zeros([ROWS, DIM], dtype=tl.float32)
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    for part in range(first, tl.cdiv(context, PART)):
        place = query * most_parts + part
        attended, top, total = _merge(
            attended,
            top,
            total,
            tl.load(attended_ptr + place[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0.0),
            tl.load(tops_ptr + place, mask=is_row, other=float("-inf")),
            tl.load(totals_ptr + place, mask=is_row, other=0.0),
        )
    total = add_sinks(total, top, kv_head * GROUP + row, is_row, sinks_ptr)
    attended = attended / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out_ptr + query[:, None] * HEAD_DIM + dim[None, :], attended.to(out_ptr.dtype.element_ty), mask=inside)

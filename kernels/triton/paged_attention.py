"""Attention over a paged KV cache on a GPU: separate kernels for sequences that decode and for all others."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..paged import PLAIN_SCORING, AttentionPlan, PagedKV, Scoring
from .paged_decode import paged_decode_triton
from .paged_fixed import paged_attention_fixed_triton
from .paged_prefill import paged_prefill_triton

ALIGNMENT = 4  # of arrays that share a copy, in int32s


def plan_attention_triton(
    query_start: np.ndarray,
    context_len: np.ndarray,
    block_table: np.ndarray,
    kv: PagedKV,
    sliding_window: int | None,
    one_order: bool = False,
) -> AttentionPlan:
    """`plan_attention` with one copy to the device. Decodes are the sequences before the first with several queries."""
    arrays = (query_start, context_len, block_table)
    begins = np.cumsum([0, *(-(-array.size // ALIGNMENT) * ALIGNMENT for array in arrays)])
    packed = np.empty(begins[-1], dtype=np.int32)
    for array, begin in zip(arrays, begins, strict=False):
        packed[begin : begin + array.size] = array.ravel()
    on_device = torch.from_numpy(packed).to(kv.device)
    starts, contexts, table = (
        on_device[begin : begin + array.size].view(array.shape) for array, begin in zip(arrays, begins, strict=False)
    )
    query_len = np.diff(query_start)
    longer = np.flatnonzero(query_len != 1)
    return AttentionPlan(
        query_start=starts,
        context_len=contexts,
        block_table=table,
        sliding_window=sliding_window,
        one_order=one_order,
        num_decodes=int(longer[0]) if len(longer) else len(query_len),
    )


def paged_attention_triton(q: Tensor, kv: PagedKV, plan: AttentionPlan, scoring: Scoring = PLAIN_SCORING) -> Tensor:
    """`paged_attention`. Pages must be contiguous; float8 pages need a GPU of compute capability 8.9.

    The launches depend on shapes and on the plan's numbers, not on the content of its tensors, so that a CUDA graph can
    replay them with other content. Rows of padding become 0.
    """
    if plan.one_order:
        return paged_attention_fixed_triton(q, kv, plan, scoring)
    q = q.contiguous()
    out = torch.empty_like(q)
    if plan.num_decodes > 0:
        paged_decode_triton(q, kv, plan, scoring, out)
    if plan.num_decodes < len(plan.context_len):
        paged_prefill_triton(q, kv, plan, scoring, out)
    return out

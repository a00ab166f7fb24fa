"""Attention that reads the pages of the KV cache where they lie, by compiled code (kernels/native/attention.h)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagoda_server.kernels.native_module import DTYPES, native, takes
from pagoda_server.kernels.paged import AttentionPlan, PagedKV
from pagoda_server.kernels.paged_attention_cpu import paged_attention_cpu, plan_attention_cpu
from pagoda_server.kernels.recording import empty

HEAD_DIMS = frozenset((16, 32, 64, 80, 96, 128, 256))


def is_read_in_place(kv: PagedKV) -> bool:
    """Whether the module was compiled with code for pages of this dtype and head size."""
    return native is not None and kv.head_dim in HEAD_DIMS and takes(kv.keys)


def plan_attention_native(
    query_start: np.ndarray, context_len: np.ndarray, block_table: np.ndarray, kv: PagedKV, sliding_window: int | None
) -> AttentionPlan:
    """`plan_attention` without a copy: the plan holds views of the arrays, whose last dimension must be contiguous."""
    if not is_read_in_place(kv):
        return plan_attention_cpu(query_start, context_len, block_table, kv, sliding_window)
    return AttentionPlan(
        query_start=torch.from_numpy(query_start),
        context_len=torch.from_numpy(context_len),
        block_table=torch.from_numpy(block_table),
        sliding_window=sliding_window,
    )


def paged_attention_native(q: Tensor, kv: PagedKV, plan: AttentionPlan) -> Tensor:
    """`paged_attention` in place. A decode's result is the same to the last bit alone and in any batch."""
    if native is None or plan.decodes or plan.prefills:  # planned for the other
        return paged_attention_cpu(q, kv, plan)
    q = q.contiguous()
    out = empty(*q.shape, dtype=q.dtype)
    native.paged_attention(
        DTYPES[q.dtype],
        q.data_ptr(),
        kv.keys.data_ptr(),
        kv.values.data_ptr(),
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
    )
    return out

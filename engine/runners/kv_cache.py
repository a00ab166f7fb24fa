"""The memory of the paged KV cache."""

from __future__ import annotations

import torch

from pagoda_server.engine.runners.runner_info import KVCacheSpec
from pagoda_server.kernels import PagedKV

DEFAULT_CPU_BYTES = 500_000_000


def allocate(spec: KVCacheSpec, num_blocks: int, device: torch.device, dtype: torch.dtype) -> list[PagedKV]:
    """The pages of each layer. Not cleared, so that memory that no token has used yet is not resident on a CPU.

    dtype  of the pages; of float8 have scales
    """
    shape = (spec.num_layers, 2, num_blocks, spec.block_size, spec.num_kv_heads)
    pages = torch.empty(*shape, spec.head_dim, device=device, dtype=dtype)
    if not spec.scale_bytes:
        return [PagedKV(keys, values) for keys, values in pages]
    scales = torch.empty(shape, device=device, dtype=torch.float32)
    return [PagedKV(*of_layer, *scales_of_layer) for of_layer, scales_of_layer in zip(pages, scales, strict=True)]

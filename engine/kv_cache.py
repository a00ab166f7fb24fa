"""The paged KV cache: how many blocks a budget of memory holds, and their memory."""

from __future__ import annotations

import torch

from engine.errors import ConfigError
from engine.runner_info import KVCacheSpec
from kernels import PagedKV

DEFAULT_CPU_BYTES = 500_000_000


def count_blocks(spec: KVCacheSpec, budget_bytes: int) -> int:
    """Blocks that fit. Raises ConfigError if none does."""
    num_blocks = budget_bytes // spec.bytes_per_block
    if num_blocks < 1:
        raise ConfigError(
            f"a KV cache of {budget_bytes} bytes holds no block: "
            f"one of {spec.block_size} tokens takes {spec.bytes_per_block} bytes"
        )
    return num_blocks


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

"""Compiled readers of the blocks that GGUF tensors consist of. Their reference is checkpoints/gguf_blocks.py."""

from __future__ import annotations

import torch
from torch import Tensor

from .grouped_weight import GroupedWeight
from .native_module import address, native

# In the order of Blocks in native/gguf_blocks.h.
KINDS = ("Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "IQ4_XS", "MXFP4")


def reads_blocks(kind: str) -> bool:
    """Whether there is compiled code for blocks of this type of tensor."""
    return native is not None and kind in KINDS


def read_groups(kind: str, blocks: Tensor, place: GroupedWeight) -> None:
    """Fill a weight in its file's format with rows as they are.

    blocks  [rows, bytes of a row] uint8. Raises ValueError if they are not as many as `place` needs.
    """
    assert native is not None
    assert blocks.dtype == torch.uint8
    parts = place.values, place.scales, place.minimums
    assert blocks.is_contiguous()
    assert all(part is None or part.is_contiguous() for part in parts)
    addresses = (0 if part is None else part.data_ptr() for part in parts)
    size = len(place.values) * place.shape[1]
    native.read_block_groups(KINDS.index(kind), blocks.data_ptr(), blocks.nbytes, size, *addresses)


def read_values(kind: str, blocks: Tensor, table: tuple[int, ...] | None, place: Tensor) -> None:
    """Fill [rows, in] float32 with what the same rows stand for, each element rounded once.

    table  the 16 values of 4-bit codes; None: codes are the values
    """
    assert native is not None
    assert blocks.dtype == torch.uint8
    assert place.dtype == torch.float32
    assert blocks.is_contiguous()
    assert place.is_contiguous()
    values = table_tensor(table)
    addresses = address(values), place.data_ptr()
    native.read_block_values(KINDS.index(kind), blocks.data_ptr(), blocks.nbytes, place.numel(), *addresses)


def table_tensor(table: tuple[int, ...] | None) -> Tensor | None:
    return None if table is None else torch.tensor(table, dtype=torch.int8)

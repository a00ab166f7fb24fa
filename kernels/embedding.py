"""Token embedding: lookup of rows in a table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from .linear import Linear
from .linear_int8 import NativeInt8, dequantize_weight, quantize_weight
from .native_module import DTYPES, native


class Embedding(Protocol):
    """Maps ids [num_tokens] int64 to rows [num_tokens, in] of the table."""

    def __call__(self, ids: Tensor, /) -> Tensor: ...


def embedding(weight: Tensor, head: Linear | None) -> Embedding:
    """Make a lookup in a table.

    weight  [vocab, in]; the caller keeps no reference to it
    head    the head's product if head and embedding are tied, so that one copy of the table can serve both; else None
    """
    return partial(functional.embedding, weight=weight)


def embedding_wide(weight: Tensor, head: Linear | None) -> Embedding:
    """`embedding` with a result in float32, so that what the layers add to it is not rounded to bfloat16 each time."""
    return lambda ids: functional.embedding(ids, weight).float()


def embedding_int8(weight: Tensor, head: Linear | None, limits_pairs: bool = False) -> Embedding:
    """`embedding_wide` with the table rounded like a weight of `linear_int8`."""
    return embedding(dequantize_weight(*quantize_weight(weight, limits_pairs))[:, : weight.shape[1]], head)


@dataclass(frozen=True, slots=True)
class _Rows:
    head: NativeInt8

    def __call__(self, ids: Tensor, /) -> Tensor:
        assert native is not None
        assert ids.dtype == torch.int64
        assert ids.is_contiguous()
        out = torch.empty(len(ids), self.head.in_size)
        packed, scales = (part.data_ptr() for part in self.head.packed)
        sizes = len(ids), self.head.in_size
        native.embedding_int8(DTYPES[out.dtype], ids.data_ptr(), packed, scales, out.data_ptr(), *sizes)
        return out


def embedding_native(weight: Tensor, head: Linear | None) -> Embedding:
    """`embedding_wide`, or `embedding_int8` by reading the packed weight of a tied head in int8."""
    return _Rows(head) if isinstance(head, NativeInt8) else embedding_wide(weight, head)

"""Rows of the table that tokens are embedded by."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pagoda_server.kernels.linear import Linear
from pagoda_server.kernels.linear_int8 import dequantize_weight, quantize_weight
from pagoda_server.kernels.linear_int8_native import NativeInt8
from pagoda_server.kernels.native_module import DTYPES, native


class Embedding(Protocol):
    """ids [num_tokens] int64 to rows [num_tokens, in] of the table."""

    def __call__(self, ids: Tensor, /) -> Tensor: ...


def embedding(weight: Tensor, head: Linear | None) -> Embedding:
    """A table to look up rows in.

    weight  [vocab, in]; the caller lets go of it
    head    the product with this same table where the two are tied, so that one copy of it may serve both; else None
    """
    return partial(functional.embedding, weight=weight)


def embedding_wide(weight: Tensor, head: Linear | None) -> Embedding:
    """`embedding` in float32: what layers add to it is then not rounded to bfloat16 each time."""
    return lambda ids: functional.embedding(ids, weight).float()


def embedding_int8(weight: Tensor, head: Linear | None, limits_pairs: bool = False) -> Embedding:
    """`embedding_wide` with the table rounded as `linear_int8` rounds it."""
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


def embedding_int8_native(weight: Tensor, head: Linear | None) -> Embedding:
    """`embedding_int8` from the packed weight of the head; a table that is not tied stays whole."""
    return _Rows(head) if isinstance(head, NativeInt8) else embedding_wide(weight, head)

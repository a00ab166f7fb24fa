"""Token embedding: lookup of rows in a table."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from .grouped_weight import GroupedWeight
from .linear import Linear
from .linear_grouped import NativeGrouped, linear_grouped_native, multiplies_native
from .linear_int8 import NativeInt8, dequantize_weight, quantize_weight


class Embedding(Protocol):
    """Maps ids [num_tokens] int64 to rows [num_tokens, in] of the table."""

    def __call__(self, ids: Tensor, /) -> Tensor: ...


class EmbeddingMaker(Protocol):
    """Makes a lookup in a table.

    weight  [vocab, in]; the caller keeps no reference to it
    head    the head's product if head and embedding are tied, so that one copy of the table can serve both; else None
    dtype   of the model, to which rows of a table in groups are dequantized
    """

    def __call__(self, weight: Any, head: Linear | None, dtype: torch.dtype, /) -> Embedding: ...


def embedding(weight: Tensor | GroupedWeight, head: Linear | None, dtype: torch.dtype) -> Embedding:
    if isinstance(weight, GroupedWeight):
        return lambda ids: weight.rows(ids).dequantize().to(dtype)
    return partial(functional.embedding, weight=weight)


def embedding_wide(
    weight: Tensor | GroupedWeight, head: Linear | None, dtype: torch.dtype = torch.float32
) -> Embedding:
    """`embedding` with a result in float32, so that what the layers add to it is not rounded to bfloat16 each time."""
    look_up = embedding(weight, head, torch.float32)
    return lambda ids: look_up(ids).float()


def embedding_int8(weight: Tensor, head: Linear | None, limits_pairs: bool = False) -> Embedding:
    """`embedding_wide` with the table rounded like a weight of `linear_int8`."""
    return embedding_wide(dequantize_weight(*quantize_weight(weight, limits_pairs))[:, : weight.shape[1]], head)


def embedding_native(
    weight: Tensor | GroupedWeight, head: Linear | None, dtype: torch.dtype = torch.float32
) -> Embedding:
    """`embedding_wide`, or rows of a packed weight: of a tied head, those of `embedding_int8` or in groups; of a table
    in 5 bits, whose codes take a byte each before. Other formats take no less memory packed.
    """
    if head is None and isinstance(weight, GroupedWeight) and weight.format.bits == 5:
        head = linear_grouped_native(weight, None) if multiplies_native(weight.format) else None
    return head.rows if isinstance(head, NativeInt8 | NativeGrouped) else embedding_wide(weight, head)

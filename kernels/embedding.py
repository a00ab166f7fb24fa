"""Token embedding: lookup of rows in a table."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from torch import Tensor
from torch.nn import functional

from .grouped_weight import GroupedWeight
from .linear import Linear
from .linear_grouped import NativeGrouped
from .linear_int8 import NativeInt8, dequantize_weight, quantize_weight


class Embedding(Protocol):
    """Maps ids [num_tokens] int64 to rows [num_tokens, in] of the table."""

    def __call__(self, ids: Tensor, /) -> Tensor: ...


def embedding(weight: Tensor | GroupedWeight, head: Linear | None) -> Embedding:
    """Make a lookup in a table.

    weight  [vocab, in]; the caller keeps no reference to it. Rows of one in groups are dequantized to float32
    head    the head's product if head and embedding are tied, so that one copy of the table can serve both; else None
    """
    if isinstance(weight, GroupedWeight):
        return lambda ids: weight.rows(ids).dequantize()
    return partial(functional.embedding, weight=weight)


def embedding_wide(weight: Tensor | GroupedWeight, head: Linear | None) -> Embedding:
    """`embedding` with a result in float32, so that what the layers add to it is not rounded to bfloat16 each time."""
    look_up = embedding(weight, head)
    return lambda ids: look_up(ids).float()


def embedding_int8(weight: Tensor, head: Linear | None, limits_pairs: bool = False) -> Embedding:
    """`embedding_wide` with the table rounded like a weight of `linear_int8`."""
    return embedding(dequantize_weight(*quantize_weight(weight, limits_pairs))[:, : weight.shape[1]], head)


def embedding_native(weight: Tensor | GroupedWeight, head: Linear | None) -> Embedding:
    """`embedding_wide`, or rows of the packed weight of a tied head: those of `embedding_int8`, or in groups."""
    return head.rows if isinstance(head, NativeInt8 | NativeGrouped) else embedding_wide(weight, head)

"""Token embedding on a GPU: rows of a table in groups are widened as they are read."""

from __future__ import annotations

import torch
from torch import Tensor

from ..embedding import Embedding, embedding
from ..grouped_weight import GroupedWeight
from ..linear import Linear
from .linear import in_groups
from .linear_dequantized import look_up


def embedding_triton(weight: Tensor | GroupedWeight, head: Linear | None, dtype: torch.dtype) -> Embedding:
    """`embedding`. A head that is tied to a table in groups has the same codes in memory."""
    if not isinstance(weight, GroupedWeight):
        return embedding(weight, head, dtype)
    table = in_groups(weight)
    return lambda ids: look_up(table, ids, dtype)

"""Which part of a model one rank of a tensor-parallel group has (Megatron-LM; Shoeybi et al., 2019)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Cut:
    """The elements from `start` to `stop` of a dimension with `whole` elements."""

    start: int
    stop: int
    whole: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def times(self, factor: int) -> Cut:
        """The same elements, where each has become `factor` adjacent ones."""
        return Cut(self.start * factor, self.stop * factor, self.whole * factor)

    def index(self, offset: int = 0) -> Tensor:
        """[size] int64, the numbers of its elements, the first of which is number `offset` in a larger dimension."""
        return torch.arange(self.start + offset, self.stop + offset)


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part: some heads of each attention, some columns of each feed-forward layer, some of the vocabulary.

    count   ranks of the group
    sum     adds up a tensor of the same shape on every rank, in the order of ranks; all ranks get the same bits
    gather  gives rank 0 all columns of a matrix [rows, columns], which `of` has cut; the others need no result
    """

    rank: int = 0
    count: int = 1
    sum: Callable[[Tensor], Tensor] = lambda partial: partial
    gather: Callable[[Tensor, int], Tensor] = lambda part, columns: part

    @property
    def is_whole(self) -> bool:
        return self.count == 1

    def of(self, size: int, name: str) -> Cut:
        """The rank's part of `size` elements, which may be one more than another rank's. Raises ConfigError."""
        return _part(Cut(0, size, size), self.rank, self.count, name)

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[Cut, Cut]:
        """The rank's query heads, and the KV heads that they read. Raises ConfigError if there are too few heads.

        With more ranks than KV heads, several ranks hold the same KV head and share its query heads.
        """
        queries = num_heads // num_kv_heads
        if self.count <= num_kv_heads:
            kv = self.of(num_kv_heads, "KV heads")
            return Cut(kv.start * queries, kv.stop * queries, num_heads), kv
        head = self.rank * num_kv_heads // self.count
        ranks = [rank for rank in range(self.count) if rank * num_kv_heads // self.count == head]
        of_head = Cut(head * queries, (head + 1) * queries, num_heads)
        place = ranks.index(self.rank)
        return _part(of_head, place, len(ranks), "attention heads"), Cut(head, head + 1, num_kv_heads)


WHOLE = Share()


def _part(cut: Cut, place: int, count: int, name: str) -> Cut:
    if cut.size < count:
        raise ConfigError(f"--tensor-parallel: {cut.size} of the model's {cut.whole} {name} cannot be cut into {count}")
    return Cut(cut.start + cut.size * place // count, cut.start + cut.size * (place + 1) // count, cut.whole)

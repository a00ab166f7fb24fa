"""A model whose weights are counted, not loaded: the sizes are those of what its backend makes of weights of zeros.

Each kind of product is made once, of at most a few million weights, and scaled to its size. So what is counted follows
from the same code that packs the weights of a model that is served.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor

from ...kernels import PLAIN, ROUTER, Backend, Embedding, Experts, Linear, Use
from .share import WHOLE, Share
from .tensors import Rows, Tensors, Weight
from .weights import ExpertRows, Place, Weights

MOST_VALUES = 1 << 22  # in a weight that is made
ROWS = 64  # the least of them: packed weights have room for a multiple of 32


class MeasuredWeights(Weights):
    """Counts in `num_bytes` what the weights take in memory once the backend has packed them."""

    def __init__(
        self,
        tensors: Tensors,
        ops: Backend,
        device: torch.device,
        dtype: torch.dtype,
        packs: bool = False,
        share: Share = WHOLE,
    ) -> None:
        super().__init__(tensors, replace(ops, embedding=self._made_embedding), device, dtype, packs, share)
        self._embedding = ops.embedding
        self._known: dict[object, tuple[Any, int]] = {}
        self._table_rows = 0

    def norm(self, rows: Rows) -> Tensor:
        return self._counted(super().norm(rows))

    def ones(self, size: int) -> Tensor:
        return self._counted(super().ones(size))

    def numbers(self, name: str, *shape: int) -> Tensor:
        return self._counted(super().numbers(name, *shape))

    def linear(self, rows: Sequence[Rows], in_size: int, has_bias: bool = False, use: Use = PLAIN) -> Linear:
        formats = tuple((each.size, self._tensors.format_of(each.tensor_name("weight"))) for each in rows)
        key = formats, in_size, has_bias, use
        if key not in self._known:
            fewer = [_shortened(each, in_size, len(rows)) for each in rows]
            made = super().linear(fewer, in_size, has_bias, use)
            share = sum(each.size for each in rows) / sum(each.size for each in fewer)
            self._known[key] = made, round(bytes_of(made) * share)
        return cast(Linear, self._known_again(key))

    def router(self, rows: Rows, in_size: int, has_bias: bool = False) -> Linear:
        bias = self._empty(rows.size) if has_bias else None
        made = self.ops.linear(super().whole(rows, in_size), bias, ROUTER)
        self.num_bytes += bytes_of(made)
        return made

    def experts(self, parts: Sequence[ExpertRows], in_size: int, ffn_size: int, has_bias: bool, use: Use) -> Experts:
        first = parts[0]
        formats = [self._tensors.format_of(each.tensor_name("weight")) for each in (*first.gate_up, first.down)]
        key = tuple(formats), len(parts), in_size, ffn_size, has_bias, use
        if key not in self._known:
            made = super().experts(parts[:1], in_size, ffn_size, has_bias, use)
            self._known[key] = made, bytes_of(made) * len(parts)
        return cast(Experts, self._known_again(key))

    def whole(self, rows: Rows, in_size: int) -> Tensor:
        made = super().whole(_shortened(rows, in_size), in_size)
        self._count_table(made, rows)
        return made

    def table(self, rows: Rows, in_size: int, is_multiplied: bool) -> Weight:
        made = super().table(_shortened(rows, in_size), in_size, is_multiplied)
        self._count_table(made, rows)
        return made

    def _count_table(self, made: Weight, rows: Rows) -> None:
        self._table_rows = rows.size
        self.num_bytes += round(made.nbytes * rows.size / made.shape[0])

    def head(self, rows: Rows, hidden_size: int, has_bias: bool, tied_to: tuple[Rows, Weight] | None) -> Linear:
        fewer = _shortened(rows, hidden_size)
        if tied_to is not None:
            tied_to = _shortened(tied_to[0], hidden_size), tied_to[1]
        made = super().head(fewer, hidden_size, has_bias, tied_to)
        self.num_bytes += round(bytes_of(made) * rows.size / fewer.size)
        return made

    def _made_embedding(self, table: Weight, head: Linear | None, dtype: torch.dtype) -> Embedding:
        made = self._embedding(table, head, dtype)
        of_head = {} if head is None else _storages(head)
        own = sum(size for key, size in _storages(made).items() if key not in of_head)
        # The table was counted when it was read. The embedding need not keep it, and a head counts what they share.
        self.num_bytes += round((own - table.nbytes) * self._table_rows / table.shape[0])
        return made

    def _filled(self, place: Place, rows: Sequence[Rows], kind: str) -> Place:
        for part in _tensors_of(place):
            part.zero_()
        return place

    def _counted(self, tensor: Tensor) -> Tensor:
        self.num_bytes += tensor.nbytes
        return tensor

    def _known_again(self, key: object) -> Any:
        made, num_bytes = self._known[key]
        self.num_bytes += num_bytes
        return made


def _shortened(rows: Rows, in_size: int, parts: int = 1) -> Rows:
    """As many rows as are made, in place of so many."""
    most = max(ROWS, MOST_VALUES // (in_size * parts) // ROWS * ROWS)
    return replace(rows, size=min(rows.size, most), order=None)


def bytes_of(thing: object) -> int:
    return sum(_storages(thing).values())


def _storages(thing: object) -> dict[int, int]:
    """The sizes of the memory that an object's tensors share, by address."""
    return dict(_storage(tensor) for tensor in _tensors_of(thing))


def _storage(tensor: Tensor) -> tuple[int, int]:
    """The address and the size of the memory of a tensor. In a layout of oneDNN it is hidden, and shared with none."""
    if tensor.layout != torch.strided:
        return id(tensor), tensor.numel() * tensor.element_size()
    return tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()


def _tensors_of(thing: object, seen: set[int] | None = None) -> Iterator[Tensor]:
    """The tensors that an object of a backend holds, in whatever it is made of."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return
    seen.add(id(thing))
    parts: Sequence[object] = ()
    match thing:
        case Tensor():
            yield thing
        case tuple() | list():
            parts = thing
        case partial():
            parts = (thing.func, *thing.args, *thing.keywords.values())
        case MethodType():
            parts = (thing.__self__,)
        case FunctionType():
            parts = [cell.cell_contents for cell in thing.__closure__ or ()]
        case object() if type(thing).__module__.startswith(__name__.split(".")[0]):
            slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
            parts = [getattr(thing, name, None) for name in [*slots, *getattr(thing, "__dict__", ())]]
    for part in parts:
        yield from _tensors_of(part, seen)

"""What LoRA adapters add to products (Hu et al., 2021): out += activation(x) · downᵀ · up, with a row's own adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from .activate import NO_ACTIVATION, Activation, activate_cpu
from .native_module import DTYPES, native, takes

PADDING = 64  # LOW_RANK_PADDING in native/ops.h
MAX_PARTS = 3  # of a product: queries, keys and values
_PART_FIELDS = 4
_ENTRY = 3 + MAX_PARTS * _PART_FIELDS  # fields of a LowRankEntry there


@dataclass(frozen=True, slots=True)
class LowRankPart:
    """What an adapter adds to adjacent outputs of a product.

    column  the first output
    down    [rank, in]
    up      [rank, size], multiplied by the adapter's scale
    """

    column: int
    down: Tensor
    up: Tensor


class LowRank:
    """What an adapter adds to one product, packed for compiled code.

    parts  of one dtype, at most MAX_PARTS, in the order of their columns, which do not overlap
    """

    def __init__(self, parts: Sequence[LowRankPart]) -> None:
        assert 0 < len(parts) <= MAX_PARTS
        down = torch.cat([part.down for part in parts])
        self._in_size, self.dtype, self.ranks = down.shape[1], down.dtype, len(down)
        self._down = _padded(down).contiguous()
        self._columns = [(part.column, part.up.shape[1]) for part in parts]
        self._ups = [_in_panels(part.up) for part in parts]

    @property
    def num_bytes(self) -> int:
        return self._down.nbytes + sum(up.nbytes for up in self._ups)

    @property
    def parts(self) -> list[LowRankPart]:
        """What it was made of."""
        parts, rank = [], 0
        for (column, size), up in zip(self._columns, self._ups, strict=True):
            down = self._down[rank : rank + up.shape[1], : self._in_size]
            parts.append(LowRankPart(column, down, up.transpose(0, 1).flatten(1)[:, :size]))
            rank += len(down)
        return parts

    def entry(self) -> list[int]:
        """The fields of a LowRankEntry. They hold addresses, which are valid while this object lives."""
        fields = [self._down.data_ptr(), self.ranks, len(self._ups)]
        for (column, size), up in zip(self._columns, self._ups, strict=True):
            fields += [column, size, up.shape[1], up.data_ptr()]
        return fields + [0] * (_ENTRY - len(fields))


def _in_panels(up: Tensor) -> Tensor:
    """[rank, size] as [panels, rank, PADDING]."""
    padded = _padded(up)
    return padded.view(len(up), -1, PADDING).transpose(0, 1).contiguous()


def _padded(rows: Tensor) -> Tensor:
    """The same rows, with zeros behind them. torch would copy those that need none."""
    missing = -rows.shape[1] % PADDING
    return functional.pad(rows, (0, missing)) if missing else rows


@dataclass(frozen=True, slots=True)
class BankShape:
    """How much room a bank has.

    num_slots  for adapters
    max_rank   of an adapter
    in_size    of the product
    sizes      how many adjacent outputs each part of the product has, in order
    dtype      of the model and so of adapters; device: the model's
    """

    num_slots: int
    max_rank: int
    in_size: int
    sizes: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Packed(Protocol):
    """What an adapter adds to one product, as its bank takes it."""

    @property
    def num_bytes(self) -> int: ...


class LowRankBank(Protocol):
    """Of one product: what the adapter in each slot adds to it. Recordings and graphs read it when replayed."""

    def pack(self, parts: Sequence[LowRankPart]) -> Packed:
        """Prepare what an adapter adds, on any thread. At least one part, in the order of their columns."""

    def put(self, slot: int, packed: Any, /) -> None:
        """Replace what is in a slot by what this bank has packed; None: its adapter does not change this product."""


class AddressBank:
    """A bank for compiled code: a table of addresses. No op may be running when a slot changes."""

    def __init__(self, shape: BankShape) -> None:
        self._held: list[LowRank | None] = [None] * shape.num_slots
        self.table = torch.zeros(shape.num_slots, _ENTRY, dtype=torch.int64)

    def pack(self, parts: Sequence[LowRankPart]) -> LowRank:
        return LowRank(parts)

    def put(self, slot: int, low_rank: LowRank | None, /) -> None:
        self._held[slot] = low_rank
        self.table[slot] = torch.tensor([0] * _ENTRY if low_rank is None else low_rank.entry())

    def __getitem__(self, slot: int) -> LowRank | None:
        return self._held[slot]


def add_low_rank(
    out: Tensor, x: Tensor, slots: Tensor, bank: AddressBank, activation: Activation | None = None
) -> None:
    """Add to each row of `out` what the adapter in the row's slot makes of the same row of `x`.

    out         [rows, out], changed in place
    x           [rows, width * in], out's dtype
    slots       [rows] int32; -1: the row has no adapter, and stays as it is
    activation  of the rows before they are multiplied; None: there is none

    Sums are float32, and are rounded once when they are added. A row's result does not depend on the rows beside it.
    """
    for row, slot in enumerate(slots.tolist()):
        low_rank = bank[slot] if slot >= 0 else None
        if low_rank is None:
            continue
        inputs = x[row : row + 1].float()
        inputs = (activate_cpu(inputs, activation) if activation else inputs)[0]
        for part in low_rank.parts:
            columns = slice(part.column, part.column + part.up.shape[1])
            added = part.up.float().T.mv(part.down.float().mv(inputs))
            out[row, columns] = (out[row, columns].float() + added).to(out.dtype)


def add_low_rank_native(
    out: Tensor, x: Tensor, slots: Tensor, bank: AddressBank, activation: Activation | None = None
) -> None:
    """`add_low_rank` by compiled code, which reads slots and bank when it is replayed, too."""
    if native is None or not takes(x) or not takes(out):
        add_low_rank(out, x, slots, bank, activation)
        return
    assert x.dtype == out.dtype
    assert slots.dtype == torch.int32
    assert slots.is_contiguous()
    assert len(slots) == len(x) == len(out)
    in_size = x.shape[1] // (activation.width if activation else 1)
    addresses = x.data_ptr(), out.data_ptr(), slots.data_ptr(), bank.table.data_ptr()
    numbers = activation.numbers if activation else NO_ACTIVATION
    native.add_low_rank(DTYPES[x.dtype], *addresses, len(x), in_size, out.shape[1], *numbers)

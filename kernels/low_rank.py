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
_STORED = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # the numbers in native/pack_low_rank.h


@dataclass(frozen=True, slots=True)
class LowRankPart:
    """What an adapter adds to adjacent outputs of a product: scale · up · down.

    column  the first output
    down    [rank, in]
    up      [size, rank]; both in float32, float16 or bfloat16, whatever the model's dtype is
    name    of these outputs, for errors
    """

    column: int
    down: Tensor
    up: Tensor
    scale: float = 1.0
    name: str = ""

    def rounded(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`down`, and scale · `up`, which is computed in float32 and rounded once. Raises ValueError."""
        down, up = self.down.to(dtype), (self.up.float() * self.scale).to(dtype)
        if not (down.isfinite().all() and up.isfinite().all()):
            raise self.not_finite(dtype)
        return down, up

    def not_finite(self, dtype: torch.dtype) -> ValueError:
        name = str(dtype).removeprefix("torch.")
        return ValueError(f"{self.name} has values that are not finite in {name}, in which the model computes")


class LowRank:
    """What an adapter adds to one product, packed for compiled code. Raises ValueError for values that are not finite.

    parts  at most MAX_PARTS, in the order of their columns, which do not overlap
    dtype  of the model
    """

    def __init__(self, parts: Sequence[LowRankPart], dtype: torch.dtype) -> None:
        assert 0 < len(parts) <= MAX_PARTS
        self._in_size, self.dtype = parts[0].down.shape[1], dtype
        self.ranks = sum(len(part.down) for part in parts)
        self._down = torch.empty(self.ranks, -(-self._in_size // PADDING) * PADDING, dtype=dtype)
        self._columns = [(part.column, len(part.up)) for part in parts]
        self._ups = [torch.empty(-(-len(part.up) // PADDING), len(part.down), PADDING, dtype=dtype) for part in parts]
        pack = _pack_native if native is not None and dtype in DTYPES else _pack
        for part, down, up in zip(parts, self._down.split([len(part.down) for part in parts]), self._ups, strict=True):
            pack(part, down, up)

    @property
    def num_bytes(self) -> int:
        return self._down.nbytes + sum(up.nbytes for up in self._ups)

    @property
    def parts(self) -> list[LowRankPart]:
        """What it was made of, rounded."""
        parts, rank = [], 0
        for (column, size), up in zip(self._columns, self._ups, strict=True):
            down = self._down[rank : rank + up.shape[1], : self._in_size]
            parts.append(LowRankPart(column, down, up.transpose(1, 2).flatten(0, 1)[:size]))
            rank += len(down)
        return parts

    def entry(self) -> list[int]:
        """The fields of a LowRankEntry. They hold addresses, which are valid while this object lives."""
        fields = [self._down.data_ptr(), self.ranks, len(self._ups)]
        for (column, size), up in zip(self._columns, self._ups, strict=True):
            fields += [column, size, up.shape[1], up.data_ptr()]
        return fields + [0] * (_ENTRY - len(fields))


def _pack(part: LowRankPart, down: Tensor, up: Tensor) -> None:
    """Write what a part adds, with zeros behind it.

    down  [rank, in], padded to a multiple of PADDING
    up    [panels, rank, PADDING]
    """
    of_down, of_up = part.rounded(down.dtype)
    down.copy_(functional.pad(of_down, (0, down.shape[1] - of_down.shape[1])))
    padded = functional.pad(of_up, (0, 0, 0, -len(of_up) % PADDING))
    up.copy_(padded.unflatten(0, (-1, PADDING)).transpose(1, 2))


def _pack_native(part: LowRankPart, down: Tensor, up: Tensor) -> None:
    """`_pack` by compiled code, in one pass without the interpreter's lock."""
    assert native is not None
    of_down, of_up = part.down, part.up.contiguous()
    (rank, in_size), size = of_down.shape, len(of_up)
    assert of_down.stride(1) == 1
    assert of_up.shape[1] == rank
    addresses = of_down.data_ptr(), of_up.data_ptr(), down.data_ptr(), up.data_ptr()
    dtypes = DTYPES[down.dtype], _STORED[of_down.dtype], _STORED[of_up.dtype]
    if not native.pack_low_rank(*dtypes, *addresses, rank, in_size, size, of_down.stride(0), part.scale):
        raise part.not_finite(down.dtype)


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
        """Prepare what an adapter adds, on any thread. At least one part, in the order of their columns.

        Raises ValueError, which names the part, for values that are not finite in the model's dtype.
        """

    def put(self, slot: int, packed: Any, /) -> None:
        """Replace what is in a slot by what this bank has packed; None: its adapter does not change this product."""


class AddressBank:
    """A bank for compiled code: a table of addresses. No op may be running when a slot changes."""

    def __init__(self, shape: BankShape) -> None:
        self._held: list[LowRank | None] = [None] * shape.num_slots
        self._dtype = shape.dtype
        self.table = torch.zeros(shape.num_slots, _ENTRY, dtype=torch.int64)

    def pack(self, parts: Sequence[LowRankPart]) -> LowRank:
        return LowRank(parts, self._dtype)

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
            columns = slice(part.column, part.column + len(part.up))
            added = part.up.float().mv(part.down.float().mv(inputs))
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

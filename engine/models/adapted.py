"""The products of a model that LoRA adapters change, and adapters as those products take them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...checkpoints import CheckpointError
from ...checkpoints.adapters import AdapterFile, AdapterLimits, read_adapter
from ...checkpoints.gguf_adapters import read_gguf_adapter
from ...kernels import PLAIN, BankShape, LowRankBank, LowRankPart, Packed, Use
from ..core.adapter import Adapter
from ..core.step import Chunk
from .tensors import Rows
from .weights import Weights

WORK_S, RESTS = 0.002, 0.6  # a load works for so long, and then rests for this multiple of it


class AdaptedLinear:
    """One product in place of several with the same input, to which each row's adapter adds its own.

    rows     what the product computes, in order
    in_size  its inputs
    bank     what the adapters in each slot add; None: it takes none
    """

    def __init__(
        self, weights: Weights, rows: Sequence[Rows], in_size: int, has_bias: bool = False, use: Use = PLAIN
    ) -> None:
        self.rows, self.in_size = tuple(rows), in_size
        self._product, self._ops = weights.linear(rows, in_size, has_bias, use), weights.ops
        self._activation = use.activation
        self.bank: LowRankBank | None = None

    def add_bank(self, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        """Have room for so many adapters of up to this rank."""
        sizes = tuple(rows.size for rows in self.rows)
        self.bank = self._ops.bank(BankShape(num_slots, max_rank, self.in_size, sizes, dtype, device))

    def __call__(self, x: Tensor, slots: Tensor | None) -> Tensor:
        """x [num_tokens, width * in] to [num_tokens, out].

        slots  [num_tokens] int32, the slot of each row's adapter, or -1; None: no row has one
        """
        out = self._product(x)
        if slots is not None:
            assert self.bank is not None, "a row has an adapter, so there are slots"
            self._ops.add_low_rank(out, x, slots, self.bank, self._activation)
        return out


class AdapterBanks:
    """The slots for adapters beside all products of a model.

    num_slots  adapters that the rows of one step can have
    max_rank   of an adapter
    modules    what an adapter can change, by name: inputs and outputs in the checkpoint
    head_dim   of the model's attention
    dtype      of the model, which adapters get; device: the model's
    """

    def __init__(
        self,
        products: Sequence[AdaptedLinear],
        head_dim: int,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_slots, self.max_rank = num_slots, max_rank
        for product in products:
            product.add_bank(num_slots, max_rank, dtype, device)
        self._products = products
        self.modules = {
            rows.name: (product.in_size if rows.columns is None else rows.columns.whole, rows.whole_size or rows.size)
            for product in products
            for rows in product.rows
        }
        self._limits = AdapterLimits(self.modules, max_rank, head_dim)
        self._held = [b""] * num_slots  # the identity of the adapter in each slot

    def load(self, path: Path) -> Adapter:
        """Read an adapter and pack it, on any thread, while steps run. Raises CheckpointError."""
        read = read_gguf_adapter if path.suffix == ".gguf" else read_adapter
        pace = _Pace()
        file = read(path, self._limits, pace.rest)
        weights = []
        try:
            for product in self._products:
                weights.append(_fitted(product, file))
                pace.rest()
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        num_bytes = sum(each.num_bytes for each in weights if each is not None)
        return Adapter(file.identity, file.rank, num_bytes, weights)

    def place(self, chunks: Iterable[Chunk]) -> None:
        """Have the adapter of each chunk in its slot. On a CPU no step may be running."""
        for slot, adapter in self.missing(chunks):
            self.put(slot, adapter.identity, adapter.weights)

    def missing(self, chunks: Iterable[Chunk]) -> Iterator[tuple[int, Adapter]]:
        """The adapters of chunks that are not in their slots, which the caller puts there one by one."""
        for chunk in chunks:
            slot, adapter = chunk.seq.adapter_slot, chunk.seq.request.adapter
            if slot >= 0 and adapter is not None and self._held[slot] != adapter.identity:
                yield slot, adapter

    def put(self, slot: int, identity: bytes, weights: object) -> None:
        """Replace what is in a slot by the weights of an adapter that `load` has returned."""
        assert isinstance(weights, list), "load() has made it"
        self._held[slot] = b""  # until all of it is there
        for product, packed in zip(self._products, weights, strict=True):
            assert product.bank is not None
            product.bank.put(slot, packed)
        self._held[slot] = identity


class _Pace:
    """Makes a thread leave its core to a step's threads now and then, for which the system's slices are too long."""

    def __init__(self) -> None:
        self._rested_s = time.thread_time()

    def rest(self) -> None:
        worked_s = time.thread_time() - self._rested_s
        if worked_s >= WORK_S:
            time.sleep(RESTS * worked_s)
            self._rested_s = time.thread_time()


def _fitted(product: AdaptedLinear, file: AdapterFile) -> Packed | None:
    """What an adapter adds to a product; None: nothing. Raises ValueError for values that are not finite there."""
    parts = list(_parts(product, file))
    assert product.bank is not None
    return product.bank.pack(parts) if parts else None


def _parts(product: AdaptedLinear, file: AdapterFile) -> Iterator[LowRankPart]:
    column = 0
    for rows in product.rows:
        if (pair := file.pairs.get(rows.name)) is not None:
            down, up, scale = _tensor(pair.down), _tensor(pair.up), pair.scale
            if rows.columns is not None:  # this rank has some of the inputs, and products are summed over ranks
                down = down[:, rows.columns.start : rows.columns.stop]
            if rows.order is not None:
                up = up[rows.order]
            factor = rows.factor_of(slice(0, rows.size))
            if isinstance(factor, Tensor):
                up = up.float() * factor[:, None]
            else:
                scale *= factor
            yield LowRankPart(column, down, up, scale, rows.name)
        column += rows.size


def _tensor(stored: NDArray[Any]) -> Tensor:
    """Its values, not copied."""
    if stored.dtype == np.uint16:
        return torch.from_numpy(stored.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(stored)

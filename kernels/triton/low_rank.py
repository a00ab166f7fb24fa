"""What LoRA adapters add to products on a GPU: one launch multiplies by `down`, another one by `up`.

A program computes a tile of adjacent rows, once for each adapter that some of them have. So neither the grid nor what
waits for what depends on which adapters there are: a graph can capture it, and a row's bits do not depend on the rows
beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activate import NO_ACTIVATION, Activation
from ..low_rank import MAX_PARTS, BankShape, LowRankPart
from .configs import IS_INTERPRETED
from .dependent_launch import await_previous, dependent_launch
from .product import add_product

ROWS = 16  # of a tile
RANKS = 16  # that a program computes, the fewest that a tensor core takes
INPUTS, OUTPUTS = 128, 64
INPUTS_OF_A_SPLIT = 1024  # so that decodes of a few rows keep more than a few processors busy


@dataclass(frozen=True, slots=True)
class _Packed:
    """What an adapter adds to one product, in the order of the bank and, for a GPU, in pinned memory.

    places  of each part: its number, `down` [rank, in] and `up` [size, rank]
    ranks   [parts] int32, 0 where it adds nothing
    """

    places: list[tuple[int, Tensor, Tensor]]
    ranks: Tensor

    @property
    def num_bytes(self) -> int:
        return sum(down.nbytes + up.nbytes for _, down, up in self.places)


class TritonBank:
    """Of one product: what the adapter in each slot adds to it, at addresses that never change.

    down   [slots, parts, ranks, in]
    up     [slots, out, ranks]
    ranks  [slots, parts] int32; beyond an adapter's rank both hold what was there before
    """

    def __init__(self, shape: BankShape) -> None:
        self.shape = shape
        self.most_ranks = triton.cdiv(shape.max_rank, RANKS) * RANKS
        num_parts = len(shape.sizes)

        def zeros(*sizes: int, dtype: torch.dtype = shape.dtype) -> Tensor:
            return torch.zeros(shape.num_slots, *sizes, dtype=dtype, device=shape.device)

        # Zeros, because what lies beyond an adapter's rank is multiplied by zero, and must be finite.
        self.down = zeros(num_parts, self.most_ranks, shape.in_size)
        self.up = zeros(sum(shape.sizes), self.most_ranks)
        self.ranks = zeros(num_parts, dtype=torch.int32)

    def pack(self, parts: Sequence[LowRankPart]) -> _Packed:
        starts = [0, *accumulate(self.shape.sizes)]
        ranks = torch.zeros(len(self.shape.sizes), dtype=torch.int32)
        places = []
        for part in parts:
            number = starts.index(part.column)
            down, up = part.rounded(self.shape.dtype)
            ranks[number] = len(down)
            places.append((number, self._pinned(down), self._pinned(up)))
        return _Packed(places, self._pinned(ranks))

    def _pinned(self, values: Tensor) -> Tensor:
        pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=self.shape.device.type == "cuda")
        return pinned.copy_(values)

    def put(self, slot: int, packed: _Packed | None) -> None:
        """Replace what is in a slot, behind what was launched on the current stream; None: nothing is added."""
        if packed is None:
            self.ranks[slot].zero_()
            return
        self.ranks[slot].copy_(packed.ranks, non_blocking=True)
        starts = [0, *accumulate(self.shape.sizes)]
        for number, down, up in packed.places:
            self.down[slot, number, : len(down)].copy_(down, non_blocking=True)
            self.up[slot, starts[number] : starts[number + 1], : len(down)].copy_(up, non_blocking=True)


def add_low_rank_triton(
    out: Tensor, x: Tensor, slots: Tensor, bank: TritonBank, activation: Activation | None = None
) -> None:
    """`add_low_rank` in two launches. What an activation makes of x is rounded to its dtype, as in a product."""
    num_rows, out_size = out.shape
    in_size, num_parts = bank.shape.in_size, len(bank.shape.sizes)
    if not num_rows:
        return
    inputs_of_a_split = triton.cdiv(triton.cdiv(in_size, splits_of(in_size)), INPUTS) * INPUTS
    splits = triton.cdiv(in_size, inputs_of_a_split)
    ranks = num_parts * bank.most_ranks
    sums = torch.empty(splits, num_rows, ranks, dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(num_rows, ROWS)
    _, is_gated, first, second = activation.numbers if activation else NO_ACTIVATION
    _multiply_down[(tiles, ranks // RANKS, splits)](
        x.contiguous(),
        bank.down,
        bank.ranks,
        slots,
        sums,
        num_rows,
        in_size,
        inputs_of_a_split,
        bank.most_ranks,
        first,
        second,
        PARTS=num_parts,
        ROWS=ROWS,
        RANKS=RANKS,
        INPUTS=INPUTS,
        IS_EVEN=in_size % INPUTS == 0,
        FUNCTION=activation.function if activation else "",
        IS_GATED=bool(is_gated),
        UPCAST=IS_INTERPRETED,
        num_warps=1 if x.element_size() < 4 else 4,  # float32 has no matrix instructions of full precision
        num_stages=4,
        **dependent_launch(),
    )
    ends = [*accumulate(bank.shape.sizes), *[out_size] * MAX_PARTS][:MAX_PARTS]
    assert out.is_contiguous()
    _add_up[(tiles, triton.cdiv(out_size, OUTPUTS))](
        sums,
        bank.up,
        bank.ranks,
        slots,
        out,
        num_rows,
        out_size,
        bank.most_ranks,
        *ends[:2],
        PARTS=num_parts,
        SPLITS=splits,
        ROWS=ROWS,
        RANKS=RANKS,
        OUTPUTS=OUTPUTS,
        num_warps=4,
        num_stages=2,
        **dependent_launch(),
    )


def splits_of(in_size: int) -> int:
    """Into how many sums a row's product is split: by the weight alone, so that bits do not depend on the batch."""
    return -(-in_size // INPUTS_OF_A_SPLIT)


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_down(
    x_ptr,
    down_ptr,
    ranks_ptr,
    slots_ptr,
    sums_ptr,
    num_rows,
    in_size,
    inputs_of_a_split,
    most_ranks,
    first_parameter,
    second_parameter,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    FUNCTION: tl.constexpr,
    IS_GATED: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write sums [splits, rows, parts * ranks], where a row's adapter has such a rank."""
    await_previous(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first_rank, split = tl.program_id(1) * RANKS, tl.program_id(2)
    part = first_rank // most_ranks
    slot = tl.load(slots_ptr + row, mask=row < num_rows, other=-1)
    row_ptr = x_ptr + tl.minimum(row, num_rows - 1).to(tl.int64)[:, None] * (2 * in_size if IS_GATED else in_size)
    dtype: tl.constexpr = tl.float32 if UPCAST else x_ptr.dtype.element_ty
    number = first_rank + tl.arange(0, RANKS)
    first = split * inputs_of_a_split
    last = tl.minimum(first + inputs_of_a_split, in_size)
    place = (split.to(tl.int64) * num_rows + row[None, :]) * (PARTS * most_ranks) + number[:, None]
    now = tl.max(slot, 0)
    while now >= 0:
        rank = tl.load(ranks_ptr + now * PARTS + part)
        if first_rank % most_ranks < rank:
            read_rank = now.to(tl.int64) * (PARTS * most_ranks) + number
            total = tl.zeros((RANKS, ROWS), dtype=tl.float32)
            for start in range(first, last, INPUTS):
                total = add_product(
                    total,
                    row_ptr,
                    down_ptr,
                    None,
                    None,
                    None,
                    *(read_rank, start, in_size, first_parameter, second_parameter, dtype),
                    *(INPUTS, 0, False, 0, IS_EVEN, FUNCTION, IS_GATED),
                )
            tl.store(sums_ptr + place, total, mask=(slot == now)[None, :])
        now = tl.max(tl.where(slot < now, slot, -1), 0)


@triton.jit(do_not_specialize=["num_rows"])
def _add_up(
    sums_ptr,
    up_ptr,
    ranks_ptr,
    slots_ptr,
    out_ptr,
    num_rows,
    out_size,
    most_ranks,
    first_end,
    second_end,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply the sums over all splits by `up`, and add that to out [rows, out]."""
    await_previous(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first_output = tl.program_id(1) * OUTPUTS
    output = first_output + tl.arange(0, OUTPUTS)
    slot = tl.load(slots_ptr + row, mask=row < num_rows, other=-1)
    total = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    now = tl.max(slot, 0)
    while now >= 0:
        for part in range(PARTS):
            start = tl.where(part == 0, 0, tl.where(part == 1, first_end, second_end))
            end = tl.where(part == PARTS - 1, out_size, tl.where(part == 0, first_end, second_end))
            rank = tl.load(ranks_ptr + now * PARTS + part)
            rank = tl.where((first_output < end) & (first_output + OUTPUTS > start), rank, 0)
            is_of_part = (output >= start) & (output < end)
            for first_rank in range(0, rank, RANKS):
                number = first_rank + tl.arange(0, RANKS)
                place = row.to(tl.int64)[None, :] * (PARTS * most_ranks) + (part * most_ranks + number)[:, None]
                is_read = (slot == now)[None, :] & (number < rank)[:, None]
                sums = tl.zeros((RANKS, ROWS), dtype=tl.float32)
                for split in tl.static_range(SPLITS):
                    offset = split * num_rows.to(tl.int64) * (PARTS * most_ranks)
                    sums += tl.load(sums_ptr + offset + place, mask=is_read, other=0.0)
                read_output = now.to(tl.int64) * out_size + output
                up = tl.load(
                    up_ptr + read_output[:, None] * most_ranks + number[None, :], mask=is_of_part[:, None], other=0.0
                )
                total = tl.dot(up.to(tl.float32), sums, total, input_precision="ieee")
        now = tl.max(tl.where(slot < now, slot, -1), 0)
    place = out_ptr + row.to(tl.int64)[None, :] * out_size + output[:, None]
    inside = (slot >= 0)[None, :] & (output < out_size)[:, None]
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32) + total
    tl.store(place, value.to(out_ptr.dtype.element_ty), mask=inside)

"""Products of a few rows with a large weight on a GPU, as fast as the weight can be read.

The weight is the left operand and the rows are the right one: tensor cores take 64 outputs and as few as 16 rows at
once, and a quantized weight goes from the registers where it was widened directly into the product. If outputs are too
few to occupy the GPU, the input is split; partial sums are added in a fixed order, so that results are reproducible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activate import NO_ACTIVATION, Activation
from .activate import apply, gate
from .configs import IS_INTERPRETED, remembered, tuned
from .dependent_launch import await_previous, dependent_launch
from .groups import inputs_of_part, load, packed_table, widened_part

REDUCED = 1024  # sums that a program adds up
LINE_BYTES = tl.constexpr(128)  # of the level-2 cache
FIRST_LINES = tl.constexpr(4)  # of each output, prefetched while the previous kernel ends


@dataclass(frozen=True, slots=True)
class Config:
    """A launch configuration.

    rows             rows of x that a program multiplies, a power of two from 16
    outputs, inputs  of a tile of the weight
    splits           of the input, each with its own programs
    """

    rows: int
    outputs: int
    inputs: int
    splits: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight, quantized or not.

    Those of several experts have another dimension, the first.

    values    [out, in], contiguous, of any dtype that widens to that of the rows; in groups as in `GroupedWeight`
    scales    [out] float32, factors of the values; None: the values are the weight; in groups [out, groups]
    minimums  [out, groups], what is added to the scaled values of a group, or None
    group     inputs that share a scale, if not all inputs of an output do
    table     what codes of 4 bits in groups stand for; None: themselves
    """

    values: Tensor
    scales: Tensor | None = None
    minimums: Tensor | None = None
    group: int = 0
    table: tuple[int, ...] | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """(out, in)"""
        *_, out_size, in_size = self.values.shape[:-1] if self.group else self.values.shape
        return out_size, in_size * (self.group or 1)

    @property
    def is_packed(self) -> bool:
        """Whether two codes of 4 bits share a byte."""
        return self.values.dtype == torch.uint8


NO_KERNEL = Config(rows=0, outputs=0, inputs=0, splits=0, num_warps=0, num_stages=0)  # another implementation is faster
LARGEST_BUCKET = 1024

# Takes a bucket of rows, (out, in) and the device.
DefaultConfig = Callable[[int, tuple[int, int], torch.device], Config]


def choose(op: str, x: Tensor, weight: Weight, default: DefaultConfig) -> Config:
    """The table's configuration for the number of rows and the weight, or the default."""
    return _choose(op, bucket(len(x)), weight.sizes, x.dtype, x.device, default)


def bucket(rows: int) -> int:
    """The number of rows at which a configuration for `rows` is measured: 1, or the next power of two from 16."""
    return 1 if rows <= 1 else min(max(triton.next_power_of_2(rows), 16), LARGEST_BUCKET)


@remembered
def _choose(
    op: str, rows: int, sizes: tuple[int, int], dtype: torch.dtype, device: torch.device, default: DefaultConfig
) -> Config:
    out_size, in_size = sizes
    key = f"{rows}x{in_size}x{out_size} {str(dtype).removeprefix('torch.')}"
    return tuned(op, key, default(rows, sizes, device))


def multiply(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    config: Config,
    *,
    activation: Activation | None = None,
    adds_up: bool = False,
) -> Tensor:
    """x · weightᵀ + bias, accumulated in float32.

    x        [rows, in]; [rows, width * in] of an activation, which is applied first
    bias     [out], x's dtype, or None
    adds_up  each program computes all splits and adds them up, in the order in which another launch would
    return   [rows, out], x's dtype
    """
    out_size, in_size = weight.sizes
    rows = len(x)
    out = torch.empty(rows, out_size, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    tiles = triton.cdiv(in_size, config.inputs)
    tiles_per_split = triton.cdiv(tiles, config.splits)
    splits = triton.cdiv(tiles, tiles_per_split)
    programs = 1 if adds_up else splits
    sums = out if programs == 1 else torch.empty(splits, rows, out_size, dtype=torch.float32, device=x.device)
    _, is_gated, first, second = activation.numbers if activation else NO_ACTIVATION
    _multiply[(triton.cdiv(rows, config.rows), triton.cdiv(out_size, config.outputs), programs)](
        x.contiguous(),
        weight.values,
        weight.scales,
        weight.minimums,
        bias if programs == 1 else None,
        sums,
        rows,
        out_size,
        in_size,
        tiles_per_split,
        first,
        second,
        ROWS=config.rows,
        OUTPUTS=config.outputs,
        INPUTS=config.inputs,
        SPLITS=splits // programs,
        IS_EVEN=in_size % config.inputs == 0,
        GROUP=weight.group,
        IS_PACKED=weight.is_packed,
        TABLE=packed_table(weight.table),
        FUNCTION=activation.function if activation else "",
        IS_GATED=bool(is_gated),
        UPCAST=IS_INTERPRETED,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **dependent_launch(),
    )
    if programs > 1:
        _add_up[(rows, triton.cdiv(out_size, REDUCED))](
            sums, bias, out, rows, out_size, SPLITS=splits, BLOCK=REDUCED, num_warps=4, **dependent_launch()
        )
    return out


@triton.jit(do_not_specialize=["num_rows", "tiles_per_split"])
def _multiply(
    x_ptr,
    weight_ptr,
    scales_ptr,
    minimums_ptr,
    bias_ptr,
    sums_ptr,
    num_rows,
    out_size,
    in_size,
    tiles_per_split,
    first_parameter,
    second_parameter,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    IS_PACKED: tl.constexpr,
    TABLE: tl.constexpr,
    FUNCTION: tl.constexpr,
    IS_GATED: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write sums [splits / SPLITS, rows, out]. Rows vary fastest: programs share a tile of the weight in the cache."""
    split = tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    # Beyond the last row and output the last one is read again, so that loads need no mask; it is not stored.
    read_row = tl.minimum(row, num_rows - 1).to(tl.int64)
    read_output = tl.minimum(output, out_size - 1).to(tl.int64)
    x_width = 2 * in_size if IS_GATED else in_size
    row_ptr = x_ptr + read_row[:, None] * x_width
    dtype: tl.constexpr = tl.float32 if UPCAST else x_ptr.dtype.element_ty
    scale = None
    if scales_ptr is not None and GROUP == 0:
        scale = tl.load(scales_ptr + read_output)[:, None]
    if PDL:
        stored_size = in_size // 2 if IS_PACKED else in_size
        first_stored = split * SPLITS * tiles_per_split * (INPUTS // 2 if IS_PACKED else INPUTS)
        _prefetch(weight_ptr + read_output[:, None] * stored_size, first_stored, stored_size)
    await_previous(PDL)
    total = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    for number in range(SPLITS):
        first = (split * SPLITS + number) * tiles_per_split * INPUTS
        last = tl.minimum(first + tiles_per_split * INPUTS, in_size)
        sums = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
        for start in range(first, last, INPUTS):
            sums = add_product(
                sums,
                row_ptr,
                weight_ptr,
                scales_ptr,
                minimums_ptr,
                scale,  # not in a tuple, because Triton takes no local None there
                *(read_output, start, in_size, first_parameter, second_parameter, dtype),
                *(INPUTS, GROUP, IS_PACKED, TABLE, IS_EVEN, FUNCTION, IS_GATED),
            )
        total = total + sums if SPLITS > 1 else sums
    if bias_ptr is not None:
        total += tl.load(bias_ptr + read_output).to(tl.float32)[:, None]
    place = sums_ptr + (split.to(tl.int64) * num_rows + row[None, :]) * out_size + output[:, None]
    inside = (row < num_rows)[None, :] & (output < out_size)[:, None]
    tl.store(place, total.to(sums_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_product(
    sums,
    row_ptr,
    weight_ptr,
    scales_ptr,
    minimums_ptr,
    scale,
    read_output,
    start,
    in_size,
    first_parameter,
    second_parameter,
    dtype: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_PACKED: tl.constexpr,
    TABLE: tl.constexpr,
    IS_EVEN: tl.constexpr,
    FUNCTION: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    """Sums [outputs, rows] and the product of the weight's tile that begins at input `start` with those of the rows.

    row_ptr      [rows, 1], where each row begins
    scale        [outputs, 1], or None if the weight has no scale for each output
    read_output  [outputs] int64, the rows of the weight
    """
    parameters = (first_parameter, second_parameter)
    # A product that is scaled, or is added to the sums, is waited for. Without that, Triton 3.6 widens the next weights
    # into registers that a running product still reads (triton-lang/triton#9433).
    if GROUP != 0 and GROUP < INPUTS:
        product = tl.zeros_like(sums)
        for part in tl.static_range(2):
            inputs = inputs_of_part(start, part, INPUTS, GROUP, IS_PACKED)
            x = _load_rows(row_ptr, inputs, in_size, *parameters, IS_EVEN, FUNCTION, IS_GATED).to(dtype)
            weight = widened_part(
                *(weight_ptr, scales_ptr, minimums_ptr, read_output, start, in_size, part, dtype),
                *(INPUTS, GROUP, IS_PACKED, TABLE, IS_EVEN),
            )
            product = tl.dot(weight, tl.trans(x), product, input_precision="ieee")
        return sums + product
    if GROUP != 0:  # the tile lies within a group
        scale = tl.load(scales_ptr + read_output * (in_size // GROUP) + start // GROUP)[:, None]
    inputs = start + tl.arange(0, INPUTS)
    weight_places = weight_ptr + read_output[:, None] * in_size + inputs[None, :]
    weight = load(weight_places, inputs, in_size, IS_EVEN).to(dtype)
    x = _load_rows(row_ptr, inputs, in_size, *parameters, IS_EVEN, FUNCTION, IS_GATED).to(dtype)
    if scale is not None:
        return sums + tl.dot(weight, tl.trans(x), input_precision="ieee") * scale
    return tl.dot(weight, tl.trans(x), sums, input_precision="ieee")


@triton.jit
def _load_rows(
    row_ptr,
    inputs,
    in_size,
    first_parameter,
    second_parameter,
    IS_EVEN: tl.constexpr,
    FUNCTION: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    """Rows of x at these inputs, after the activation if there is one."""
    places = row_ptr + inputs[None, :]
    x = load(places, inputs, in_size, IS_EVEN)
    if IS_GATED:
        up = load(places + in_size, inputs, in_size, IS_EVEN).to(tl.float32)
        x = gate(x.to(tl.float32), up, first_parameter, second_parameter, FUNCTION).to(x.dtype)
    elif FUNCTION != "":
        x = apply(x.to(tl.float32), first_parameter, second_parameter, FUNCTION).to(x.dtype)
    return x


@triton.jit
def _prefetch(row_ptr, first, in_size):
    """Ask for the first lines of a tile of the weight, a constant, without waiting for them."""
    bits: tl.constexpr = row_ptr.dtype.element_ty.primitive_bitwidth
    inputs = first + tl.arange(0, FIRST_LINES) * (LINE_BYTES * 8 // bits)
    places = (row_ptr + tl.minimum(inputs, in_size - 1)[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["num_rows"])
def _add_up(
    sums_ptr, bias_ptr, out_ptr, num_rows, out_size, SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Sum [SPLITS, rows, out] over the splits into out [rows, out]."""
    await_previous(PDL)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = output < out_size
    place = tl.program_id(0).to(tl.int64) * out_size + output
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(sums_ptr + split * num_rows.to(tl.int64) * out_size + place, mask=inside, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=inside)

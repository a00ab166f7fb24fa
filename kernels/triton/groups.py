"""Weights in groups on a GPU, in the layout of `GroupedWeight`, widened in registers on their way to a product.

A tile of a weight is read in two parts, whose products with the rows are added up. In 4 bits they are the low and the
high nibbles of the same bytes, which are the first and the second halves of all groups; in 8 bits they are the first
and the second half of the tile. So nibbles need not be interleaved, and a thread widens the bytes that it has loaded.

Elements are scale * value + minimum in float32, and rounded once, to the dtype of the rows.
"""

from __future__ import annotations

import triton
import triton.language as tl


def packed_table(table: tuple[int, ...] | None) -> int:
    """The 16 int8 values of a table in one number, the first in the lowest byte, for a kernel's constant; 0: none."""
    return 0 if table is None else int.from_bytes(bytes(value & 255 for value in table), "little")


# MXFP4's values, doubled: floating-point numbers of two bits of exponent and one of mantissa.
MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
E2M1 = tl.constexpr(packed_table(MXFP4))


@triton.jit
def load(places, number, count, IS_EVEN: tl.constexpr):
    """Load [outputs or rows, numbers] elements, zero where a number [numbers] is not below `count`."""
    if IS_EVEN:
        return tl.load(places)
    return tl.load(places, mask=(number < count)[None, :], other=0.0)


@triton.jit
def inputs_of_part(start, part: tl.constexpr, INPUTS: tl.constexpr, GROUP: tl.constexpr, IS_PACKED: tl.constexpr):
    """The inputs [INPUTS / 2] of a part of the tile that begins at `start`, in the order of its stored values."""
    number = tl.arange(0, INPUTS // 2)
    if IS_PACKED:
        half: tl.constexpr = GROUP // 2
        return start + number // half * GROUP + part * half + number % half
    return start + part * (INPUTS // 2) + number


@triton.jit
def widened_part(
    weight_ptr,
    scales_ptr,
    minimums_ptr,
    output,
    start,
    in_size,
    part: tl.constexpr,
    dtype: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_PACKED: tl.constexpr,
    TABLE: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """A part [outputs, INPUTS / 2] of the tile of a weight that begins at input `start`, zero beyond `in_size`.

    output  [outputs] int64, the rows of the weight
    """
    outputs: tl.constexpr = output.shape[0]
    width: tl.constexpr = GROUP // 2 if IS_PACKED else GROUP
    groups: tl.constexpr = INPUTS // 2 // width
    num_groups = in_size // GROUP
    first = start // GROUP + (0 if IS_PACKED else part * groups)
    group = first + tl.arange(0, groups)
    stored = first * width + tl.arange(0, INPUTS // 2)
    value_places = weight_ptr + output[:, None] * num_groups * width + stored[None, :]
    places = output[:, None] * num_groups + group[None, :]
    codes = load(value_places, stored, num_groups * width, IS_EVEN)
    scale = load(scales_ptr + places, group, num_groups, IS_EVEN).to(tl.float32)
    codes = tl.reshape(codes, outputs, groups, width)
    element = values_of(codes, part, IS_PACKED, TABLE) * scale[:, :, None]
    if minimums_ptr is not None:
        minimum = load(minimums_ptr + places, group, num_groups, IS_EVEN).to(tl.float32)
        element += minimum[:, :, None]
    return tl.reshape(element.to(dtype), outputs, INPUTS // 2)


@triton.jit
def values_of(codes, part: tl.constexpr, IS_PACKED: tl.constexpr, TABLE: tl.constexpr):
    """What stored codes stand for, in float32: those in low nibbles for part 0, those in high nibbles for part 1."""
    return _values_of_nibbles(codes, part, TABLE) if IS_PACKED else codes.to(tl.float32)


@triton.jit
def _values_of_nibbles(codes, part: tl.constexpr, TABLE: tl.constexpr):
    code = codes & 15 if part == 0 else codes >> 4
    if TABLE == 0:
        return code.to(tl.float32)
    code = code.to(tl.uint32)
    if TABLE == E2M1:  # in the bits of a float32 they are 2¹²⁷ times smaller
        return (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True) * (2.0**127)
    word = tl.where(
        (code & 8) != 0,
        tl.where((code & 4) != 0, (TABLE >> 96) & 0xFFFFFFFF, (TABLE >> 64) & 0xFFFFFFFF).to(tl.uint32),
        tl.where((code & 4) != 0, (TABLE >> 32) & 0xFFFFFFFF, TABLE & 0xFFFFFFFF).to(tl.uint32),
    )
    return (word >> ((code & 3) * 8)).to(tl.int8).to(tl.float32)

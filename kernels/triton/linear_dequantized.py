"""Products of many rows with a quantized weight on a GPU: the library multiplies by a widened copy of the weight.

The kernel for few rows widens the whole weight once for every 128 rows. With many rows that takes longer than the
products. Here the weight is widened once a call, to a buffer that is freed when the call returns. Torch's allocator, or
a graph's memory, then gives the same buffer to the next layer. The steps that are measured before the KV cache is sized
count it.

The copy has the dtype of the rows: scales are applied, then elements are rounded. For normally distributed weights and
rows in bfloat16 this rounding changes a product by 0.16 % of its norm, as much as rounding the product itself does. The
quantization of the weight changes it by 0.87 % in int8 and by 2.6 % in float8.

`torch._scaled_mm` multiplies float8 by float8 up to twice as fast, but it needs activations in float8. On the same
numbers that changes a product by another 2.6 %. A row's result would then depend on the number of rows in its step as
much as on the quantization of the weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import await_previous, dependent_launch
from .groups import packed_table, values_of
from .product import Weight

# Large enough that a product of a part of the head occupies the GPU, and a fraction of a percent of its memory.
SCRATCH_BYTES = 256 << 20
MOST_INPUTS = 4096  # that a program widens
INPUTS_PER_WARP = 512  # 16 bytes a thread of 8-bit values


def multiply_dequantized(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """x · weightᵀ + bias, like `multiply`; the weight is widened in parts of at most SCRATCH_BYTES.

    x       [rows, in]
    bias    [out], x's dtype, or None
    return  [rows, out], x's dtype
    """
    out_size, in_size = weight.sizes
    outputs = min(out_size, max(SCRATCH_BYTES // (in_size * x.dtype.itemsize), 1))
    scratch = torch.empty(outputs, in_size, dtype=x.dtype, device=x.device)
    out = torch.empty(len(x), out_size, dtype=x.dtype, device=x.device)
    for start in range(0, out_size, outputs):
        part = slice(start, start + outputs)
        widened = dequantize(weight, start, scratch[: out_size - start])
        if bias is None:
            torch.mm(x, widened.T, out=out[:, part])
        else:
            torch.addmm(bias[part], x, widened.T, out=out[:, part])
    return out


def dequantize(weight: Weight, start: int, out: Tensor) -> Tensor:
    """Write the weight's outputs from `start` on to `out` [outputs, in]. Returns `out`."""
    _dequantize_rows(weight, start, None, out)
    return out


def look_up(weight: Weight, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight's outputs `ids` [count] int64, as `dtype` [count, in]."""
    out = torch.empty(len(ids), weight.sizes[1], dtype=dtype, device=ids.device)
    if len(ids):
        _dequantize_rows(weight, 0, ids, out)
    return out


def _dequantize_rows(weight: Weight, start: int, ids: Tensor | None, out: Tensor) -> None:
    outputs, in_size = out.shape
    block = min(triton.next_power_of_2(in_size), MOST_INPUTS)
    grid = (outputs, triton.cdiv(in_size, block))
    inputs_per_warp = INPUTS_PER_WARP * (2 if weight.is_packed else 1)
    options = {"num_warps": max(block // inputs_per_warp, 1), **dependent_launch()}
    if weight.group:
        _dequantize_groups[grid](
            weight.values,
            weight.scales,
            weight.minimums,
            ids,
            out,
            start,
            in_size // weight.group,
            GROUP=weight.group,
            GROUPS=max(block // weight.group, 1),
            IS_PACKED=weight.is_packed,
            TABLE=packed_table(weight.table),
            **options,
        )
    else:
        _dequantize[grid](weight.values, weight.scales, ids, out, start, in_size, BLOCK=block, **options)


@triton.jit(do_not_specialize=["start"])
def _dequantize(weight_ptr, scales_ptr, ids_ptr, out_ptr, start, in_size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    inputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = inputs < in_size
    if ids_ptr is not None:
        await_previous(PDL)
        output = tl.load(ids_ptr + row)
    else:
        output = start + row
    scale = tl.load(scales_ptr + output)
    values = tl.load(weight_ptr + output * in_size + inputs, mask=inside, other=0.0).to(tl.float32)
    if ids_ptr is None:
        await_previous(PDL)  # the weight is a constant
    tl.store(out_ptr + row * in_size + inputs, (values * scale).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["start"])
def _dequantize_groups(
    weight_ptr,
    scales_ptr,
    minimums_ptr,
    ids_ptr,
    out_ptr,
    start,
    num_groups,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    IS_PACKED: tl.constexpr,
    TABLE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    width: tl.constexpr = GROUP // 2 if IS_PACKED else GROUP  # stored values of a group
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    number = tl.arange(0, width)
    inside = group < num_groups
    if ids_ptr is not None:
        await_previous(PDL)
        output = tl.load(ids_ptr + row)
    else:
        output = start + row
    place = output * num_groups + group
    scale = tl.load(scales_ptr + place, mask=inside, other=0.0).to(tl.float32)[:, None]
    if minimums_ptr is not None:
        minimum = tl.load(minimums_ptr + place, mask=inside, other=0.0).to(tl.float32)[:, None]
    codes = tl.load(weight_ptr + place[:, None] * width + number[None, :], mask=inside[:, None], other=0.0)
    if ids_ptr is None:
        await_previous(PDL)  # the weight is a constant
    for part in tl.static_range(2 if IS_PACKED else 1):
        element = values_of(codes, part, IS_PACKED, TABLE) * scale
        if minimums_ptr is not None:
            element += minimum
        target = out_ptr + (row * num_groups + group)[:, None] * GROUP + part * width + number[None, :]
        tl.store(target, element.to(out_ptr.dtype.element_ty), mask=inside[:, None])

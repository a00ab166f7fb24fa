"""Expert layers on a GPU: one launch multiplies the rows of all experts, whatever their numbers.

Rows are sorted by expert on the device, and a program finds the expert of its tile of rows among their counts. So the
grid depends on the number of rows alone, nothing waits for the host, and a graph can capture a step. A grid has room
for the most tiles that so many rows can have; programs beyond the last tile end at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activate import Activation
from ..experts import Experts, ExpertWeights, experts
from ..linear import ExpertRows, LinearMaker, Use
from ..route import Routes
from .activate import activate_triton
from .configs import IS_INTERPRETED
from .dependent_launch import await_previous, dependent_launch
from .groups import packed_table
from .linear import GroupedMaker, WeightMaker
from .linear_fixed import fixed_config
from .product import Config, Weight, add_product

# For experts of few rows: tiles have the fewest rows that a tensor core takes.
FEW_ROWS = Config(rows=16, outputs=64, inputs=128, splits=1, num_warps=4, num_stages=4)
SUMMED = 1024  # outputs that a program adds up


@dataclass(frozen=True, slots=True)
class _TritonExperts:
    """
    gate_up, down  the weights of all experts; their biases are [experts, out]
    """

    gate_up: Weight
    gate_up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None
    activation: Activation
    is_deterministic: bool

    def __call__(
        self, x: Tensor, routes: Routes, shared: Tensor | None = None, gates: Tensor | None = None, /
    ) -> Tensor:
        rows, chosen = routes.experts.shape
        if not rows:
            return torch.empty_like(x)
        count = len(self.gate_up.values)
        by_expert, order = routes.experts.flatten().sort(stable=True)
        numbers = torch.arange(count + 1, dtype=torch.int32, device=x.device)
        starts = torch.searchsorted(by_expert, numbers, out_int32=True)
        sources = (order // chosen).int()
        places = torch.empty_like(sources)
        places[order] = torch.arange(rows * chosen, dtype=torch.int32, device=x.device)
        first, second = (
            self._config(weight, rows * chosen // count, x.dtype.itemsize) for weight in (self.gate_up, self.down)
        )
        gate_up = multiply_rows(x, self.gate_up, self.gate_up_bias, ExpertRows(starts, sources), first)
        activated = activate_triton(gate_up, self.activation)
        outputs = multiply_rows(activated, self.down, self.down_bias, ExpertRows(starts), second)
        return weigh(outputs, places.view(rows, chosen), routes.weights, shared, gates)

    def _config(self, weight: Weight, rows_of_an_expert: int, itemsize: int) -> Config:
        if rows_of_an_expert <= FEW_ROWS.rows and itemsize < 4 and not self.is_deterministic:
            return few_rows(weight)
        return fixed_config(weight.sizes[1], itemsize, in_groups=weight.group > 0)


def few_rows(weight: Weight) -> Config:
    """FEW_ROWS, except that values of a table take more registers than four warps have on compute capability 10.0."""
    return replace(FEW_ROWS, num_warps=8) if weight.table else FEW_ROWS


def experts_triton(make: LinearMaker, weights: Iterable[ExpertWeights], count: int, use: Use) -> Experts:
    """`experts` in each format of which there is a `Weight`."""
    assert use.activation is not None
    if not isinstance(make, WeightMaker | GroupedMaker):
        return experts(make, weights, count, use)
    layer: _TritonExperts | None = None
    for number, each in enumerate(weights):
        gate_up, down = make.prepare(each.gate_up), make.prepare(each.down)
        if layer is None:
            stacks = stack_of(count, gate_up), _stack(count, each.gate_up_bias), stack_of(count, down)
            bias = _stack(count, each.down_bias)
            layer = _TritonExperts(*stacks, bias, use.activation, use.is_deterministic)
        for stack, part in (
            *zip(_parts(layer.gate_up), _parts(gate_up), strict=True),
            *zip(_parts(layer.down), _parts(down), strict=True),
            (layer.gate_up_bias, each.gate_up_bias),
            (layer.down_bias, each.down_bias),
        ):
            if stack is not None and part is not None:
                assert stack.dtype == part.dtype
                stack[number] = part
    assert layer is not None
    return layer


def _parts(weight: Weight) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return weight.values, weight.scales, weight.minimums


def stack_of(count: int, weight: Weight) -> Weight:
    """Uninitialized weights of so many experts, in the format of one."""
    values, scales, minimums = (_stack(count, part) for part in _parts(weight))
    assert values is not None
    return replace(weight, values=values, scales=scales, minimums=minimums)


def _stack(count: int, part: Tensor | None) -> Tensor | None:
    return None if part is None else part.new_empty(count, *part.shape)


def multiply_rows(x: Tensor, weight: Weight, bias: Tensor | None, rows: ExpertRows, config: Config) -> Tensor:
    """The products of rows with the weights of their experts, accumulated in float32.

    x       [any, in] with `rows.sources`, or [rows, in]
    weight  of all experts
    bias    [experts, out], x's dtype, or None
    return  [rows, out], x's dtype
    """
    count, (out_size, in_size) = len(weight.values), weight.sizes
    num_rows = len(x if rows.sources is None else rows.sources)
    out = torch.empty(num_rows, out_size, dtype=x.dtype, device=x.device)
    most_tiles = triton.cdiv(num_rows + min(count, num_rows) * (config.rows - 1), config.rows)
    _multiply_rows[(most_tiles, triton.cdiv(out_size, config.outputs))](
        x.contiguous(),
        weight.values,
        weight.scales,
        weight.minimums,
        bias,
        out,
        rows.starts,
        rows.sources,
        out_size,
        in_size,
        EXPERTS=count,
        EXPERT_BLOCK=max(triton.next_power_of_2(count), 2),
        ROWS=config.rows,
        OUTPUTS=config.outputs,
        INPUTS=config.inputs,
        IS_EVEN=in_size % config.inputs == 0,
        GROUP=weight.group,
        IS_PACKED=weight.is_packed,
        TABLE=packed_table(weight.table),
        UPCAST=IS_INTERPRETED,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **dependent_launch(),
    )
    return out


@triton.jit
def _multiply_rows(
    x_ptr,
    weight_ptr,
    scales_ptr,
    minimums_ptr,
    bias_ptr,
    out_ptr,
    starts_ptr,
    sources_ptr,
    out_size,
    in_size,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    IS_PACKED: tl.constexpr,
    TABLE: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows vary fastest: programs share a tile of the weight in the cache."""
    await_previous(PDL)
    tile = tl.program_id(0)
    number = tl.arange(0, EXPERT_BLOCK)
    start = tl.load(starts_ptr + tl.minimum(number, EXPERTS))
    end = tl.load(starts_ptr + tl.minimum(number + 1, EXPERTS))
    tiles = (end - start + ROWS - 1) // ROWS
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)  # EXPERT_BLOCK beyond the last tile
    first_tile = tl.sum(tl.where(number < expert, tiles, 0), 0)
    row = tl.sum(tl.where(number == expert, start, 0), 0) + (tile - first_tile) * ROWS + tl.arange(0, ROWS)
    end_row = tl.sum(tl.where(number == expert, end, 0), 0)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    # Beyond the last row and output the last one is read again, so that loads need no mask; it is not stored.
    read_row = tl.maximum(tl.minimum(row, end_row - 1), 0).to(tl.int64)
    if sources_ptr is not None:
        read_row = tl.load(sources_ptr + read_row).to(tl.int64)
    read_output = tl.minimum(expert, EXPERTS - 1).to(tl.int64) * out_size + tl.minimum(output, out_size - 1)
    row_ptr = x_ptr + read_row[:, None] * in_size
    dtype: tl.constexpr = tl.float32 if UPCAST else x_ptr.dtype.element_ty
    scale = None
    if scales_ptr is not None and GROUP == 0:
        scale = tl.load(scales_ptr + read_output)[:, None]
    total = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    for first in range(0, tl.where(end_row > 0, in_size, 0), INPUTS):
        total = add_product(
            total,
            row_ptr,
            weight_ptr,
            scales_ptr,
            minimums_ptr,
            scale,
            *(read_output, first, in_size, 0.0, 0.0, dtype),
            *(INPUTS, GROUP, IS_PACKED, TABLE, IS_EVEN, "", False),
        )
    if bias_ptr is not None:
        total += tl.load(bias_ptr + read_output).to(tl.float32)[:, None]
    place = out_ptr + row.to(tl.int64)[None, :] * out_size + output[:, None]
    inside = (row < end_row)[None, :] & (output < out_size)[:, None]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=inside)


def weigh(outputs: Tensor, places: Tensor, weights: Tensor, shared: Tensor | None, gates: Tensor | None) -> Tensor:
    """The weighted sums of each row's outputs, in the order of its choices, and of what all rows share.

    outputs         [rows * chosen, size]
    places          [rows, chosen] int32, which output is that of a choice; weights [rows, chosen] float32
    shared, gates   as in `Experts`
    return          [rows, size], the dtype of outputs
    """
    rows, chosen = places.shape
    size = outputs.shape[1]
    out = torch.empty(rows, size, dtype=outputs.dtype, device=outputs.device)
    _weigh[(rows, triton.cdiv(size, SUMMED))](
        outputs,
        places,
        weights.contiguous(),
        shared,
        gates,
        out,
        size,
        CHOSEN=chosen,
        BLOCK=SUMMED,
        num_warps=4,
        **dependent_launch(),
    )
    return out


@triton.jit
def _weigh(
    outputs_ptr,
    places_ptr,
    weights_ptr,
    shared_ptr,
    gates_ptr,
    out_ptr,
    size,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for rank in range(CHOSEN):
        place = tl.load(places_ptr + row * CHOSEN + rank).to(tl.int64)
        output = tl.load(outputs_ptr + place * size + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + row * CHOSEN + rank) * output
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
        if gates_ptr is not None:
            shared = shared / (1 + tl.exp(-tl.load(gates_ptr + row)))
        total += shared
    tl.store(out_ptr + row * size + column, total.to(out_ptr.dtype.element_ty), mask=inside)

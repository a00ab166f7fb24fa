"""The activations of feed-forward layers on a GPU; a program handles a part of a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activate import Activation
from .configs import tuned
from .dependent_launch import await_previous, dependent_launch


@dataclass(frozen=True, slots=True)
class Config:
    block: int
    num_warps: int


DEFAULT = Config(block=1024, num_warps=4)


def activate_triton(x: Tensor, activation: Activation) -> Tensor:
    """`activate` in one pass."""
    rows, width = x.shape
    size = width // activation.width
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if rows:
        config = tuned("activate", f"{size}", DEFAULT)
        _, _, first, second = activation.numbers
        _activate[(rows, triton.cdiv(size, config.block))](
            x.contiguous(),
            out,
            first,
            second,
            SIZE=size,
            BLOCK=config.block,
            FUNCTION=activation.function,
            IS_GATED=activation.is_gated,
            num_warps=config.num_warps,
            **dependent_launch(),
        )
    return out


@triton.jit
def apply(x, first, second, FUNCTION: tl.constexpr):
    """The function of float32, with its parameters."""
    if FUNCTION == "silu":
        return x / (1 + tl.exp(-x))
    elif FUNCTION == "gelu_tanh":
        return x / (1 + tl.exp(-1.5957691216 * (x + 0.044715 * x * x * x)))
    elif FUNCTION == "gelu":
        return 0.5 * x * (1 + tl.erf(0.70710678118 * x))
    elif FUNCTION == "relu":
        return tl.where(x < 0, 0.0, x)
    elif FUNCTION == "relu2":
        return tl.where(x < 0, 0.0, x * x)
    elif FUNCTION == "clamped_silu":
        low = tl.where(x > first, first, x)
        return low / (1 + tl.exp(-1.702 * low))
    else:
        tl.static_assert(FUNCTION == "xielu")
        below = tl.exp(tl.where(x > -1e-6, -1e-6, x)) - 1 - x
        return tl.where(x > 0, first * x * x, second * below) + 0.5 * x


@triton.jit
def gate(gate_value, up, first, second, FUNCTION: tl.constexpr):
    """function(gate) · up, of float32."""
    if FUNCTION == "clamped_silu":
        up = tl.where(up > first, first, tl.where(up < -first, -first, up)) + 1
    return apply(gate_value, first, second, FUNCTION) * up


@triton.jit
def _activate(
    x_ptr,
    out_ptr,
    first,
    second,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    FUNCTION: tl.constexpr,
    IS_GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    place = x_ptr + row * (2 if IS_GATED else 1) * SIZE + columns
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if IS_GATED:
        up = tl.load(place + SIZE, mask=inside, other=0.0).to(tl.float32)
        value = gate(value, up, first, second, FUNCTION)
    else:
        value = apply(value, first, second, FUNCTION)
    tl.store(out_ptr + row * SIZE + columns, value.to(out_ptr.dtype.element_ty), mask=inside)

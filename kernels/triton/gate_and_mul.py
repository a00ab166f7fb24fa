"""The gated activation on a GPU; a program handles a part of a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gate_and_mul import Activation
from .configs import tuned
from .dependent_launch import await_previous, dependent_launch


@dataclass(frozen=True, slots=True)
class Config:
    block: int
    num_warps: int


DEFAULT = Config(block=1024, num_warps=4)


def gate_and_mul_triton(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """`gate_and_mul` in one pass."""
    rows, width = gate_up.shape
    size = width // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        config = tuned("gate_and_mul", f"{size}", DEFAULT)
        _gate_and_mul[(rows, triton.cdiv(size, config.block))](
            gate_up.contiguous(),
            out,
            SIZE=size,
            BLOCK=config.block,
            ACTIVATION=activation,
            num_warps=config.num_warps,
            **dependent_launch(),
        )
    return out


@triton.jit
def gate(gate_value, up, ACTIVATION: tl.constexpr):
    """activation(gate) · up, of float32."""
    if ACTIVATION == "silu":
        exponent = gate_value
    else:
        exponent = 1.5957691216 * (gate_value + 0.044715 * gate_value * gate_value * gate_value)
    return gate_value / (1 + tl.exp(-exponent)) * up


@triton.jit
def _gate_and_mul(
    gate_up_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr
):
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gate_ptr = gate_up_ptr + row * 2 * SIZE + columns
    gate_value = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + SIZE, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + columns, gate(gate_value, up, ACTIVATION).to(out_ptr.dtype.element_ty), mask=inside)

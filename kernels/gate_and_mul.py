"""The gated activations of feed-forward layers."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from torch import Tensor
from torch.nn import functional

from .native_module import DTYPES, native, takes
from .recording import empty

Activation: TypeAlias = Literal["", "silu", "gelu"]  # "": no gate. gelu: its approximation by tanh
ACTIVATIONS: tuple[Activation, ...] = ("", "silu", "gelu")  # by their numbers in compiled code


def gate_and_mul(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """silu(gate) · up, or gelu(gate) · up (SwiGLU, GeGLU; Shazeer, 2020).

    gate_up  [num_tokens, 2 * ffn]: gate in the first half of each row, up in the second
    return   [num_tokens, ffn], gate_up's dtype; computed in float32
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1 + (-_exponent(gate, activation)).exp()) * up).to(gate_up.dtype)


def gate_and_mul_cpu(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """`gate_and_mul` without a float32 copy of its input: the activation is rounded before it is multiplied."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")).mul_(up)


def gate_and_mul_native(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """`gate_and_mul` in one pass."""
    if native is None or not takes(gate_up):
        return gate_and_mul_cpu(gate_up, activation)
    rows, width = gate_up.shape
    size, number = width // 2, ACTIVATIONS.index(activation)
    out = empty(rows, size, dtype=gate_up.dtype)
    native.gate_and_mul(DTYPES[gate_up.dtype], gate_up.data_ptr(), out.data_ptr(), rows, size, number)
    return out


def _exponent(gate: Tensor, activation: Activation) -> Tensor:
    """Both are gate / (1 + exp(-x)): x is gate in silu, and 2 √(2 / π) (gate + 0.044715 gate³) in gelu by tanh."""
    return gate if activation == "silu" else 2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)

"""The gated activation of a Llama feed-forward layer."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from .native_module import DTYPES, native, takes
from .recording import empty


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) · up (SwiGLU; Shazeer, 2020).

    gate_up  [num_tokens, 2 * ffn]: gate in the first half of each row, up in the second
    return   [num_tokens, ffn], gate_up's dtype; computed in float32
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1 + (-gate).exp()) * up).to(gate_up.dtype)


def silu_and_mul_cpu(gate_up: Tensor) -> Tensor:
    """`silu_and_mul` without a float32 copy of its input: silu(gate) is rounded before it is multiplied."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def silu_and_mul_native(gate_up: Tensor) -> Tensor:
    """`silu_and_mul` in one pass."""
    if native is None or not takes(gate_up):
        return silu_and_mul_cpu(gate_up)
    rows, width = gate_up.shape
    size = width // 2
    out = empty(rows, size, dtype=gate_up.dtype)
    native.silu_and_mul(DTYPES[gate_up.dtype], gate_up.data_ptr(), out.data_ptr(), rows, size)
    return out

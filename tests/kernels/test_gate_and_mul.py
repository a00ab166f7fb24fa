from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pagoda_server.kernels.gate_and_mul import gate_and_mul, gate_and_mul_cpu, gate_and_mul_native
from tests.kernels.backends import INSTRUCTION_SETS, with_instruction_set

IMPLEMENTATIONS = [
    gate_and_mul,
    gate_and_mul_cpu,
    *(with_instruction_set(name, gate_and_mul_native) for name in INSTRUCTION_SETS),
]


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 80), (0, 4)])
def test_gate_and_mul_gates_the_second_half_by_the_first(
    op: Callable[..., Tensor], dtype: torch.dtype, activation: str, shape: tuple[int, int]
) -> None:
    tokens, ffn = shape
    gate_up = (torch.randn(tokens, 2 * ffn) * 4).to(dtype)
    gate, up = gate_up.double()[:, :ffn], gate_up.double()[:, ffn:]
    activated = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    expected = activated * up
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(op(gate_up, activation).double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_gate_and_mul_leaves_its_input_alone(op: Callable[[Tensor], Tensor]) -> None:
    gate_up = torch.randn(3, 8)
    before = gate_up.clone()
    op(gate_up)
    assert torch.equal(gate_up, before)

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pagoda_server.kernels.silu_and_mul import silu_and_mul, silu_and_mul_cpu, silu_and_mul_native
from tests.kernels.backends import INSTRUCTION_SETS, with_instruction_set

IMPLEMENTATIONS = [
    silu_and_mul,
    silu_and_mul_cpu,
    *(with_instruction_set(name, silu_and_mul_native) for name in INSTRUCTION_SETS),
]


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 80), (0, 4)])
def test_silu_and_mul_gates_the_second_half_by_the_first(
    op: Callable[[Tensor], Tensor], dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    tokens, ffn = shape
    gate_up = (torch.randn(tokens, 2 * ffn) * 4).to(dtype)
    gate, up = gate_up.double()[:, :ffn], gate_up.double()[:, ffn:]
    expected = gate * torch.sigmoid(gate) * up
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(op(gate_up).double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_silu_and_mul_leaves_its_input_alone(op: Callable[[Tensor], Tensor]) -> None:
    gate_up = torch.randn(3, 8)
    before = gate_up.clone()
    op(gate_up)
    assert torch.equal(gate_up, before)

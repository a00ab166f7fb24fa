from __future__ import annotations

import pytest
import torch

from kernels.backend import Backend
from tests.kernels.backends import BACKENDS


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 80), (0, 4)])
def test_silu_and_mul_gates_the_second_half_by_the_first(
    backend: Backend, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    tokens, ffn = shape
    gate_up = (torch.randn(tokens, 2 * ffn) * 4).to(dtype)
    gate, up = gate_up.double()[:, :ffn], gate_up.double()[:, ffn:]
    expected = gate * torch.sigmoid(gate) * up
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(backend.silu_and_mul(gate_up).double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_silu_and_mul_leaves_its_input_alone(backend: Backend) -> None:
    gate_up = torch.randn(3, 8)
    before = gate_up.clone()
    backend.silu_and_mul(gate_up)
    assert torch.equal(gate_up, before)

from __future__ import annotations

import pytest
import torch

from pagoda_server.kernels.triton.gate_and_mul import gate_and_mul_triton
from tests.kernels.triton.device import DEVICE

pytestmark = pytest.mark.simulated

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 7), (5, 80), (2, 1536), (1, 14336), (0, 4)])
def test_the_second_half_is_gated_by_the_first(dtype: torch.dtype, rows: int, size: int) -> None:
    gate_up = (torch.randn(rows, 2 * size, device=DEVICE) * 4).to(dtype)
    before = gate_up.clone()
    gate, up = gate_up.double().chunk(2, dim=-1)
    gated = gate_and_mul_triton(gate_up)
    assert gated.dtype == dtype
    assert torch.equal(gate_up, before)
    expected = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(gated.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_gates_far_from_zero_neither_overflow_nor_vanish() -> None:
    gate_up = torch.tensor([[-1000.0, -90.0, 1000.0, torch.nan, 2.0, 2.0, 2.0, 2.0]], device=DEVICE)
    gated = gate_and_mul_triton(gate_up)[0].tolist()
    assert gated[:3] == [0.0, pytest.approx(0.0, abs=1e-30), 2000.0]
    assert gated[3] != gated[3]

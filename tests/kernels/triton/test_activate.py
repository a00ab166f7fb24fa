from __future__ import annotations

import pytest
import torch

from pagoda_server.kernels.activate import FUNCTIONS, SWIGLU, Activation, Function
from pagoda_server.kernels.linear import Use
from pagoda_server.kernels.triton.activate import activate_triton
from pagoda_server.kernels.triton.linear import linear_int8_weight_triton
from tests.kernels.products import PARAMETERS
from tests.kernels.test_activate import exact
from tests.kernels.triton.device import DEVICE

pytestmark = [pytest.mark.simulated, pytest.mark.filterwarnings("ignore:overflow encountered in exp")]

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 7), (5, 80), (2, 1536), (1, 14336), (0, 4)])
def test_the_second_half_is_gated_by_the_first(dtype: torch.dtype, rows: int, size: int) -> None:
    gate_up = (torch.randn(rows, 2 * size, device=DEVICE) * 4).to(dtype)
    before = gate_up.clone()
    gated = activate_triton(gate_up, SWIGLU)
    assert gated.dtype == dtype
    assert torch.equal(gate_up, before)
    torch.testing.assert_close(gated.double(), exact(gate_up, SWIGLU), atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("is_gated", [False, True])
def test_every_activation_follows_its_formula_alone_and_in_a_product(function: Function, is_gated: bool) -> None:
    activation = Activation(function, is_gated, PARAMETERS.get(function, ()))
    x = torch.randn(3, activation.width * 80, device=DEVICE) * 4
    expected = exact(x, activation)
    torch.testing.assert_close(activate_triton(x, activation).double(), expected, atol=1e-5, rtol=1e-5)
    weight = torch.eye(80, device=DEVICE)  # which int8 holds exactly
    for is_deterministic in (False, True):
        product = linear_int8_weight_triton(weight, None, Use(activation, is_deterministic=is_deterministic))
        torch.testing.assert_close(product(x).double(), expected, atol=1e-5, rtol=1e-5)


def test_gates_far_from_zero_neither_overflow_nor_vanish() -> None:
    gate_up = torch.tensor([[-1000.0, -90.0, 1000.0, torch.nan, 2.0, 2.0, 2.0, 2.0]], device=DEVICE)
    gated = activate_triton(gate_up, SWIGLU)[0].tolist()
    assert gated[:3] == [0.0, pytest.approx(0.0, abs=1e-30), 2000.0]
    assert gated[3] != gated[3]

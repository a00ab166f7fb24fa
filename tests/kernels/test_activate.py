from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pagoda_server.kernels.activate import (
    FUNCTIONS,
    SWIGLU,
    Activation,
    Function,
    activate,
    activate_cpu,
    activate_native,
)
from pagoda_server.kernels.backend import NATIVE, Backend
from pagoda_server.kernels.linear import Use
from tests.kernels.backends import BACKENDS, INSTRUCTION_SETS, with_instruction_set
from tests.kernels.products import PARAMETERS

IMPLEMENTATIONS = [
    activate,
    activate_cpu,
    *(with_instruction_set(name, activate_native) for name in INSTRUCTION_SETS),
]


def exact(x: Tensor, activation: Activation) -> Tensor:
    """The activation in float64, by the formulas of the papers."""
    x = x.double()
    gate, up = x.chunk(2, dim=-1) if activation.is_gated else (x, torch.ones(()))
    first, second = (*activation.parameters, 0.0, 0.0)[:2]
    if activation.function == "clamped_silu" and activation.is_gated:
        up = up.clamp(-first, first) + 1
    low = gate.clamp(max=first)
    return (
        up
        * {
            "silu": gate * torch.sigmoid(gate),
            "gelu_tanh": functional.gelu(gate, approximate="tanh"),
            "gelu": gate * torch.special.ndtr(gate),
            "relu": gate.clamp(min=0),
            "relu2": gate.clamp(min=0) ** 2,
            "clamped_silu": low * torch.sigmoid(1.702 * low),
            "xielu": torch.where(gate > 0, first * gate**2, second * (gate.clamp(max=-1e-6).expm1() - gate)) + gate / 2,
        }[activation.function]
    )


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 80), (0, 4)])
def test_activations_follow_their_formulas(
    op: Callable[..., Tensor], dtype: torch.dtype, function: Function, is_gated: bool, shape: tuple[int, int]
) -> None:
    activation = Activation(function, is_gated, PARAMETERS.get(function, ()))
    tokens, ffn = shape
    x = (torch.randn(tokens, activation.width * ffn) * 4).to(dtype)
    result = op(x, activation)
    assert result.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    if function == "clamped_silu" and op is activate_cpu and dtype == torch.bfloat16:
        tolerance = 5e-2  # up + 1 is rounded, too
    torch.testing.assert_close(result.double(), exact(x, activation), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_activations_keep_what_is_not_a_number_and_bear_large_numbers(
    op: Callable[..., Tensor], function: Function
) -> None:
    activation = Activation(function, is_gated=False, parameters=PARAMETERS.get(function, ()))
    x = torch.tensor([[torch.nan, 2000.0, -2000.0, 89.0, -89.0, -0.0, 1e-20] + 10 * [1.0]])
    got, want = op(x, activation), exact(x, activation)
    assert got[0, 0].isnan()
    torch.testing.assert_close(got[:, 1:].double(), want[:, 1:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_activate_leaves_its_input_alone(op: Callable[[Tensor, Activation], Tensor]) -> None:
    gate_up = torch.randn(3, 8)
    before = gate_up.clone()
    op(gate_up, SWIGLU)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("is_gated", [False, True])
def test_every_product_applies_every_activation(backend: Backend, function: Function, is_gated: bool) -> None:
    activation = Activation(function, is_gated, PARAMETERS.get(function, ()))
    x, weight, bias = torch.randn(3, activation.width * 72), torch.randn(33, 72) / 9, torch.randn(33)
    want = functional.linear(exact(x, activation), weight.double(), bias.double())
    for format, make in backend.makers.items():
        if format == "int8-weight" and backend.name.startswith(NATIVE.name):
            continue  # only with AMX, in test_linear_int8_weight.py
        got = make(weight, bias, Use(activation))(x).double()
        bound = 1e-5 if format == "unquantized" else 0.1 if format == "fp8" else 0.03
        assert (got - want).norm() < bound * want.norm(), format

"""The activations of feed-forward layers, gated or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from .native_module import DTYPES, native, takes
from .recording import empty

Function: TypeAlias = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2", "clamped_silu", "xielu"]
# By their numbers in compiled code, where 0 stands for no activation.
FUNCTIONS: tuple[Function, ...] = ("silu", "gelu_tanh", "gelu", "relu", "relu2", "clamped_silu", "xielu")


@dataclass(frozen=True, slots=True)
class Activation:
    """function(gate) · up, or function(x) of a layer that has no gate.

    function      silu; gelu, and its approximation by tanh; relu and its square (So et al., 2021);
                  clamped_silu: g · sigmoid(1.702 g) with g = min(gate, limit), and up + 1 within ± limit as its factor;
                  xielu: αₚ x² + x / 2 for positive x, otherwise αₙ (eˣ - 1 - x) + x / 2 (Huang & Schlag, 2024)
    is_gated      the first half of a row is the gate, and the other half is up (Shazeer, 2020)
    parameters    limit of clamped_silu; αₚ and αₙ of xielu; else none
    """

    function: Function
    is_gated: bool = True
    parameters: tuple[float, ...] = ()

    @property
    def width(self) -> int:
        """How many numbers of a row become one."""
        return 2 if self.is_gated else 1

    @property
    def numbers(self) -> tuple[int, int, float, float]:
        """What compiled code takes: the function's number, whether it is gated, and two parameters."""
        first, second = (*self.parameters, 0.0, 0.0)[:2]
        return FUNCTIONS.index(self.function) + 1, int(self.is_gated), first, second


SWIGLU = Activation("silu")
NO_ACTIVATION = (0, 0, 0.0, 0.0)  # in place of `Activation.numbers`


def activate(x: Tensor, activation: Activation) -> Tensor:
    """function(gate) · up, or function(x).

    x       [num_tokens, width * ffn]
    return  [num_tokens, ffn], x's dtype; computed in float32
    """
    return activate_cpu(x.float(), activation).to(x.dtype)


def activate_cpu(x: Tensor, activation: Activation) -> Tensor:
    """`activate` without a float32 copy of its input: the function's result is rounded before it is multiplied."""
    function = _FORMULAS[activation.function]
    if not activation.is_gated:
        return function(x, *activation.parameters)
    gate, up = x.chunk(2, dim=-1)
    if activation.function == "clamped_silu":
        (limit,) = activation.parameters
        up = up.clamp(-limit, limit) + 1
    return function(gate, *activation.parameters).mul_(up)


def activate_native(x: Tensor, activation: Activation) -> Tensor:
    """`activate` in one pass."""
    if native is None or not takes(x):
        return activate_cpu(x, activation)
    rows, width = x.shape
    size = width // activation.width
    out = empty(rows, size, dtype=x.dtype)
    native.activate(DTYPES[x.dtype], x.data_ptr(), out.data_ptr(), rows, size, *activation.numbers)
    return out


def _clamped_silu(x: Tensor, limit: float) -> Tensor:
    x = x.clamp(max=limit)
    return x * torch.sigmoid(1.702 * x)


def _xielu(x: Tensor, positive: float, negative: float) -> Tensor:
    below = negative * (x.clamp(max=-1e-6).expm1() - x)
    return torch.where(x > 0, positive * x * x, below) + 0.5 * x


_FORMULAS: Mapping[Function, Callable[..., Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "gelu": functional.gelu,
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "clamped_silu": _clamped_silu,
    "xielu": _xielu,
}

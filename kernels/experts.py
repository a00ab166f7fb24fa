"""Expert layers: each row is computed by the few experts that a router chose for it.

Only the weights of chosen experts are read. Rows of one expert are computed together, and a row's experts are added up
in the order in which they were chosen, so that a row's bits depend on no other row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from .linear import ExpertRows, Linear, LinearMaker, NativeLinear, NativeLinears, Use
from .native_module import DTYPES, native, takes
from .recording import empty, is_recording
from .route import Routes


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of one expert, down(activation(gate(x)) · up(x)), in any format that a LinearMaker takes.

    gate_up  [2 * ffn, hidden]    gate_up_bias  [2 * ffn] or None
    down     [hidden, ffn]        down_bias     [hidden] or None
    """

    gate_up: Any
    gate_up_bias: Tensor | None
    down: Any
    down_bias: Tensor | None


class Experts(Protocol):
    """Maps x [rows, hidden] to the weighted sums of its experts' outputs, [rows, hidden] in x's dtype.

    shared  [rows, hidden], x's dtype: added to the sums, the output of an expert that computes all rows; or None
    gates   [rows, 1] float32: shared rows are multiplied by their sigmoid; or None
    """

    def __call__(
        self, x: Tensor, routes: Routes, shared: Tensor | None = None, gates: Tensor | None = None, /
    ) -> Tensor: ...


class ExpertsMaker(Protocol):
    """Makes an expert layer.

    make     makes the products of the weights' format
    weights  of experts 0, 1, …, all of the same sizes; taken one by one, so that each can be packed before the next
    count    of experts
    use      what the second product is for, with its activation
    """

    def __call__(self, make: LinearMaker, weights: Iterable[ExpertWeights], count: int, use: Use, /) -> Experts: ...


@dataclass(frozen=True, slots=True)
class _OneByOne:
    """Products of an expert after the other, in any format."""

    products: list[tuple[Linear, Linear]]

    def __call__(
        self, x: Tensor, routes: Routes, shared: Tensor | None = None, gates: Tensor | None = None, /
    ) -> Tensor:
        assert not is_recording()
        outputs = torch.empty(*routes.experts.shape, x.shape[1], dtype=x.dtype, device=x.device)
        for expert in routes.experts.unique().tolist():
            rows, ranks = torch.where(routes.experts == expert)
            gate_up, down = self.products[expert]
            outputs[rows, ranks] = down(gate_up(x[rows]))
        total = torch.zeros_like(x, dtype=torch.float32)
        for rank in range(outputs.shape[1]):
            total += routes.weights[:, rank, None] * outputs[:, rank].float()
        if shared is not None:
            total += shared.float() if gates is None else gates.sigmoid() * shared.float()
        return total.to(x.dtype)


def experts(make: LinearMaker, weights: Iterable[ExpertWeights], count: int, use: Use) -> Experts:
    """An expert layer of products that are made one by one."""
    return _OneByOne([_products(make, each, use) for each in weights])


def _products(make: LinearMaker, weights: ExpertWeights, use: Use) -> tuple[Linear, Linear]:
    plain = Use(is_deterministic=use.is_deterministic)
    return make(weights.gate_up, weights.gate_up_bias, plain), make(weights.down, weights.down_bias, use)


@dataclass(frozen=True, slots=True)
class _NativeExperts:
    gate_up: NativeLinears
    down: NativeLinears
    count: int

    def __call__(
        self, x: Tensor, routes: Routes, shared: Tensor | None = None, gates: Tensor | None = None, /
    ) -> Tensor:
        assert native is not None
        assert takes(x)
        rows, chosen = routes.experts.shape
        starts = empty(self.count + 1, dtype=torch.int32)
        sources, places = (empty(rows * chosen, dtype=torch.int32) for _ in range(2))
        addresses = (each.data_ptr() for each in (routes.experts, starts, sources, places))
        native.group_rows(*addresses, rows, chosen, self.count)
        outputs = self.down.of_rows(self.gate_up.of_rows(x, ExpertRows(starts, sources)), ExpertRows(starts))
        out = empty(*x.shape, dtype=x.dtype)
        native.weigh_experts(
            DTYPES[x.dtype],
            outputs.data_ptr(),
            places.data_ptr(),
            routes.weights.data_ptr(),
            0 if shared is None else shared.data_ptr(),
            0 if gates is None else gates.data_ptr(),
            out.data_ptr(),
            rows,
            chosen,
            x.shape[1],
        )
        return out


def experts_native(make: LinearMaker, weights: Iterable[ExpertWeights], count: int, use: Use) -> Experts:
    """`experts` by compiled code, in each format of which NativeLinear has products.

    Unquantized products too: how many rows an expert has changes with every step, and oneDNN would compile code for
    each number.
    """
    use = Use(use.activation, is_deterministic=True)
    products = (_products(make, each, use) for each in weights)
    gate_up, down = first = next(products)
    if not isinstance(gate_up, NativeLinear) or not isinstance(down, NativeLinear):
        return _OneByOne([first, *products])
    layer = _NativeExperts(NativeLinears(gate_up, count), NativeLinears(down, count), count)
    del gate_up, down
    for number, (gate_up, down) in enumerate(chain([first], products)):
        assert isinstance(gate_up, NativeLinear)
        assert isinstance(down, NativeLinear)
        layer.gate_up.put(number, gate_up)
        layer.down.put(number, down)
    return layer

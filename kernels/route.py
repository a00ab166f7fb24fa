"""Routers of expert layers: which experts compute a token, and how their outputs are weighed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .native_module import native
from .recording import empty


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router chooses `chosen` of `num_experts` experts.

    score          makes scores from logits: softmax over all experts, or the sigmoid of each
    is_normalized  weights are divided by their sum, or by `least_sum` if that is greater
    scale          what weights are multiplied by
    groups         experts are in groups of neighbours, of which only `chosen_groups` take part: those whose two best
                   scores have the greatest sums (DeepSeek-AI, 2024, arXiv:2412.19437)
    """

    num_experts: int
    chosen: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    is_normalized: bool = True
    scale: float = 1.0
    least_sum: float = 1e-20
    groups: int = 1
    chosen_groups: int = 1


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts of each row, the best first.

    experts  [rows, chosen] int32, all different
    weights  [rows, chosen] float32, of their outputs
    """

    experts: Tensor
    weights: Tensor


def route(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> Routes:
    """Choose the experts with the greatest scores; of equal ones those with the lowest index.

    logits      [rows, num_experts] float32
    correction  [num_experts] float32, added to the scores for the choice but not for the weights
    """
    # In float64, because torch computes what is left of a vector otherwise: a row would depend on those beside it.
    scores = logits.softmax(dim=-1) if routing.score == "softmax" else logits.double().sigmoid().float()
    choice = scores if correction is None else scores + correction
    if routing.chosen_groups < routing.groups:
        in_groups = choice.unflatten(1, (routing.groups, -1))
        sums = in_groups.topk(min(2, in_groups.shape[2]), dim=-1).values.sum(dim=-1)
        left_out = _greatest(sums, routing.groups)[:, routing.chosen_groups :]
        is_out = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, left_out, True)
        choice = in_groups.masked_fill(is_out[..., None], -torch.inf).flatten(1)
    experts = _greatest(choice, routing.chosen)
    weights = scores.gather(1, experts)
    if routing.is_normalized:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=routing.least_sum)
    return Routes(experts.int(), weights * routing.scale)


def _greatest(values: Tensor, count: int) -> Tensor:
    """The indexes of the greatest values of each row; of equal ones the first comes first, unlike in topk."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def route_native(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> Routes:
    """`route` by compiled code."""
    if native is None:
        return route(logits, routing, correction)
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    rows = len(logits)
    routes = Routes(empty(rows, routing.chosen, dtype=torch.int32), empty(rows, routing.chosen, dtype=torch.float32))
    native.route(
        logits.data_ptr(),
        0 if correction is None else correction.data_ptr(),
        routes.experts.data_ptr(),
        routes.weights.data_ptr(),
        rows,
        routing.num_experts,
        routing.chosen,
        routing.groups,
        routing.chosen_groups,
        routing.score == "sigmoid",
        routing.is_normalized,
        routing.scale,
        routing.least_sum,
    )
    return routes

"""Routers: the reference against plain arithmetic in float64, and every backend against the reference."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from pagoda_server.kernels import Backend, Routing
from pagoda_server.kernels.route import route
from tests.kernels.backends import BACKENDS

ROUTINGS = [
    Routing(5, 2),
    Routing(1, 1),
    Routing(128, 8, is_normalized=False),
    Routing(7, 7, scale=2.5),
    Routing(9, 3, "sigmoid"),
    Routing(12, 4, "sigmoid", scale=1.5, groups=4, chosen_groups=2),
    Routing(6, 2, "sigmoid", is_normalized=False, groups=6, chosen_groups=3),
    Routing(16, 2, groups=2, chosen_groups=1),
]
all_routings = pytest.mark.parametrize("routing", ROUTINGS, ids=str)
all_backends = pytest.mark.parametrize("backend", BACKENDS, ids=str)


def by_hand(logits: list[float], routing: Routing, correction: list[float]) -> dict[int, float]:
    """The chosen experts with their weights."""
    if routing.score == "sigmoid":
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    else:
        total = sum(map(math.exp, logits))
        scores = [math.exp(logit) / total for logit in logits]
    choice = [score + more for score, more in zip(scores, correction, strict=True)]
    size = routing.num_experts // routing.groups
    groups = [list(range(first, first + size)) for first in range(0, routing.num_experts, size)]
    best = sorted(groups, key=lambda group: -sum(sorted((choice[i] for i in group), reverse=True)[:2]))
    allowed = itertools.chain(*best[: routing.chosen_groups])
    chosen = sorted(sorted(allowed), key=lambda i: -choice[i])[: routing.chosen]
    divisor = sum(scores[i] for i in chosen) if routing.is_normalized else 1.0
    return {i: scores[i] / divisor * routing.scale for i in chosen}


@all_backends
@all_routings
@pytest.mark.parametrize("is_corrected", [False, True])
def test_the_best_experts_are_chosen_and_weighed(backend: Backend, routing: Routing, is_corrected: bool) -> None:
    logits, correction = torch.randn(23, routing.num_experts) * 2, torch.randn(routing.num_experts)
    routes = backend.route(logits, routing, correction if is_corrected else None)
    assert routes.experts.dtype == torch.int32
    assert routes.weights.dtype == torch.float32
    corrections = (correction if is_corrected else torch.zeros_like(correction)).tolist()
    for row, experts, weights in zip(logits.tolist(), routes.experts.tolist(), routes.weights.tolist(), strict=True):
        expected = by_hand(row, routing, corrections)
        assert experts == list(expected)
        assert weights == pytest.approx(list(expected.values()), rel=1e-5)


@all_backends
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_of_equal_scores_the_first_is_chosen(backend: Backend, score: str) -> None:
    logits = torch.tensor([[1.0] * 64, [0.0, 2.0] * 32, [0.0] * 63 + [1.0]])
    routes = backend.route(logits, Routing(64, 3, score), None)  # type: ignore[arg-type]
    assert routes.experts.tolist() == [[0, 1, 2], [1, 3, 5], [63, 0, 1]]
    groups = Routing(64, 3, score, groups=8, chosen_groups=1)  # type: ignore[arg-type]
    assert backend.route(logits, groups, None).experts.tolist() == [[0, 1, 2], [1, 3, 5], [63, 56, 57]]


@all_backends
@all_routings
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_row_leaves_the_others_alone_and_chooses_experts_that_exist(
    backend: Backend, routing: Routing, poison: float
) -> None:
    logits = torch.randn(5, routing.num_experts)
    clean = backend.route(logits, routing, None)
    logits[2] = poison
    broken = backend.route(logits, routing, None)
    assert all(len(set(row)) == routing.chosen for row in broken.experts.tolist())
    assert ((broken.experts >= 0) & (broken.experts < routing.num_experts)).all()
    kept = torch.tensor([0, 1, 3, 4])
    assert torch.equal(broken.experts[kept], clean.experts[kept])
    assert torch.equal(broken.weights[kept], clean.weights[kept])


@all_backends
@all_routings
def test_a_row_does_not_depend_on_the_rows_beside_it(backend: Backend, routing: Routing) -> None:
    logits = torch.randn(70, routing.num_experts)
    together = backend.route(logits, routing, None)
    for rows in (slice(0, 1), slice(3, 20), slice(69, 70)):
        alone = backend.route(logits[rows].clone(), routing, None)
        assert torch.equal(alone.experts, together.experts[rows])
        assert torch.equal(alone.weights, together.weights[rows])


def test_no_rows_have_no_experts() -> None:
    logits: Tensor = torch.empty(0, 4)
    assert route(logits, Routing(4, 2)).experts.shape == (0, 2)

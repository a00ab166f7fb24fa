"""Expert layers on a GPU's kernels against products one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagoda_server.kernels import GATED, INT4, UNQUANTIZED, GroupedFormat, load_backend
from pagoda_server.kernels.experts import ExpertWeights, experts
from pagoda_server.kernels.linear import linear
from pagoda_server.kernels.route import Routes
from pagoda_server.kernels.triton.groups import MXFP4
from pagoda_server.kernels.triton.inputs import random_groups
from tests.kernels.test_experts import random_routes, random_weights
from tests.kernels.triton.device import DEVICE

pytestmark = pytest.mark.simulated

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.03}


def on_device(weights: list[ExpertWeights]) -> list[ExpertWeights]:
    def move(part: torch.Tensor | None) -> torch.Tensor | None:
        return None if part is None else part.to(DEVICE)

    return [
        ExpertWeights(move(each.gate_up), move(each.gate_up_bias), move(each.down), move(each.down_bias))
        for each in weights
    ]


def routes_on_device(routes: Routes) -> Routes:
    return Routes(routes.experts.to(DEVICE), routes.weights.to(DEVICE))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("weights_format", [UNQUANTIZED, "int8-weight", "fp8"])
@pytest.mark.parametrize(
    ("rows", "count", "hidden", "ffn", "chosen"),
    [
        (1, 5, 48, 33, 2),
        (7, 3, 130, 40, 3),
        (40, 4, 64, 96, 1),
        (33, 1, 32, 16, 1),
        (0, 2, 16, 16, 1),
        (3, 40, 64, 32, 8),
    ],
)
def test_rows_are_the_weighted_sums_of_their_experts(
    dtype: torch.dtype, weights_format: str, rows: int, count: int, hidden: int, ffn: int, chosen: int
) -> None:
    backend = load_backend("triton", weights_format)
    weights = on_device(random_weights(count, hidden, ffn, has_bias=rows % 2 == 1, dtype=dtype))
    x, shared = (torch.randn(rows, hidden, device=DEVICE).to(dtype) for _ in range(2))
    routes, gates = routes_on_device(random_routes(rows, count, chosen)), torch.randn(rows, 1, device=DEVICE)
    tolerance = TOLERANCES[dtype]
    for rest in ((), (shared,), (shared, gates)):
        out = backend.experts(iter(weights), count, GATED)(x, routes, *rest)
        expected = replace(backend, join=experts).experts(iter(weights), count, GATED)(x, routes, *rest)
        torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


def test_experts_that_no_row_chose_take_no_part() -> None:
    weights = on_device(random_weights(5, 64, 32))
    routes = routes_on_device(Routes(torch.tensor([[0, 3], [3, 0]], dtype=torch.int32), torch.rand(2, 2)))
    x = torch.randn(2, 64, device=DEVICE)
    make = load_backend("triton").experts
    expected = make(iter(weights), 5, GATED)(x, routes)
    for number in (1, 2, 4):
        weights[number].gate_up.fill_(torch.nan)
        weights[number].down.fill_(torch.nan)
    assert torch.equal(make(iter(weights), 5, GATED)(x, routes), expected)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (INT4, INT4),
        (GroupedFormat(table=MXFP4), None),
        (GroupedFormat(bits=8), GroupedFormat(bits=6, group=16)),
    ],
    ids=str,
)
@pytest.mark.parametrize(("rows", "is_deterministic"), [(5, False), (70, True)])
def test_weights_of_experts_stay_in_groups(
    dtype: torch.dtype, first: GroupedFormat, second: GroupedFormat | None, rows: int, is_deterministic: bool
) -> None:
    count, hidden, ffn = 3, 160, 96
    backend = load_backend("triton", "groups", is_deterministic)
    weights = [
        replace(
            each,
            gate_up=random_groups(first, 2 * ffn, hidden, torch.device(DEVICE)),
            down=random_groups(second, hidden, ffn, torch.device(DEVICE)) if second else each.down,
        )
        for each in on_device(random_weights(count, hidden, ffn, has_bias=True, dtype=dtype))
    ]
    x, routes = torch.randn(rows, hidden, device=DEVICE).to(dtype), routes_on_device(random_routes(rows, count, 2))
    out = backend.experts(iter(weights), count, GATED)(x, routes)
    wide = [
        ExpertWeights(
            *(
                part if part is None else (part if isinstance(part, torch.Tensor) else part.dequantize()).double()
                for part in (each.gate_up, each.gate_up_bias, each.down, each.down_bias)
            )
        )
        for each in weights
    ]
    expected = experts(linear, iter(wide), count, GATED)(x.double(), routes)
    assert (out.double() - expected).norm() <= TOLERANCES[dtype] * expected.norm()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_deterministic_row_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    layer = load_backend("triton", is_deterministic=True).experts(
        iter(on_device(random_weights(4, 70, 48, dtype=dtype))), 4, GATED
    )
    x, routes = torch.randn(50, 70, device=DEVICE).to(dtype), routes_on_device(random_routes(50, 4, 2))
    together = layer(x, routes)
    for first, end in ((0, 1), (20, 37), (49, 50)):
        part = Routes(routes.experts[first:end], routes.weights[first:end])
        assert torch.equal(layer(x[first:end], part), together[first:end])

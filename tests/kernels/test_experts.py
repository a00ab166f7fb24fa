"""Expert layers: the reference against float64, compiled code against the reference, and which weights are read."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pagoda_server.kernels import GATED, UNQUANTIZED, Activation, Backend, Recorder, Use, has_native, load_backend
from pagoda_server.kernels.backend import REFERENCE
from pagoda_server.kernels.experts import ExpertWeights
from pagoda_server.kernels.native_module import set_num_threads
from pagoda_server.kernels.route import Routes
from tests.kernels.backends import BACKENDS

compiled = pytest.mark.usefixtures("each_instruction_set")
FORMATS = [UNQUANTIZED, "int8", "int4"]
SHAPES = [(4, 64, 96, 2), (5, 48, 80, 3), (9, 33, 7, 1), (1, 70, 32, 1), (40, 130, 65, 8)]
shapes = pytest.mark.parametrize(("count", "hidden", "ffn", "chosen"), SHAPES)


def random_weights(
    count: int, hidden: int, ffn: int, *, has_bias: bool = False, dtype: torch.dtype = torch.float32
) -> list[ExpertWeights]:
    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape) / shape[-1] ** 0.5).to(dtype)

    return [
        ExpertWeights(
            normal(2 * ffn, hidden),
            normal(2 * ffn) if has_bias else None,
            normal(hidden, ffn),
            normal(hidden) if has_bias else None,
        )
        for _ in range(count)
    ]


def random_routes(rows: int, count: int, chosen: int) -> Routes:
    experts = torch.rand(rows, count).argsort(dim=-1)[:, :chosen].int()
    return Routes(experts, torch.rand(rows, chosen))


def in_float64(x: Tensor, weights: list[ExpertWeights], routes: Routes, activation: str = "silu") -> Tensor:
    def one(row: Tensor, of: ExpertWeights) -> Tensor:
        gate, up = _product(row, of.gate_up, of.gate_up_bias).chunk(2)
        acted = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
        return _product(acted * up, of.down, of.down_bias)

    return torch.stack(
        [
            sum(weight * one(row, weights[expert]) for expert, weight in zip(experts, of_row.double(), strict=True))
            for row, experts, of_row in zip(x.double(), routes.experts.tolist(), routes.weights, strict=True)
        ]
    )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return weight.double() @ x + (0 if bias is None else bias.double())


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@shapes
@pytest.mark.parametrize("rows", [1, 2, 19, 150])
@pytest.mark.parametrize("has_bias", [False, True])
def test_rows_are_the_weighted_sums_of_their_experts(
    backend: Backend, count: int, hidden: int, ffn: int, chosen: int, rows: int, has_bias: bool
) -> None:
    weights, x = random_weights(count, hidden, ffn, has_bias=has_bias), torch.randn(rows, hidden)
    routes = random_routes(rows, count, chosen)
    activation = Activation("gelu_tanh" if has_bias else "silu")
    out = backend.experts(iter(weights), count, Use(activation))(x, routes)
    torch.testing.assert_close(out.double(), in_float64(x, weights, routes, activation.function), atol=2e-5, rtol=1e-5)


@compiled
@pytest.mark.parametrize("weights_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@shapes
@pytest.mark.parametrize("rows", [0, 1, 7, 200])
def test_compiled_experts_are_those_of_the_products_one_by_one(
    weights_format: str, dtype: torch.dtype, count: int, hidden: int, ffn: int, chosen: int, rows: int
) -> None:
    """Each format's product is compared with its own reference elsewhere; experts add nothing but the order of rows."""
    backend = load_backend("native", weights_format, is_deterministic=True)
    weights, x = random_weights(count, hidden, ffn, has_bias=True, dtype=dtype), torch.randn(rows, hidden).to(dtype)
    routes, shared, gates = random_routes(rows, count, chosen), torch.randn_like(x), torch.randn(rows, 1)
    for rest in ((), (shared,), (shared, gates)):
        out = backend.experts(iter(weights), count, GATED)(x, routes, *rest)
        expected = replace(backend, join=REFERENCE.join).experts(iter(weights), count, GATED)(x, routes, *rest)
        tolerance = 1e-5 if dtype == torch.float32 else 0.01
        torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


@compiled
@pytest.mark.parametrize("weights_format", FORMATS)
def test_a_compiled_row_does_not_depend_on_the_rows_beside_it(weights_format: str) -> None:
    backend = load_backend("native", weights_format)
    weights, x = random_weights(6, 64, 96, dtype=torch.bfloat16), torch.randn(203, 64).bfloat16()
    layer, routes = backend.experts(iter(weights), 6, GATED), random_routes(203, 6, 2)
    together = layer(x, routes)
    for first, end in ((0, 1), (100, 101), (0, 2), (7, 40), (50, 203)):
        part = Routes(routes.experts[first:end].clone(), routes.weights[first:end].clone())
        assert torch.equal(layer(x[first:end].clone(), part), together[first:end])


@compiled
@pytest.mark.parametrize("weights_format", FORMATS)
@pytest.mark.parametrize("rows", [1, 60])
def test_threads_do_not_change_a_bit(weights_format: str, rows: int) -> None:
    backend = load_backend("native", weights_format)
    layer = backend.experts(iter(random_weights(6, 64, 96)), 6, GATED)
    x, routes = torch.randn(rows, 64), random_routes(rows, 6, 3)
    set_num_threads(1)
    alone = layer(x, routes)
    try:
        set_num_threads(5)
        assert torch.equal(layer(x, routes), alone)
    finally:
        set_num_threads(1)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_experts_that_no_row_chose_take_no_part(backend: Backend) -> None:
    weights = random_weights(5, 64, 32)
    routes = Routes(torch.tensor([[0, 3], [3, 0]], dtype=torch.int32), torch.rand(2, 2))
    x = torch.randn(2, 64)
    expected = in_float64(x, weights, routes)
    for number in (1, 2, 4):
        weights[number].gate_up.fill_(torch.nan)
        weights[number].down.fill_(torch.nan)
    out = backend.experts(iter(weights), 5, GATED)(x, routes)
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-5)


@compiled
def test_a_recording_reads_the_choices_when_it_is_replayed() -> None:
    backend = load_backend("native", "int8")
    layer = backend.experts(iter(random_weights(6, 64, 96)), 6, GATED)
    x, routes = torch.randn(3, 64), random_routes(3, 6, 2)
    recording = Recorder().record(lambda: layer(x, routes))
    for _ in range(3):
        x.normal_()
        other = random_routes(3, 6, 2)
        routes.experts.copy_(other.experts)
        routes.weights.copy_(other.weights)
        assert recording.replay()
        assert torch.equal(recording.result, layer(x, routes))


@pytest.mark.skipif(not has_native() or sys.platform != "linux", reason="needs compiled code, and mprotect")
@pytest.mark.parametrize("weights_format", FORMATS)
def test_memory_of_experts_that_no_row_chose_is_not_read(weights_format: str) -> None:
    """Their pages are made unreadable: one load from them would kill the process."""
    child = [sys.executable, "-c", f"import {__name__} as test; test.run_with_protected_experts({weights_format!r})"]
    result = subprocess.run(child, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["equal", "-11"], result.stdout + result.stderr


def run_with_protected_experts(weights_format: str) -> None:
    """Print whether rows of readable experts come out the same, and what becomes of a process that reads another."""
    count, hidden, ffn = 8, 256, 192
    layer = load_backend("native", weights_format, is_deterministic=True).experts(
        iter(random_weights(count, hidden, ffn)), count, GATED
    )
    x = torch.randn(4, hidden)
    readable = Routes(torch.tensor([[1, 6]] * 4, dtype=torch.int32), torch.rand(4, 2))
    expected = layer(x, readable)
    for stack in (layer.gate_up, layer.down):  # type: ignore[attr-defined]
        for part in stack.packed:
            if part[0].nbytes >= 2 * mmap.PAGESIZE:  # else it may have no page of its own
                for number in range(count):
                    if number not in (1, 6):
                        _protect(part[number])
    print("equal" if torch.equal(layer(x, readable), expected) else "different", flush=True)
    child = os.fork()
    if child == 0:
        layer(x, Routes(torch.tensor([[1, 0]] * 4, dtype=torch.int32), torch.rand(4, 2)))
        os._exit(0)
    print(-os.WTERMSIG(os.waitpid(child, 0)[1]), flush=True)
    os._exit(0)  # without freeing what cannot be read


def _protect(part: Tensor) -> None:
    """Make the pages that hold nothing but this part unreadable."""
    libc = ctypes.CDLL(None, use_errno=True)
    page = mmap.PAGESIZE
    first, end = -(-part.data_ptr() // page) * page, (part.data_ptr() + part.nbytes) // page * page
    assert end > first
    assert libc.mprotect(ctypes.c_void_p(first), ctypes.c_size_t(end - first), 0) == 0

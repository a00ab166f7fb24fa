"""Products of many rows with a quantized weight, through a widened copy of it, and when they are chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch
from torch import Tensor

from pagoda_server.kernels import Linear
from pagoda_server.kernels.linear_quantized import quantize_to_fp8, quantize_to_int8
from pagoda_server.kernels.triton import linear, linear_dequantized
from pagoda_server.kernels.triton.configs import IS_INTERPRETED
from pagoda_server.kernels.triton.linear import (
    KERNEL_ROWS,
    linear_fp8_weight_triton,
    linear_int8_weight_triton,
)
from pagoda_server.kernels.triton.linear_dequantized import dequantize, multiply_dequantized
from pagoda_server.kernels.triton.product import NO_KERNEL, Config, Weight, multiply
from tests.kernels.products import gated
from tests.kernels.triton.device import DEVICE
from tests.simulated_cuda import SimulatedCuda

pytestmark = pytest.mark.simulated

Prepare = Callable[[Tensor, Tensor | None], Linear]
QUANTIZE = pytest.mark.parametrize("quantize", [quantize_to_int8, quantize_to_fp8], ids=["int8", "fp8"])
TILE = Config(rows=32, outputs=32, inputs=32, splits=2, num_warps=4, num_stages=2)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


@QUANTIZE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("outputs", "in_size"), [(1, 1), (5, 17), (3, 512), (2, 5000)])
def test_a_widened_weight_is_rounded_once(
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]], dtype: torch.dtype, outputs: int, in_size: int
) -> None:
    values, scales = quantize(random(outputs + 3, in_size))
    widened = dequantize(Weight(values, scales), 2, torch.empty(outputs, in_size, dtype=dtype, device=DEVICE))
    expected = (values.float() * scales[:, None])[2 : 2 + outputs].to(dtype)
    truncates = IS_INTERPRETED and dtype == torch.bfloat16  # Triton's interpreter does not round to bfloat16
    torch.testing.assert_close(widened, expected, atol=0, rtol=2**-7 if truncates else 0)


@QUANTIZE
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("outputs", [1, 16, 31, 70, 100])
def test_parts_of_a_weight_give_the_product_of_the_whole_as_the_kernel_for_few_rows_does(
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]],
    has_bias: bool,
    rows: int,
    outputs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, bias = Weight(*quantize(random(70, 48))), random(70) if has_bias else None
    assert weight.scales is not None
    x = random(rows, 48)
    exact = x.double() @ (weight.values.double() * weight.scales.double()[:, None]).T + (0 if bias is None else bias)
    monkeypatch.setattr(linear_dequantized, "SCRATCH_BYTES", outputs * 48 * 4)
    for product in (multiply_dequantized(x, weight, bias), multiply(x, weight, bias, TILE)):
        torch.testing.assert_close(product.double(), exact, atol=1e-4, rtol=1e-4)


@QUANTIZE
def test_both_paths_give_a_row_in_bfloat16_the_same_result_up_to_its_rounding(
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> None:
    weight, x = Weight(*quantize(random(64, 1024))), random(64, 1024, dtype=torch.bfloat16)
    few, many = multiply(x, weight, None, TILE).double(), multiply_dequantized(x, weight, None).double()
    assert (few - many).norm() < 0.004 * few.norm()


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How each product was computed."""
    names: list[str] = []

    def noted(name: str, function: Callable[..., Tensor]) -> None:
        def call(*args: object, **kwargs: object) -> Tensor:
            names.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(linear, function.__name__, call)

    noted("kernel", multiply)
    noted("library", multiply_dequantized)
    return names


@pytest.mark.parametrize("prepare", [linear_int8_weight_triton, linear_fp8_weight_triton])
def test_more_rows_than_the_estimate_are_multiplied_by_the_library(prepare: Prepare, chosen: list[str]) -> None:
    product = prepare(random(24, 16), None)
    for rows in (0, 1, 128, KERNEL_ROWS, KERNEL_ROWS + 1, 1000):
        assert product(random(rows, 16)).shape == (rows, 24)
    assert chosen == ["kernel"] * 4 + ["library"] * 2


def test_measurements_replace_the_estimate(table: dict[str, dict[str, dict[str, int]]], chosen: list[str]) -> None:
    table["linear_int8_weight"] = {"32x16x24 float32": asdict(NO_KERNEL), "1024x16x24 float32": asdict(TILE)}
    weight = random(24, 16)
    plain, fused = linear_int8_weight_triton(weight, None), gated(linear_int8_weight_triton)(weight, None)
    for rows in (16, 17, 32, 33, 512, 513):
        plain(random(rows, 16))
    assert chosen == ["kernel", "library", "library", "kernel", "library", "kernel"]
    fused(random(20, 32))
    assert chosen[-1] == "library", "more rows than gates are fused for"


@pytest.mark.skipif(not IS_INTERPRETED, reason="the simulated card takes the place of a real one")
@pytest.mark.parametrize("is_late", [True, False], ids=["late", "at once"])
@pytest.mark.parametrize("prepare_gated", [gated(linear_int8_weight_triton), gated(linear_fp8_weight_triton)])
def test_layers_that_share_the_memory_of_their_copies_do_not_disturb_each_other(
    is_late: bool, prepare_gated: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, sizes = KERNEL_ROWS + 4, [(40, 24), (24, 40), (64, 24)]
    weights, x = [random(*size) for size in sizes], random(rows, 24)

    def layers(device: str) -> list[Linear]:
        first, gated, head = (weight.to(device) for weight in weights)
        return [
            linear_int8_weight_triton(first, first[:, 0].contiguous()),
            prepare_gated(gated, None),
            linear_int8_weight_triton(head, None),
        ]

    def run(products: list[Linear], x: Tensor) -> Tensor:
        first, gated, head = products
        hidden = first(x)
        return head(gated(torch.cat((hidden, hidden), dim=1)))

    expected = run(layers("cpu"), x)
    monkeypatch.setattr(linear_dequantized, "SCRATCH_BYTES", 30 * 24 * 4)  # so that the head takes three parts
    with SimulatedCuda(is_late=is_late).in_place_of_cuda(monkeypatch) as cuda, torch.inference_mode():
        products, there = layers("cuda"), torch.zeros(rows, 24, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(products, there)
        there.copy_(x.to("cuda"))
        cuda.waits.clear()
        for _ in range(2):
            graph.replay()
        alone = run(products, there)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        head = products[2](there)
        assert torch.cuda.memory_allocated() - before == head.nbytes, "the copy is freed"
        assert torch.cuda.max_memory_allocated() - before == head.nbytes + linear_dequantized.SCRATCH_BYTES
        assert not cuda.waits
        found = [captured.cpu(), alone.cpu()]
    for result in found:
        torch.testing.assert_close(result, expected, atol=1e-3, rtol=1e-3)

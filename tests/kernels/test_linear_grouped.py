"""Products of weights in groups: compiled code against the reference, and the error against the unquantized product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagoda_server.engine.models.measured_weights import bytes_of
from pagoda_server.kernels.activate import SWIGLU, activate
from pagoda_server.kernels.embedding import embedding_native
from pagoda_server.kernels.grouped_weight import INT4, GroupedFormat, GroupedWeight
from pagoda_server.kernels.linear_grouped import linear_grouped, linear_grouped_native
from pagoda_server.kernels.linear_int8 import quantize_rows
from tests.kernels.products import gated

compiled = pytest.mark.usefixtures("each_instruction_set")

UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # the distances of IQ4_NL
FORMATS = {
    "4 bits": INT4,
    "4 bits of a table": GroupedFormat(table=UNEVEN),
    "4 bits of a small table": GroupedFormat(table=(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -16)),
    "4 bits about zero": GroupedFormat(table=tuple(range(-8, 8))),
    "5 bits": GroupedFormat(5),
    "5 bits above a minimum": GroupedFormat(5, has_minimum=True),
    "6 bits": GroupedFormat(6, 16),
    "8 bits": GroupedFormat(8),
}
all_formats = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)


def random_weight(out_size: int, in_size: int, form: GroupedFormat = INT4) -> GroupedWeight:
    weight = GroupedWeight.allocate(form, out_size, in_size)
    lowest, end = limits_of(form)
    weight.values.random_(lowest, end)
    greatest = 8 if form == INT4 else weight.whole_values().int().abs().max().item()
    weight.scales.normal_(0, 1.6 / greatest)  # of either sign, as files have them
    if weight.minimums is not None:
        middle = greatest if form == INT4 else greatest / 2
        weight.minimums.normal_(0, 0.5).sub_(middle * weight.scales)  # zero is within the range of most groups
    return weight


def limits_of(form: GroupedFormat) -> tuple[int, int]:
    """The range of stored values, without its end."""
    if form.bits in (4, 8):
        return (0, 256) if form.bits == 4 else (-128, 128)
    count = 1 << form.bits
    return (0, count) if form.has_minimum else (-count // 2, count // 2)


def restored(x: Tensor) -> Tensor:
    """The activations after quantization, in float64."""
    values, scales, least = (part.double() for part in quantize_rows(x))
    return (values * scales[..., None] + least[..., None]).flatten(1)[:, : x.shape[1]]


def test_a_group_holds_its_first_half_in_low_nibbles() -> None:
    weight = GroupedWeight(
        INT4,
        torch.full((1, 1, 16), 0xA3, dtype=torch.uint8),
        torch.tensor([[0.5]], dtype=torch.float16),
        torch.tensor([[-4.0]], dtype=torch.float16),
    )
    assert weight.shape == (1, 32)
    assert weight.dequantize().tolist() == [[-2.5] * 16 + [1.0] * 16]


def test_a_table_gives_codes_their_values() -> None:
    weight = GroupedWeight(
        GroupedFormat(table=UNEVEN),
        torch.full((1, 1, 16), 0xF1, dtype=torch.uint8),
        torch.tensor([[-0.5]], dtype=torch.float16),
    )
    assert weight.dequantize().tolist() == [[52.0] * 16 + [-56.5] * 16]


@all_formats
def test_rows_split_off_are_views(form: GroupedFormat) -> None:
    weight = random_weight(6, 64, form)
    upper, lower = weight.split([2, 4])
    assert torch.equal(lower.dequantize(), weight.dequantize()[2:])
    lower.copy_(random_weight(4, 64, form))
    assert torch.equal(lower.dequantize(), weight.dequantize()[2:])
    group_bytes = form.group // (2 if form.bits == 4 else 1) + (4 if form.has_minimum else 2)
    assert upper.nbytes + lower.nbytes == weight.nbytes == 6 * 64 // form.group * group_bytes
    assert torch.equal(weight.rows(torch.tensor([4, 0])).dequantize(), weight.dequantize()[[4, 0]])


@all_formats
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("in_size", "out_size"), [(32, 1), (64, 32), (96, 29), (576, 100), (1536, 7)])
def test_only_activations_are_rounded(form: GroupedFormat, in_size: int, out_size: int, has_bias: bool) -> None:
    weight, x = random_weight(out_size, in_size, form), torch.randn(5, in_size) + 1
    bias = torch.randn(out_size) if has_bias else None
    exact = restored(x) @ weight.dequantize().double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(linear_grouped(weight, bias)(x).double(), exact, atol=1e-3, rtol=1e-5)


def test_what_is_gated_is_rounded_once() -> None:
    weight, x = random_weight(20, 96), torch.randn(5, 192).bfloat16()
    exact = restored(activate(x.float(), SWIGLU)) @ weight.dequantize().double().T
    product = gated(linear_grouped)(weight, None)(x)
    assert product.dtype == torch.bfloat16
    torch.testing.assert_close(product.double(), exact, atol=1e-3, rtol=0.004)


def test_one_row_does_not_touch_the_precision_of_another() -> None:
    weight, x = random_weight(40, 128), torch.randn(3, 128)
    alone = linear_grouped(weight, None)(x[1:2])
    x[0] *= 1e6
    assert torch.equal(linear_grouped(weight, None)(x)[1:2], alone)


@compiled
@all_formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("in_size", "out_size"), [(64, 32), (32, 29), (576, 100), (96, 576)])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 9, 33, 97, 200])
def test_compiled_products_are_those_of_the_reference(
    form: GroupedFormat, dtype: torch.dtype, has_bias: bool, in_size: int, out_size: int, rows: int
) -> None:
    x, weight = torch.randn(rows, in_size).to(dtype), random_weight(out_size, in_size, form)
    bias = torch.randn(out_size).to(dtype) if has_bias else None
    product, expected = linear_grouped_native(weight, bias)(x), linear_grouped(weight, bias)(x)
    assert product.dtype == dtype
    # A value half-way between two steps may be rounded to either, which changes a product by a step times a weight.
    # The sums of a group's values, which are multiplied by the least of its activations, are packed in fp16.
    tolerance = 1e-3 if dtype == torch.float32 else 0.01
    assert (product - expected).abs().mean() <= tolerance * in_size**0.5 or rows == 0
    torch.testing.assert_close(product, expected, atol=0.5, rtol=tolerance)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_size", [32, 64, 96, 576])
@pytest.mark.parametrize("rows", [0, 1, 9, 97])
def test_compiled_gated_products_are_those_of_the_reference(dtype: torch.dtype, in_size: int, rows: int) -> None:
    x, weight = torch.randn(rows, 2 * in_size).to(dtype), random_weight(40, in_size)
    product, expected = gated(linear_grouped_native)(weight, None)(x), gated(linear_grouped)(weight, None)(x)
    tolerance = 1e-4 if dtype == torch.float32 else 0.01  # a value between two steps may be rounded to either
    torch.testing.assert_close(product, expected, atol=0.04 * in_size**0.5, rtol=tolerance)


@compiled
@all_formats
def test_a_compiled_row_does_not_depend_on_the_rows_beside_it(form: GroupedFormat) -> None:
    x, weight = torch.randn(203, 192).bfloat16(), random_weight(70, 192, form)
    product = linear_grouped_native(weight, None)
    together = product(x)
    for rows in (1, 2, 5, 8, 31, 100):
        assert torch.equal(product(x[:rows]), together[:rows])
    assert torch.equal(product(x[100:101]), together[100:101])


@compiled
@all_formats
@pytest.mark.parametrize("extremes", [(0, 255), (255, 255), (0, 0)])
def test_the_greatest_codes_and_activations_are_summed_exactly(form: GroupedFormat, extremes: tuple[int, int]) -> None:
    x = torch.tensor(extremes).repeat_interleave(32).repeat(4, 3).float()
    x[:, 0], x[:, 64], x[:, 65] = 0, 255, 0  # steps of 1 from 0 on
    x[1] = x[1].flip(0)
    x[:, 128:] = x[:, :64]
    weight = random_weight(35, 192, form)
    lowest, end = limits_of(form)
    if form.bits == 4:
        codes = list(form.table or range(16))
        least, most = codes.index(min(codes)), codes.index(max(codes))
        lowest, end = least * 17, most * 17 + 1
    weight.values[:17], weight.values[17:] = lowest, end - 1
    weight.scales.fill_(0.125)
    if weight.minimums is not None:
        weight.minimums.fill_(-0.5)
    exact = restored(x) @ weight.dequantize().double().T
    assert torch.equal(linear_grouped_native(weight, None)(x).double(), exact)


@compiled
@all_formats
def test_rows_are_read_from_a_packed_weight(form: GroupedFormat) -> None:
    weight, ids = random_weight(70, 96, form), torch.randint(0, 70, (50,))
    rows = embedding_native(torch.empty(0), linear_grouped_native(weight, None))
    for chosen in (ids, ids[:1], ids[:0]):
        found = rows(chosen)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, weight.rows(chosen).dequantize(), rtol=1e-6, atol=1e-6)


@compiled
@all_formats
def test_a_table_that_is_not_the_head_gives_its_rows_and_takes_no_more_memory(form: GroupedFormat) -> None:
    weight, ids = random_weight(320, 128, form), torch.randint(0, 320, (50,))
    rows = embedding_native(weight, None)
    torch.testing.assert_close(rows(ids), weight.rows(ids).dequantize(), rtol=1e-6, atol=1e-6)
    assert bytes_of(rows) <= (0.75 if form.bits == 5 else 1) * weight.nbytes


@compiled
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_row_gives_nan_and_leaves_the_others_alone(poison: float) -> None:
    x, weight = torch.randn(20, 3 * INT4.group), random_weight(40, 3 * INT4.group)
    product = linear_grouped_native(weight, None)
    clean = product(x)
    x[3, -1] = poison
    broken = product(x)
    assert broken.isnan().all(dim=1).tolist() == [row == 3 for row in range(20)]
    kept = torch.arange(20) != 3
    assert torch.equal(broken[kept], clean[kept])

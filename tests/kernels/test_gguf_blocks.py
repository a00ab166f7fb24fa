"""Compiled readers of GGUF blocks against those in NumPy, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple

import numpy as np
import pytest
import torch

from pagoda_server.checkpoints.gguf_blocks import READERS
from pagoda_server.kernels import GroupedFormat, GroupedWeight, PackedGroups, PackedInt8, has_native_int8_weight
from pagoda_server.kernels.gguf_blocks import KINDS, read_groups, read_values, reads_blocks
from pagoda_server.kernels.linear_grouped import NativeGrouped, linear_grouped_native
from pagoda_server.kernels.linear_quantized import packed_int8_weight

from ..checkpoints.test_gguf_blocks import SIZES, random_blocks

pytestmark = pytest.mark.skipif(not reads_blocks("Q4_0"), reason="the kernels are not compiled")


def test_every_type_that_numpy_reads_is_compiled() -> None:
    assert set(KINDS) == set(READERS)


@pytest.mark.parametrize("kind", READERS)
def test_compiled_readers_equal_the_reference(kind: str) -> None:
    encoded, reader = random_blocks(kind, 7, 5), READERS[kind]
    blocks, in_size = torch.from_numpy(encoded.reshape(len(encoded), -1)), 5 * SIZES[kind][0]
    expected = reader.read(encoded)
    place = GroupedWeight.allocate(GroupedFormat(*astuple(reader.grouping)), len(encoded), in_size)
    read_groups(kind, blocks, place)
    values = np.ascontiguousarray(expected.values).reshape(place.values.shape)
    assert np.array_equal(place.values.numpy(), values)
    assert np.array_equal(place.scales.numpy().view(np.uint16), expected.scales.view(np.uint16))
    if place.minimums is not None:
        assert expected.minimums is not None
        assert np.array_equal(place.minimums.numpy(), expected.minimums)
    whole = torch.empty(len(encoded), in_size)
    read_values(kind, blocks, reader.grouping.table, whole)
    assert np.array_equal(whole.numpy(), expected.dequantize(reader.grouping))


@pytest.mark.parametrize("kind", READERS)
def test_blocks_that_do_not_fill_their_place_are_refused(kind: str) -> None:
    encoded, reader = random_blocks(kind, 2, 4), READERS[kind]
    place = GroupedWeight.allocate(GroupedFormat(*astuple(reader.grouping)), 2, 4 * SIZES[kind][0])
    whole = torch.empty(2, 4 * SIZES[kind][0])
    for bad in (encoded[:, :3], encoded[:1], encoded[..., :-1]):
        blocks = torch.from_numpy(np.ascontiguousarray(bad).reshape(len(bad), -1))
        with pytest.raises(ValueError, match="differ in their sizes"):
            read_groups(kind, blocks, place)
        with pytest.raises(ValueError, match="differ in their sizes"):
            read_values(kind, blocks, reader.grouping.table, whole)


ALLOCATE = [PackedInt8.allocate, *([packed_int8_weight] if has_native_int8_weight() else [])]


@pytest.mark.parametrize("allocate", ALLOCATE)
@pytest.mark.parametrize("kind", READERS)
def test_blocks_are_packed_in_int8_as_their_values_are(kind: str, allocate: Callable[[int, int], PackedInt8]) -> None:
    encoded, reader = random_blocks(kind, 70, 3), READERS[kind]
    blocks, in_size = torch.from_numpy(encoded.reshape(len(encoded), -1)), 3 * SIZES[kind][0]
    place, expected = allocate(70, in_size), allocate(70, in_size)
    for each in (place, expected):
        each.values.zero_()  # nothing writes to the rows behind the last one
    for part, rows in zip(place.split([32, 38]), blocks.split([32, 38]), strict=True):
        part.copy_blocks(kind, rows.contiguous(), reader.grouping.table)
    expected.copy_(torch.from_numpy(reader.read(encoded).dequantize(reader.grouping)))
    assert place.is_finite
    assert torch.equal(place.values, expected.values)
    assert torch.equal(place.scales, expected.scales)


@pytest.mark.parametrize("columns", [3, 4])
@pytest.mark.parametrize("kind", READERS)
def test_blocks_are_packed_in_groups_as_the_same_groups_in_memory_are(kind: str, columns: int) -> None:
    encoded, reader = random_blocks(kind, 70, columns), READERS[kind]
    blocks, in_size = torch.from_numpy(encoded.reshape(len(encoded), -1)), columns * SIZES[kind][0]
    form = GroupedFormat(*astuple(reader.grouping))
    whole, place = GroupedWeight.allocate(form, 70, in_size), PackedGroups.allocate(form, 70, in_size)
    read_groups(kind, blocks, whole)
    place.packed.fill_(0xFF)  # what packing leaves out would show
    for part, rows in zip(place.split([32, 38]), blocks.split([32, 38]), strict=True):
        part.copy_blocks(kind, rows.contiguous(), form.table)
    packed, x = linear_grouped_native(place, None), torch.randn(3, in_size)
    assert torch.equal(packed(x), linear_grouped_native(whole, None)(x))
    assert isinstance(packed, NativeGrouped)
    torch.testing.assert_close(packed.rows(torch.arange(70)), whole.dequantize(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("allocate", ALLOCATE)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_packed_weight_shows_that_a_value_was_not_finite(
    value: float, allocate: Callable[[int, int], PackedInt8]
) -> None:
    weight, place = torch.randn(40, 100), allocate(40, 100)
    place.copy_(weight)
    assert place.is_finite
    weight[39, 99] = value
    place.copy_(weight)
    assert not place.is_finite


@pytest.mark.parametrize("allocate", ALLOCATE)
@pytest.mark.parametrize("kind", READERS)
def test_blocks_that_are_not_those_of_a_packed_weight_are_refused(
    kind: str, allocate: Callable[[int, int], PackedInt8]
) -> None:
    encoded, place = random_blocks(kind, 2, 4), allocate(2, 4 * SIZES[kind][0])
    for bad in (encoded[:, :3], encoded[:1], encoded[..., :-1]):
        blocks = torch.from_numpy(np.ascontiguousarray(bad).reshape(len(bad), -1))
        with pytest.raises(ValueError, match="differ in their sizes"):
            place.copy_blocks(kind, blocks, READERS[kind].grouping.table)

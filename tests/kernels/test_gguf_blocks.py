"""Compiled readers of GGUF blocks against those in NumPy, to the last bit."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest
import torch

from pagoda_server.checkpoints.gguf_blocks import READERS
from pagoda_server.kernels import GroupedFormat, GroupedWeight
from pagoda_server.kernels.gguf_blocks import KINDS, read_groups, read_values, reads_blocks

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

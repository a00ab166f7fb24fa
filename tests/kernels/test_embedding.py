from __future__ import annotations

import pytest
import torch

from pagoda_server.kernels.embedding import embedding_int8, embedding_native, embedding_wide
from pagoda_server.kernels.linear_int8 import linear_int8_native
from pagoda_server.kernels.native_module import native


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_size", [64, 17, 576])
def test_rows_in_int8_are_near_those_of_the_table(dtype: torch.dtype, in_size: int) -> None:
    table, ids = torch.randn(70, in_size).to(dtype), torch.tensor([3, 69, 0, 3])
    rows = embedding_int8(table, None)(ids)
    assert rows.dtype == torch.float32
    step = table.float().abs().amax() / 127
    assert (rows - embedding_wide(table, None)(ids)).abs().max() <= 0.51 * step
    assert not torch.equal(rows, table[ids])


@pytest.mark.usefixtures("each_instruction_set")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_size", [64, 17, 576, 100])
@pytest.mark.parametrize("vocab_size", [1, 31, 70])
def test_compiled_rows_of_a_tied_head_are_those_of_the_reference(
    dtype: torch.dtype, in_size: int, vocab_size: int
) -> None:
    assert native is not None
    table, ids = torch.randn(vocab_size, in_size).to(dtype), torch.randint(0, vocab_size, (50,))
    step = 2 * table.float().abs().amax().item() / 127  # twice as long where neighbours are limited
    rows = embedding_native(table, linear_int8_native(table, None))
    for chosen in (ids, ids[:1], ids[:0]):
        found, expected = rows(chosen), embedding_int8(table, None, bool(native.pairs_are_limited()))(chosen)
        assert found.dtype == torch.float32
        # A value half-way between two steps may be rounded to either.
        torch.testing.assert_close(found, expected, atol=1.01 * step, rtol=0)
        assert ((found - expected).abs() > 1e-5 * step).float().mean() < 0.02 or not len(chosen)


def test_a_table_that_is_not_tied_stays_whole() -> None:
    table, ids = torch.randn(9, 40).bfloat16(), torch.tensor([8, 0])
    assert torch.equal(embedding_native(table, None)(ids), table[ids].float())

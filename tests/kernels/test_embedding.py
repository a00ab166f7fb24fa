from __future__ import annotations

import pytest
import torch

from kernels.embedding import embedding, embedding_int8, embedding_int8_native
from kernels.linear_int8_native import has_native_int8, linear_int8_native
from kernels.native_module import native

needs_rows = pytest.mark.skipif(
    not has_native_int8() or not hasattr(native, "embedding_int8"), reason="no kernels for rows in int8"
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_size", [64, 17, 576])
def test_rows_in_int8_are_near_those_of_the_table(dtype: torch.dtype, in_size: int) -> None:
    table, ids = torch.randn(70, in_size).to(dtype), torch.tensor([3, 69, 0, 3])
    rows = embedding_int8(table, None)(ids)
    assert rows.dtype == dtype
    step = table.float().abs().amax() / 127
    assert (rows.float() - embedding(table, None)(ids).float()).abs().max() <= (
        0.51 + 0.6 * (dtype != torch.float32)
    ) * step
    assert not torch.equal(rows, table[ids])


@needs_rows
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_size", [64, 17, 576, 100])
@pytest.mark.parametrize("vocab_size", [1, 31, 70])
def test_compiled_rows_of_a_tied_head_are_those_of_the_reference(
    dtype: torch.dtype, in_size: int, vocab_size: int
) -> None:
    table, ids = torch.randn(vocab_size, in_size).to(dtype), torch.randint(0, vocab_size, (50,))
    rows = embedding_int8_native(table, linear_int8_native(table, None))
    for chosen in (ids, ids[:1], ids[:0]):
        found, expected = rows(chosen), embedding_int8(table, None)(chosen)
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0.004 if dtype == torch.bfloat16 else 1e-5)


def test_a_table_that_is_not_tied_stays_whole() -> None:
    table, ids = torch.randn(9, 40), torch.tensor([8, 0])
    assert torch.equal(embedding_int8_native(table, None)(ids), table[ids])

"""Attention whose sums have a fixed order: the same bits for a query in every batch and chunk."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from pagoda_server.kernels import PagedKV, Scoring
from pagoda_server.kernels.backend import REFERENCE
from pagoda_server.kernels.paged import GREATEST
from pagoda_server.kernels.triton import paged_fixed
from pagoda_server.kernels.triton.configs import capability
from pagoda_server.kernels.triton.paged_attention import plan_attention_triton
from pagoda_server.kernels.triton.paged_fixed import fixed_config, paged_attention_fixed_triton
from tests.kernels.test_paged_attention import BATCHES, SINKS, Batch
from tests.kernels.triton.device import DEVICE, compute_each_element_alone

pytestmark = pytest.mark.simulated

FIXED = replace(
    REFERENCE, plan_attention=plan_attention_triton, paged_attention=paged_attention_fixed_triton, name="fixed"
)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
LONG = [(1, 1), (150, 1), (70, 17)]
CHOSEN = {name: BATCHES[name] for name in ("decodes, then chunks", "chunks before decodes", "a window", "one KV head")}
CHOSEN |= {
    "several parts": Batch(LONG, heads=4, head_dim=16),
    "several parts in a window": Batch(LONG, heads=4, head_dim=16, window=50),
    "bfloat16": Batch(LONG, heads=4, head_dim=80, block_size=16, dtype=torch.bfloat16),
    **{
        str(pages): Batch(LONG, heads=4, head_dim=32, block_size=16, dtype=torch.bfloat16, pages=pages)
        for pages in GREATEST
    },
    "several parts with a cap and sinks": Batch(LONG, heads=4, head_dim=16, softcap=3.0, sinks=SINKS),
    "more heads than rows": Batch([(19, 1), (23, 3)], heads=71, kv_heads=1, head_dim=16),
}


@pytest.mark.parametrize("batch", CHOSEN.values(), ids=CHOSEN)
def test_attention_over_pages_is_attention_over_contexts(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_fixed, "num_processors", lambda _: 20)  # so that programs share decodes
    monkeypatch.setattr(paged_fixed, "PART_TILES", 2)
    out, expected = batch.run(FIXED, DEVICE)
    tolerance = TOLERANCES[batch.dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "window", "softcap"), [(torch.float32, 35, 0.0), (torch.bfloat16, None, 0.0), (torch.float32, None, 2.0)]
)
def test_a_query_has_the_same_bits_in_every_batch_and_chunk(
    dtype: torch.dtype, window: int | None, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt is computed at once, in chunks, and token by token, beside other sequences and alone."""
    compute_each_element_alone(monkeypatch)
    monkeypatch.setattr(paged_fixed, "PART_TILES", 2)
    length = (
        2 * fixed_config(16, dtype.itemsize, dtype.itemsize, capability()).tile_keys + 30
    )  # the last tokens see two parts
    pages = torch.randn(2, -(-length // 16) + 5, 16, 1, 16, device=DEVICE).to(dtype)
    queries = torch.randn(length, 3, 16, device=DEVICE).to(dtype)
    table = np.random.default_rng(0).permutation(pages.shape[1]).astype(np.int32)
    scoring = Scoring(softcap, torch.tensor([0.3, -1.0, 2.0], device=DEVICE)) if softcap else Scoring()
    hidden = torch.full_like(pages, torch.nan)  # what is not in the cache yet

    def attend(*chunks: tuple[int, int]) -> Tensor:
        """The results of chunks of the sequence, each [start, end), attended in one step."""
        end = max(end for _, end in chunks)
        slots = torch.from_numpy(table[: -(-end // 16)]).to(DEVICE).long()
        cache = hidden.clone()
        cache[:, slots] = pages[:, slots]
        cache[:, slots[-1], (end - 1) % 16 + 1 :] = torch.nan
        kv = PagedKV(*cache)
        query_start = np.cumsum([0, *(end - start for start, end in chunks)], dtype=np.int32)
        context_len = np.array([end for _, end in chunks], dtype=np.int32)
        plan = plan_attention_triton(query_start, context_len, np.stack([table] * len(chunks)), kv, window)
        return paged_attention_fixed_triton(torch.cat([queries[slice(*chunk)] for chunk in chunks]), kv, plan, scoring)

    whole = attend((0, length))
    assert whole.isfinite().all()
    for chunks in ([(0, 5), (5, 47)], [(40, length)], [(length - 3, length - 2), (length - 1, length), (20, 50)]):
        assert torch.equal(attend(*chunks), torch.cat([whole[slice(*chunk)] for chunk in chunks]))
    for processors in (1, 20):  # with so many, two programs share the two parts
        monkeypatch.setattr(paged_fixed, "num_processors", lambda _, count=processors: count)
        for token in (0, 20, length - 27, length - 1):
            assert torch.equal(attend((token, token + 1))[0], whole[token])

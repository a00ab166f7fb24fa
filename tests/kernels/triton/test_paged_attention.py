"""The batches of every backend's test, and GPU features: divided contexts, rows, padding and pages in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from pagoda_server.kernels import AttentionPlan, PagedKV
from pagoda_server.kernels.backend import REFERENCE
from pagoda_server.kernels.paged import GREATEST
from pagoda_server.kernels.triton import attention_tile, paged_decode
from pagoda_server.kernels.triton.attention_tile import SEQS
from pagoda_server.kernels.triton.configs import IS_INTERPRETED
from pagoda_server.kernels.triton.paged_attention import paged_attention_triton, plan_attention_triton
from pagoda_server.kernels.triton.paged_decode import MIN_TILES, find_part
from tests.kernels.test_paged_attention import BATCHES, SCORED, Batch
from tests.kernels.triton.device import DEVICE

pytestmark = pytest.mark.simulated

TRITON = replace(REFERENCE, name="triton", plan_attention=plan_attention_triton, paged_attention=paged_attention_triton)
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Without batches that are large to fill the CPU's tiles, which take the interpreter seconds, and without head sizes and
# groups, which have their own tests here.
LEFT_OUT = ("more ", "groups ", "several tiles", "a window over several", "heads of ")
SHARED = {name: batch for name, batch in BATCHES.items() if not name.startswith(LEFT_OUT)} | SCORED


@pytest.fixture(autouse=True)
def _tensors_not_written_are_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty returns
    yield
    torch.use_deterministic_algorithms(False)


def check(batch: Batch) -> None:
    out, expected = batch.run(TRITON, DEVICE)
    assert out.dtype == batch.dtype
    tolerance = TOLERANCES[batch.dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("batch", SHARED.values(), ids=SHARED)
def test_attention_over_pages_is_attention_over_contexts(batch: Batch) -> None:
    check(batch)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_heads_of_every_size_in_half_precision(head_dim: int, dtype: torch.dtype) -> None:
    check(Batch([(37, 1), (150, 1), (40, 9)], heads=4, head_dim=head_dim, block_size=16, dtype=dtype))


@pytest.mark.parametrize("group", range(1, 17))
def test_every_number_of_heads_that_share_a_kv_head(group: int) -> None:
    check(Batch([(19, 1), (18, 3)], heads=2 * group, head_dim=16))


def test_more_heads_that_share_a_kv_head_than_a_tile_has_rows() -> None:
    check(Batch([(19, 1), (23, 3)], heads=71, kv_heads=1, head_dim=16))


def test_a_context_of_more_parts_than_are_merged_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_decode, "num_processors", lambda device: 10)
    monkeypatch.setattr(paged_decode, "MERGED", 4 * 4 * 16)  # 4 parts of 3 heads
    check(Batch([(35, 1), (4500, 1)], heads=3, kv_heads=1, head_dim=16, block_size=64))


def test_a_divided_context_gives_the_same_bits_whichever_part_ends_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_decode, "num_processors", lambda device: 10)
    queries, kv, block_table, _ = Batch([(1100, 1), (700, 1)], heads=4, kv_heads=2, head_dim=16).build(DEVICE)
    query_start, context_len = np.arange(3, dtype=np.int32), np.array([1100, 700], dtype=np.int32)
    plan = plan_attention_triton(query_start, context_len, block_table, kv, None)
    first, *others = (paged_attention_triton(queries, kv, plan) for _ in range(2 if IS_INTERPRETED else 100))
    assert all(torch.equal(other, first) for other in others)


@pytest.mark.parametrize("block_size", [8, 16, 24, 32, 64])
def test_blocks_of_every_size(block_size: int) -> None:
    check(Batch([(1, 1), (150, 1), (block_size, 1), (2 * block_size + 1, 11)], block_size=block_size))


@pytest.mark.parametrize("window", [None, 1, 70, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pages", GREATEST, ids=str)
def test_pages_in_8_bits_are_multiplied_by_their_scales(
    pages: torch.dtype, dtype: torch.dtype, window: int | None
) -> None:
    lengths = [(1, 1), (300, 1), (140, 17)]
    check(Batch(lengths, heads=4, head_dim=32, block_size=16, dtype=dtype, pages=pages, window=window))


@pytest.mark.parametrize("num_queries", [1, 200], ids=["decode", "chunk"])
def test_broken_keys_are_never_hidden_from_who_sees_them(num_queries: int) -> None:
    pages = torch.randn(2, 20, 16, 1, 16, device=DEVICE)
    pages[0, 4:8] = torch.nan  # tokens 64 to 127
    kv = PagedKV(*pages)
    query_start, context_len = np.array([0, num_queries], dtype=np.int32), np.array([200], dtype=np.int32)
    plan = plan_attention_triton(query_start, context_len, np.arange(20, dtype=np.int32)[None], kv, None)
    finite = paged_attention_triton(torch.randn(num_queries, 2, 16, device=DEVICE), kv, plan).isfinite().flatten(1)
    assert not finite[64 - 200 :].any()
    assert finite[: num_queries - 136].all()


def test_a_plan_of_persistent_tensors_serves_batches_of_other_lengths_rows_and_padding() -> None:
    batch = Batch([(9, 1), (300, 1), (1, 1), (40, 1)])
    queries, kv, block_table, expected = batch.build(DEVICE)
    tables = torch.from_numpy(block_table).to(DEVICE)
    plan = AttentionPlan(
        query_start=torch.arange(6, dtype=torch.int32, device=DEVICE),
        context_len=torch.zeros(5, dtype=torch.int32, device=DEVICE),
        block_table=torch.full((9, block_table.shape[1]), 1 << 30, dtype=torch.int32, device=DEVICE),
        sliding_window=None,
        rows=torch.full((5,), -1, dtype=torch.int32, device=DEVICE),
        num_decodes=5,
        arrivals=torch.zeros(5 * queries.shape[1], dtype=torch.int32, device=DEVICE),
    )
    lengths = torch.tensor([context for context, _ in batch.lengths], dtype=torch.int32, device=DEVICE)
    for seqs, rows in (([0, 1, 2, 3], [7, 0, 8, 4]), ([1, 3], [2, 5]), ([2], [1])):
        plan.block_table[rows] = tables[seqs]
        plan.context_len.zero_()[: len(seqs)] = lengths[seqs]
        plan.rows.fill_(-1)[: len(seqs)] = torch.tensor(rows, dtype=torch.int32)  # type: ignore[union-attr]
        q = torch.full((5, *queries.shape[1:]), torch.nan, device=DEVICE)
        q[: len(seqs)] = queries[seqs]
        out = paged_attention_triton(q, kv, plan).cpu()
        torch.testing.assert_close(out[: len(seqs)].double(), expected[seqs], atol=1e-5, rtol=1e-5)
        assert not out[len(seqs) :].any()
        assert plan.arrivals is not None
        assert not plan.arrivals.any(), "the next launch counts from 0"


def test_chunks_have_rows_and_padding_too() -> None:
    queries, kv, block_table, expected = Batch([(9, 1), (30, 7), (5, 5)]).build(DEVICE)
    plan = AttentionPlan(
        query_start=torch.tensor([0, 1, 8, 10, 15], dtype=torch.int32, device=DEVICE),
        context_len=torch.tensor([9, 30, 0, 5], dtype=torch.int32, device=DEVICE),
        block_table=torch.from_numpy(block_table[[2, 0, 1]]).to(DEVICE),
        sliding_window=None,
        rows=torch.tensor([1, 2, -1, 0], dtype=torch.int32, device=DEVICE),
        num_decodes=1,
    )
    q = torch.cat((queries[:8], torch.full_like(queries[:2], torch.nan), queries[8:]))
    out = paged_attention_triton(q, kv, plan).cpu()
    torch.testing.assert_close(out[[*range(8), *range(10, 15)]].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_queries", [1, 3], ids=["decode", "chunk"])
def test_a_batch_of_more_sequences_than_a_program_looks_at_together(
    num_queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = SEQS.value  # sequences without tokens, and without queries where the others have several
    if IS_INTERPRETED:  # a program takes milliseconds, and reads its module's constants when it runs
        empty = 4
        for module in (paged_decode, attention_tile):
            monkeypatch.setattr(module, "SEQS", tl.constexpr(empty))
    batch = Batch([(300, num_queries), (6, num_queries)], heads=1, kv_heads=1)
    queries, kv, block_table, expected = batch.build(DEVICE)
    query_len = np.array([*[num_queries == 1] * empty, num_queries, num_queries])
    plan = plan_attention_triton(
        np.cumsum([0, *query_len], dtype=np.int32),
        np.array([*[0] * empty, 300, 6], dtype=np.int32),
        np.concatenate((np.zeros((empty, block_table.shape[1]), dtype=np.int32), block_table)),
        kv,
        None,
    )
    padding = torch.zeros(int(query_len[:empty].sum()), *queries.shape[1:], device=DEVICE)
    out = paged_attention_triton(torch.cat((padding, queries)), kv, plan).cpu()
    torch.testing.assert_close(out[len(padding) :].double(), expected, atol=1e-5, rtol=1e-5)


def test_a_plan_tells_decodes_from_what_follows_them() -> None:
    kv = PagedKV(*torch.zeros(2, 1, 4, 1, 16, device=DEVICE))
    query_start, context_len = np.array([0, 1, 2, 7, 8], dtype=np.int32), np.array([3, 9, 5, 2], dtype=np.int32)
    block_table = np.arange(12, dtype=np.int32).reshape(4, 3)
    plan = plan_attention_triton(query_start, context_len, block_table, kv, 5)
    assert (plan.num_decodes, plan.sliding_window) == (2, 5)
    assert plan.query_start.tolist() == query_start.tolist()
    assert plan.context_len.tolist() == context_len.tolist()
    assert plan.block_table.tolist() == block_table.tolist()


@triton.jit
def _list_parts(context_len_ptr, parts_ptr, num_seqs, num_shares, WINDOW: tl.constexpr, TILE: tl.constexpr):
    item = tl.program_id(0)
    seq, begin, end, first_item, num_parts = find_part(item, context_len_ptr, num_seqs, num_shares, WINDOW, TILE)
    tl.store(parts_ptr + item * 5, seq)
    tl.store(parts_ptr + item * 5 + 1, begin)
    tl.store(parts_ptr + item * 5 + 2, end)
    tl.store(parts_ptr + item * 5 + 3, first_item)
    tl.store(parts_ptr + item * 5 + 4, num_parts)


@pytest.mark.parametrize("window", [0, 1000])
@pytest.mark.parametrize(
    "contexts",
    [[4096], [1], [70_000] + [300] * 15, [0, 513, 0, 0, 5_000, 64, 1], [1000] * 20, [0, 0]],
    ids=["one", "one token", "a long one among short ones", "gaps", "equal ones", "nothing"],
)
def test_contexts_are_divided_into_parts_of_equal_work(contexts: list[int], window: int) -> None:
    tile, num_shares = 64, 9
    num_items = len(contexts) + num_shares
    listed = torch.full((num_items, 5), -1, dtype=torch.int32, device=DEVICE)
    context_len = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
    _list_parts[(num_items,)](context_len, listed, len(contexts), num_shares, WINDOW=window, TILE=tile)
    parts = {item: part for item, part in enumerate(listed.tolist()) if part[0] < len(contexts)}
    read = [min(context, window) if window else context for context in contexts]
    longest = max(-(-sum(read) // num_shares) + tile, MIN_TILES.value * tile)
    for seq, (context, num_keys) in enumerate(zip(contexts, read, strict=True)):
        own = {item: part for item, part in parts.items() if part[0] == seq}
        tokens = [token for _, begin, end, _, _ in own.values() for token in range(begin, end)]
        assert tokens == list(range(context - num_keys, context))
        assert all(end - begin <= longest for _, begin, end, _, _ in own.values())
        assert all(first == min(own) and count == len(own) for _, _, _, first, count in own.values())
        assert len(own) == 1 or all(begin < end for _, begin, end, _, _ in own.values())

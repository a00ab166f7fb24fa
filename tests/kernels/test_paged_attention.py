"""Attention over pages against attention over whole contexts in float64, whatever else the pages hold."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagoda_server.kernels import AttentionPlan, PagedKV, Scoring
from pagoda_server.kernels.backend import CPU, NATIVE, REFERENCE, Backend
from pagoda_server.kernels.native_module import native
from pagoda_server.kernels.paged_attention import (
    GROUP_COST_SLOTS,
    GROUP_LIMIT_SLOTS,
    paged_attention_native,
    plan_attention_native,
)
from pagoda_server.kernels.rope_and_store_kv import quantize_heads
from tests.kernels.backends import BACKENDS

needs_native = pytest.mark.skipif(native is None, reason="needs compiled code")
SPLIT = 256  # tokens after which compiled code splits the context of a decode


@dataclass(frozen=True)
class Batch:
    """Random sequences of (context, queries), with shuffled pages and NaN in all slots that no query sees.

    pages    dtype of the pages where that is another: their keys and values have scales
    softcap  as in Scoring
    sinks    heads have these in turn; (): they have none
    """

    lengths: list[tuple[int, int]]
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 8
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    window: int | None = None
    pages: torch.dtype | None = None
    softcap: float = 0.0
    sinks: tuple[float, ...] = ()

    @property
    def page_dtype(self) -> torch.dtype:
        return self.pages or self.dtype

    def run(self, backend: Backend, device: str = "cpu") -> tuple[Tensor, Tensor]:
        """The backend's result and the expected one, in float64."""
        queries, kv, block_table, expected = self.build(device)
        plan = self.plan(backend, block_table, kv)
        return backend.paged_attention(queries, kv, plan, self.scoring(device)).cpu(), expected

    def scoring(self, device: str = "cpu") -> Scoring:
        sinks = torch.tensor([self.sinks[head % len(self.sinks)] for head in range(self.heads)]) if self.sinks else None
        return Scoring(self.softcap, None if sinks is None else sinks.to(device))

    def build(self, device: str = "cpu") -> tuple[Tensor, PagedKV, np.ndarray, Tensor]:
        """Packed queries, pages, the block table, and the expected result."""
        rng = random.Random(0)
        tables = [-(-context // self.block_size) for context, _ in self.lengths]
        free = list(range(sum(tables) + 3))
        rng.shuffle(free)
        shape = (len(free), self.block_size, self.kv_heads, self.head_dim)
        pages = torch.full((2, *shape), torch.nan).to(self.page_dtype)
        scales = torch.full((2, *shape[:-1]), torch.nan)
        block_table = np.full((len(self.lengths), max(tables)), free[0], dtype=np.int32)
        queries, expected = [], []
        for seq, (context, num_queries) in enumerate(self.lengths):
            blocks = [free.pop() for _ in range(tables[seq])]
            block_table[seq, : len(blocks)] = blocks
            q = torch.randn(num_queries, self.heads, self.head_dim).to(self.dtype)
            kv = torch.randn(2, context, self.kv_heads, self.head_dim) * (
                torch.rand(2, context, self.kv_heads, 1) + 0.5
            )
            if self.pages is None:
                kv, scale = kv.to(self.dtype), torch.ones(kv.shape[:-1])
            else:
                kv, scale = quantize_heads(kv, self.pages)
            first = 0 if self.window is None else max(0, context - num_queries - self.window + 1)
            block_table[seq, : first // self.block_size] = free[0]  # given back: no query sees what is before
            for position in range(first, context):
                block, offset = blocks[position // self.block_size], position % self.block_size
                pages[:, block, offset] = kv[:, position]
                scales[:, block, offset] = scale[:, position]
            kv = kv.double() * scale[..., None]
            queries.append(q)
            expected.append(self.attend(q.double(), kv[0], kv[1]))
        pages, scales = pages.to(device), scales.to(device)
        scaled = () if self.pages is None else (scales[0], scales[1])
        return torch.cat(queries).to(device), PagedKV(pages[0], pages[1], *scaled), block_table, torch.cat(expected)

    def plan(self, backend: Backend, block_table: np.ndarray, kv: PagedKV) -> AttentionPlan:
        query_start = np.cumsum([0, *(queries for _, queries in self.lengths)], dtype=np.int32)
        context_len = np.array([context for context, _ in self.lengths], dtype=np.int32)
        return backend.plan_attention(query_start, context_len, block_table, kv, self.window)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        out = torch.empty_like(q)
        for row in range(len(q)):
            last = len(keys) - len(q) + row
            first = 0 if self.window is None else max(0, last - self.window + 1)
            for head in range(self.heads):
                kv_head = head // (self.heads // self.kv_heads)
                k, v = keys[first : last + 1, kv_head], values[first : last + 1, kv_head]
                scores = k @ q[row, head] / self.head_dim**0.5
                if self.softcap:
                    scores = self.softcap * (scores / self.softcap).tanh()
                sinks = torch.tensor(self.sinks[head % len(self.sinks)] if self.sinks else -torch.inf).double()
                out[row, head] = torch.cat((scores, sinks.view(1))).softmax(dim=0)[:-1] @ v
        return out


BATCHES = {
    "one token": Batch([(1, 1)]),
    "decodes of one length": Batch([(9, 1)] * 3),
    "decodes of odd lengths": Batch([(1, 1), (5, 1), (4, 1), (23, 1), (8, 1)]),
    "a whole prompt": Batch([(13, 13)]),
    "a chunk in the middle": Batch([(29, 7)]),
    "decodes, then chunks": Batch([(6, 1), (31, 1), (13, 13), (19, 2), (17, 16)]),
    "chunks before decodes": Batch([(3, 3), (12, 1), (9, 4), (2, 1)]),
    "one query head a KV head": Batch([(7, 1), (9, 5)], heads=3, kv_heads=3),
    "one KV head": Batch([(7, 1), (9, 5)], heads=5, kv_heads=1, head_dim=16),
    "blocks of one slot": Batch([(7, 1), (9, 5)], block_size=1),
    "large blocks": Batch([(7, 1), (70, 5), (65, 1)], block_size=64),
    "a window": Batch([(3, 1), (4, 1), (5, 1), (21, 1), (3, 3), (9, 9), (30, 6)], window=4),
    "a window of one": Batch([(5, 1), (9, 3)], window=1),
    "a window wider than any context": Batch([(5, 1), (9, 3), (6, 6)], window=100),
    "groups of very different lengths": Batch(
        [(GROUP_COST_SLOTS + 40, 1), (3, 1), (2, 1), (GROUP_COST_SLOTS // 2, 1), (7, 1)],
        kv_heads=1,
        heads=2,
        head_dim=4,
    ),
    "decodes about a split's end": Batch(
        [(SPLIT - 1, 1), (SPLIT, 1), (SPLIT + 1, 1), (3 * SPLIT + 17, 1)],
        heads=3,
        kv_heads=1,
        head_dim=16,
        block_size=16,
    ),
    "a window that begins within a split": Batch(
        [(SPLIT + 30, 1), (2 * SPLIT + 9, 1), (300, 30)], heads=2, kv_heads=1, head_dim=16, window=SPLIT - 20
    ),
    "several tiles of queries and of keys": Batch(
        [(150, 150), (200, 70), (64, 64), (65, 65)], heads=3, kv_heads=1, head_dim=32, block_size=16
    ),
    "a window over several tiles": Batch(
        [(150, 150), (200, 70)], heads=4, kv_heads=2, head_dim=16, block_size=16, window=50
    ),
    "more heads a KV head than a tile of queries has rows": Batch(
        [(40, 1), (70, 9)], heads=2 * 130, kv_heads=2, head_dim=16, block_size=16
    ),
    **{
        f"heads of {head_dim}, {group} a KV head": Batch(
            [(70, 1), (33, 1), (40, 9)], heads=2 * group, kv_heads=2, head_dim=head_dim, block_size=16
        )
        for head_dim, group in ((16, 1), (32, 2), (64, 3), (64, 9), (80, 4), (96, 5), (128, 7), (256, 3), (48, 2))
    },
    "chunks of two to seven queries about a split's end": Batch(
        [(SPLIT + queries // 2, queries) for queries in range(2, 8)] + [(2 * SPLIT, 6), (2 * SPLIT + 1, 2), (4, 4)],
        heads=6,
        kv_heads=2,
        head_dim=16,
    ),
    "short chunks behind a window": Batch(
        [(SPLIT + 30, 5), (2 * SPLIT + 3, 6), (SPLIT + 2, 2), (3, 3)],
        heads=3,
        kv_heads=1,
        head_dim=16,
        window=SPLIT - 1,
    ),
    "short chunks with a window of one": Batch([(SPLIT + 2, 4), (5, 5)], heads=2, kv_heads=1, head_dim=16, window=1),
    "more than one group holds": Batch(
        [(GROUP_LIMIT_SLOTS // 4 + 5, 1)] * 5, kv_heads=1, heads=1, head_dim=2, block_size=64
    ),
}

SINKS = (-3.0, 0.5, 9.0, -200.0, 200.0)  # far below and far above all scores too
SCORED = {
    "a cap": Batch([(1, 1), (21, 1), (9, 9)], head_dim=16, softcap=0.8),
    "a high cap, which changes little": Batch([(21, 1), (30, 9)], head_dim=16, softcap=50.0),
    "sinks": Batch([(1, 1), (21, 1), (30, 9)], heads=10, head_dim=16, sinks=SINKS),
    "both behind a window": Batch([(21, 1), (30, 9), (7, 3)], heads=10, head_dim=16, window=4, softcap=2, sinks=SINKS),
    "both in parts": Batch(
        [(SPLIT + 3, 1), (2 * SPLIT + 9, 4), (150, 70)], heads=10, head_dim=16, block_size=16, softcap=3.0, sinks=SINKS
    ),
}


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("batch", (BATCHES | SCORED).values(), ids=BATCHES | SCORED)
def test_attention_over_pages_is_attention_over_contexts(backend: Backend, batch: Batch) -> None:
    out, expected = batch.run(backend)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_in_half_precision_errs_by_little_more_than_its_rounding(
    backend: Backend, dtype: torch.dtype
) -> None:
    out, expected = Batch([(33, 1), (90, 1), (40, 11)], head_dim=32, dtype=dtype).run(backend)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_broken_keys_are_never_hidden_from_who_sees_them(backend: Backend) -> None:
    """Whole tiles of NaN between valid ones must reach the result, so that the sampler sees that something is wrong."""
    pages = torch.randn(2, 20, 16, 1, 16)
    pages[0, 4:8] = torch.nan  # tokens 64 to 127
    kv = PagedKV(*pages)
    query_start, context_len = np.array([0, 200], dtype=np.int32), np.array([200], dtype=np.int32)
    plan = backend.plan_attention(query_start, context_len, np.arange(20, dtype=np.int32)[None], kv, None)
    finite = backend.paged_attention(torch.randn(200, 2, 16), kv, plan).isfinite().flatten(1)
    assert not finite[64:].any()


def test_pages_of_float8_are_multiplied_by_their_scales() -> None:
    batch = Batch([(9, 1), (13, 5)], head_dim=32, pages=torch.float8_e4m3fn)
    out, expected = batch.run(REFERENCE)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("batch", (BATCHES | SCORED).values(), ids=BATCHES | SCORED)
def test_pages_of_int8_are_multiplied_by_their_scales(backend: Backend, batch: Batch) -> None:
    out, expected = replace(batch, pages=torch.int8).run(backend)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_drawn_batches_over_pages_of_int8_are_attended_as_their_values_are(
    backend: Backend, data: st.DataObject
) -> None:
    group, kv_heads = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    context = st.integers(1, SPLIT + 40)
    lengths = [
        (most, data.draw(st.integers(1, min(most, 20))))
        for most in data.draw(st.lists(context, min_size=1, max_size=4))
    ]
    batch = Batch(
        lengths,
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=data.draw(st.sampled_from((16, 48, 64, 80))),
        block_size=data.draw(st.sampled_from((1, 4, 16))),
        dtype=data.draw(st.sampled_from((torch.float32, torch.bfloat16))),
        window=data.draw(st.none() | st.integers(1, SPLIT)),
        pages=torch.int8,
        softcap=data.draw(st.sampled_from((0.0, 2.0))),
        sinks=data.draw(st.sampled_from(((), SINKS))),
    )
    out, expected = batch.run(backend)
    tolerance = 1e-5 if batch.dtype == torch.float32 else 0.02
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_sequences_have_the_rows_of_the_block_table_that_the_plan_says_and_padding_has_none() -> None:
    batch = Batch([(9, 1), (5, 1), (13, 5)])
    queries, kv, block_table, expected = batch.build()
    plan = AttentionPlan(
        query_start=torch.tensor([0, 1, 2, 3, 8]),
        context_len=torch.tensor([9, 5, 0, 13]),
        block_table=torch.tensor(block_table[[2, 0, 1, 0]]),
        sliding_window=None,
        rows=torch.tensor([3, 2, -1, 0]),
    )
    with_padding = torch.cat((queries[:2], torch.full_like(queries[:1], torch.nan), queries[2:]))
    out = REFERENCE.paged_attention(with_padding, kv, plan)
    torch.testing.assert_close(out[[0, 1, 3, 4, 5, 6, 7]].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", [CPU, NATIVE], ids=lambda backend: backend.name)
def test_a_decode_in_bfloat16_is_the_same_to_the_last_bit_in_any_batch(backend: Backend) -> None:
    kv = PagedKV(*torch.randn(2, 64, 16, 2, 64).bfloat16())
    q = torch.randn(5, 6, 64).bfloat16()
    context_len = np.array([1, 16, 37, 300, 513], dtype=np.int32)
    table = np.random.default_rng(0).integers(0, 64, (5, 33)).astype(np.int32)

    def attend(seqs: list[int]) -> Tensor:
        query_start = np.arange(len(seqs) + 1, dtype=np.int32)
        plan = backend.plan_attention(query_start, context_len[seqs], table[seqs], kv, None)
        return backend.paged_attention(q[seqs], kv, plan)

    together = attend([0, 1, 2, 3, 4])
    for seqs in ([0], [4], [3, 1], [2, 4, 0]):
        assert torch.equal(attend(seqs), together[seqs])


@needs_native
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_a_short_chunk_of_a_prompt_is_as_many_decodes_to_the_last_bit_in_any_batch(head_dim: int) -> None:
    kv = PagedKV(*torch.randn(2, 160, 4, 2, head_dim).bfloat16())
    lengths = [(600, 6), (258, 4), (9, 2), (256, 3), (5, 5)]
    starts = np.cumsum([0, *(queries for _, queries in lengths)])
    q = torch.randn(int(starts[-1]), 6, head_dim).bfloat16()
    table = np.random.default_rng(0).integers(0, 160, (len(lengths), 150)).astype(np.int32)

    def attend(chunks: list[tuple[int, int, int]]) -> Tensor:
        """Attend the packed parts, each (sequence, its first query, number of queries)."""
        rows = torch.cat([q[starts[seq] + first :][:queries] for seq, first, queries in chunks])
        query_start = np.cumsum([0, *(queries for _, _, queries in chunks)], dtype=np.int32)
        context_len = np.array(
            [lengths[seq][0] - lengths[seq][1] + first + queries for seq, first, queries in chunks], dtype=np.int32
        )
        plan = NATIVE.plan_attention(query_start, context_len, table[[seq for seq, _, _ in chunks]], kv, None)
        return NATIVE.paged_attention(rows, kv, plan)

    whole = [(seq, 0, queries) for seq, (_, queries) in enumerate(lengths)]
    together = attend(whole)
    assert torch.equal(torch.cat([attend([chunk]) for chunk in whole]), together)
    decodes = [(seq, first, 1) for seq, (_, queries) in enumerate(lengths) for first in range(queries)]
    assert torch.equal(attend(decodes), together)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_the_same_to_the_last_bit_for_blocks_of_any_size_wherever_they_lie(dtype: torch.dtype) -> None:
    decodes = [(5 + 37 * number, 1) for number in range(20)]  # enough for runs of them
    batch = Batch([*decodes, (90, 90), (150, 33)], head_dim=64, dtype=dtype, block_size=64)
    queries, kv, block_table, expected = batch.build()

    def attend(block_size: int) -> Tensor:
        parts = 64 // block_size
        place = np.random.default_rng(block_size).permutation(len(kv.keys) * parts).astype(np.int32)
        pages = torch.empty(2, len(place), block_size, kv.num_kv_heads, kv.head_dim, dtype=dtype)
        pages[:, place] = torch.stack((kv.keys, kv.values)).view(pages.shape)
        table = place[block_table[..., None] * parts + np.arange(parts)].reshape(len(block_table), -1)
        return NATIVE.paged_attention(queries, PagedKV(*pages), batch.plan(NATIVE, table, PagedKV(*pages)))

    together = attend(64)
    torch.testing.assert_close(together.double(), expected, atol=0.02, rtol=0.02)
    for block_size in (1, 4, 8, 16):
        assert torch.equal(attend(block_size), together)


def test_a_sequence_full_of_nan_does_not_reach_its_neighbours() -> None:
    kv = PagedKV(*torch.randn(2, 4, 4, 1, 8))
    kv.keys[2], kv.values[2] = torch.nan, torch.nan
    tables = np.array([[0, 1], [2, 0], [3, 0]], dtype=np.int32)
    query_start, context_len = np.arange(4, dtype=np.int32), np.array([7, 3, 2], dtype=np.int32)
    plan = CPU.plan_attention(query_start, context_len, tables, kv, None)
    finite = CPU.paged_attention(torch.randn(3, 2, 8), kv, plan).isfinite().flatten(1).all(dim=1)
    assert finite.tolist() == [True, False, True]


@needs_native
@pytest.mark.usefixtures("each_instruction_set")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads", "window", "softcap"),
    [
        (16, 6, 2, None, 0),
        (64, 9, 3, None, 0),
        (80, 2, 2, 300, 0),
        (128, 4, 1, 20, 0),
        (256, 2, 1, None, 0),
        (64, 6, 2, None, 2),
    ],
)
def test_a_plan_of_one_order_gives_a_query_the_same_bits_in_every_chunk(
    dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int, window: int | None, softcap: float
) -> None:
    context = SPLIT + 90
    scoring = Scoring(softcap, torch.randn(heads)) if softcap else Scoring()
    kv = PagedKV(*torch.randn(2, context // 2, 4, kv_heads, head_dim).to(dtype))
    queries = torch.randn(context, heads, head_dim).to(dtype)
    block_table = np.random.default_rng(0).permutation(context // 2)[None].astype(np.int32)

    def attend(cuts: list[int], beside: int) -> Tensor:
        """The chunks between these cuts, each beside so many decodes."""
        parts = []
        for first, end in itertools.pairwise(cuts):
            query_start = np.array([*range(beside + 1), beside + end - first], dtype=np.int32)
            context_len = np.array([*range(1, beside + 1), end], dtype=np.int32)
            tables = np.repeat(block_table, beside + 1, axis=0)
            plan = plan_attention_native(query_start, context_len, tables, kv, window, one_order=True)
            rows = torch.cat([queries[:beside], queries[first:end]])
            parts.append(paged_attention_native(rows, kv, plan, scoring)[beside:])
        return torch.cat(parts)

    one_by_one = attend(list(range(context + 1)), beside=0)
    ends = np.array([0, context], dtype=np.int32)
    plan = plan_attention_native(ends, ends[1:], block_table, kv, window)
    tiled = paged_attention_native(queries, kv, plan, scoring)
    torch.testing.assert_close(one_by_one, tiled)
    for cuts in ([0, context], [0, 1, 8, 8 + 6, 100, SPLIT, SPLIT + 7, context], [0, SPLIT - 3, context]):
        for beside in (0, 40):
            assert torch.equal(attend(cuts, beside), one_by_one), (cuts, beside)


@needs_native
def test_many_split_contexts_are_attended_as_each_of_them_alone() -> None:
    """Together their partial results exceed the room for them, so they are attended and merged in turns."""
    batch = Batch([(SPLIT + 1, 1)], heads=64, kv_heads=1, head_dim=256)
    query, kv, block_table, _ = batch.build()
    count = 140
    assert count * 2 * 64 * (256 + 2) > 4 << 20
    queries = torch.randn(count, *query.shape[1:])
    context_len = np.full(count, SPLIT + 1, dtype=np.int32)

    def attend(first: int, end: int) -> Tensor:
        rows = slice(first, end)
        tables = np.repeat(block_table, end - first, axis=0)
        plan = plan_attention_native(np.arange(end - first + 1, dtype=np.int32), context_len[rows], tables, kv, None)
        return paged_attention_native(queries[rows], kv, plan)

    together = attend(0, count)
    for seq in (0, 1, count // 2, count - 2, count - 1):
        assert torch.equal(together[seq], attend(seq, seq + 1)[0])


@needs_native
@pytest.mark.usefixtures("each_instruction_set")
@pytest.mark.parametrize("window", [None, 600])
@pytest.mark.parametrize("pages", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("block_size", [4, 16])
def test_sequences_that_share_blocks_are_attended_as_each_of_them_alone(
    block_size: int, pages: torch.dtype, window: int | None
) -> None:
    keys, values = torch.randn(2, 1200, block_size, 2, 64)
    kv = PagedKV(keys.bfloat16(), values.bfloat16())
    if pages == torch.int8:
        (keys, key_scales), (values, value_scales) = quantize_heads(keys, pages), quantize_heads(values, pages)
        kv = PagedKV(keys, values, key_scales, value_scales)
    rng = random.Random(0)
    free = rng.sample(range(1200), 1200)
    # The prompts share their first 500 tokens; then each is that of several continuations.
    table = np.zeros((40, 700 // block_size + 1), dtype=np.int32)
    table[:, : 500 // block_size] = free[: 500 // block_size]
    for seq in range(40):
        own = (500 if seq % 4 == 0 else 620) // block_size
        table[seq] = table[seq - seq % 4]
        table[seq, own:] = rng.sample(free, table.shape[1] - own)
    lengths = [(rng.randint(620, 700), rng.choice((1, 1, 1, 3, 6, 9))) for _ in range(40)]
    starts = np.cumsum([0, *(queries for _, queries in lengths)], dtype=np.int32)
    context_len = np.array([context for context, _ in lengths], dtype=np.int32)
    q = torch.randn(int(starts[-1]), 6, 64).bfloat16()
    together = NATIVE.paged_attention(q, kv, plan_attention_native(starts, context_len, table, kv, window))
    for seq, (_, queries) in enumerate(lengths):
        rows = slice(starts[seq], starts[seq + 1])
        plan = plan_attention_native(
            np.array([0, queries], dtype=np.int32), context_len[seq : seq + 1], table[seq : seq + 1], kv, window
        )
        assert torch.equal(NATIVE.paged_attention(q[rows], kv, plan), together[rows])

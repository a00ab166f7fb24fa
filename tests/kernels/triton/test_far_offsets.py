"""Caches and logits of more than 2^31 elements: offsets of 32 bits would wrap.

On a CPU, the memory that no test writes takes no room: it is mapped and never touched. A wrapped offset is negative and
falls into such memory in front of the tensor, whose zeros make the result wrong.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import fields

import numpy as np
import pytest
import torch
from torch import Tensor

from pagoda_server.kernels import PagedKV
from pagoda_server.kernels.copy_blocks import bytes_of_block, copy_blocks, load_blocks, save_blocks
from pagoda_server.kernels.paged import GREATEST
from pagoda_server.kernels.rope_and_store_kv import rope_and_store_kv
from pagoda_server.kernels.row_sampling import SamplingRows, allocate_rows, sample_rows
from pagoda_server.kernels.triton.rope_and_store_kv import rope_and_store_kv_triton
from pagoda_server.kernels.triton.row_sampling import sample_rows_triton
from tests.kernels.sampling_rows import poisoned
from tests.kernels.test_paged_attention import Batch
from tests.kernels.triton.device import DEVICE
from tests.kernels.triton.test_paged_attention import TOLERANCES, TRITON

pytestmark = pytest.mark.simulated

FAR = 1 << 31  # elements
NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE: no memory is set aside for pages that are not written


def untouched(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor whose memory is not written: torch.empty may fill it."""
    count = math.prod(shape)
    if DEVICE == "cuda":
        if torch.cuda.mem_get_info()[0] < 1.1 * count * dtype.itemsize:
            pytest.skip(f"needs {count * dtype.itemsize / 1e9:.1f} GB of the card's memory")
        return torch.empty(shape, dtype=dtype, device=DEVICE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    mapped = mmap.mmap(-1, (FAR + count) * dtype.itemsize, flags=flags)
    return torch.frombuffer(mapped, dtype=torch.uint8)[FAR * dtype.itemsize :].view(dtype).view(shape)


def far(small: Tensor, first: int) -> Tensor:
    """Return pages of which `small` are those from block `first` on."""
    large = untouched((first + len(small), *small.shape[1:]), small.dtype)
    large[first:] = small
    return large


def far_cache(small: PagedKV) -> tuple[PagedKV, int]:
    """Return a cache that ends with these pages, and its number of blocks before them."""
    first = FAR // small.keys[0].numel() + 1
    scales = (small.key_scales, small.value_scales)
    has_scales = small.key_scales is not None
    return PagedKV(
        far(small.keys, first),
        far(small.values, first),
        *(far(each, first) for each in scales if each is not None and has_scales),
    ), first


@pytest.mark.parametrize("pages", [None, *GREATEST], ids=str)
@pytest.mark.parametrize("queries", [1, 5], ids=["decodes", "chunks"])
def test_attention_reads_pages_beyond_them(queries: int, pages: torch.dtype | None) -> None:
    lengths = [(37, queries), (40, queries)]
    batch = Batch(lengths, heads=4, head_dim=64, block_size=16, dtype=torch.bfloat16, pages=pages)
    q, near, block_table, expected = batch.build(DEVICE)
    kv, first = far_cache(near)
    out = TRITON.paged_attention(q, kv, batch.plan(TRITON, block_table + np.int32(first), kv))
    tolerance = TOLERANCES[torch.bfloat16]
    torch.testing.assert_close(out.cpu().double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *GREATEST], ids=str)
def test_keys_and_values_are_written_to_pages_beyond_them(dtype: torch.dtype) -> None:
    heads, kv_heads, head_dim, block_size = 4, 2, 64, 16
    shape = (2, 3, block_size, kv_heads)
    scales = torch.zeros(shape, device=DEVICE) if dtype in GREATEST else ()
    near = PagedKV(*torch.zeros(*shape, head_dim, device=DEVICE).to(dtype), *scales)
    kv, first = far_cache(near)
    qkv = torch.randn(5, heads + 2 * kv_heads, head_dim, device=DEVICE).bfloat16()
    angle = torch.rand(5, head_dim // 2, device=DEVICE)
    slots = torch.tensor([0, 17, 47, -1, 20], device=DEVICE)
    far_slots = torch.where(slots < 0, slots, slots + first * block_size)
    rope_and_store_kv(qkv, angle.cos(), angle.sin(), slots, near)
    rope_and_store_kv_triton(qkv, angle.cos(), angle.sin(), far_slots, kv)
    tolerances = {torch.float8_e4m3fn: {"atol": 2**-9, "rtol": 0.14}, torch.int8: {"atol": 1, "rtol": 0}}
    tolerance = tolerances.get(dtype, {"atol": 4e-2, "rtol": 4e-2})
    assert near.values.float().any()
    torch.testing.assert_close(kv.keys[first:].float(), near.keys.float(), **tolerance)
    torch.testing.assert_close(kv.values[first:].float(), near.values.float(), **tolerance)
    if near.key_scales is not None and kv.key_scales is not None:
        torch.testing.assert_close(kv.key_scales[first:], near.key_scales, atol=0, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=["bfloat16", "bytes, as float8"])
def test_blocks_beyond_them_are_copied_within_the_cache_and_to_the_host_and_back(dtype: torch.dtype) -> None:
    blocks = torch.arange(4, device=DEVICE).view(4, 1, 1, 1).expand(4, 16, 2, 64)
    kv, first = far_cache(PagedKV(blocks.to(dtype), (blocks + 10).to(dtype)))
    host = torch.zeros(3, bytes_of_block([kv]), dtype=torch.uint8, pin_memory=DEVICE == "cuda")

    def at(*numbers: int) -> Tensor:
        return torch.tensor(numbers, device=DEVICE) + first

    copy_blocks([kv], at(1), at(0))
    save_blocks([kv], at(2, 3), host, [2, 0])
    load_blocks([kv], host, [0, 2], at(1, 3))
    assert kv.keys[first:, 0, 0, 0].tolist() == [1, 3, 2, 2]
    assert kv.values[first:, -1, -1, -1].tolist() == [11, 13, 12, 12]


def check_sampler(logits: Tensor, rows: Tensor) -> None:
    """Compare a draw with penalties and limits with the reference, for which these rows are the first ones."""
    batch, vocab = logits.shape
    near = allocate_rows(batch, vocab, 1, 1, torch.device(DEVICE))
    for field, value in ((near.temperature, 1.0), (near.top_p, 0.9), (near.repetition_penalty, 1.3)):
        field.fill_(value)
    near.num_logprobs.fill_(3)
    near.counts[:, ::3] = 2
    shapes = {each.name: getattr(near, each.name).shape[1:] for each in fields(SamplingRows)}
    num_rows = int(rows.max()) + 1
    sampling = SamplingRows(
        **{name: untouched((num_rows, *shape), getattr(near, name).dtype) for name, shape in shapes.items()}
    )
    for name in shapes:
        getattr(sampling, name)[rows.long()] = getattr(near, name)
    positions = torch.arange(5, 5 + batch, dtype=torch.int32, device=DEVICE)
    expected, actual = poisoned(batch, DEVICE), poisoned(batch, DEVICE)
    sample_rows(logits.clone(), torch.arange(batch, dtype=torch.int32, device=DEVICE), positions, near, expected)
    sample_rows_triton(logits, rows, positions, sampling, actual)
    assert torch.equal(actual.tokens, expected.tokens)
    assert torch.equal(actual.top_ids[:, :3], expected.top_ids[:, :3])
    assert torch.equal(sampling.counts[rows.long()], near.counts)
    assert torch.equal(sampling.last_token[rows.long()], near.last_token)


def test_the_sampler_reads_logits_beyond_them() -> None:
    vocab = 300
    logits = torch.as_strided(untouched((FAR + vocab,), torch.bfloat16), (3, vocab), (FAR // 2, 1))
    logits.copy_(torch.randn(3, vocab, device=DEVICE) * 3)
    check_sampler(logits, torch.tensor([1, 2, 0], dtype=torch.int32, device=DEVICE))


def test_the_sampler_reads_and_counts_the_tokens_of_rows_beyond_them() -> None:
    vocab = 1 << 12
    check_sampler(torch.randn(2, vocab, device=DEVICE) * 3, torch.tensor([0, FAR // vocab], device=DEVICE).int())

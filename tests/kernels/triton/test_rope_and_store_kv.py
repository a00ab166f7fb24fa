from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagoda_server.kernels import HeadNorms, PagedKV
from pagoda_server.kernels.paged import GREATEST
from pagoda_server.kernels.rope_and_store_kv import rope_and_store_kv
from pagoda_server.kernels.triton.configs import IS_INTERPRETED
from pagoda_server.kernels.triton.rope_and_store_kv import rope_and_store_kv_triton
from tests.kernels.triton.device import DEVICE

pytestmark = pytest.mark.simulated

NUM_BLOCKS, BLOCK_SIZE = 5, 4
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def empty_pages(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> PagedKV:
    shape = (2, NUM_BLOCKS, BLOCK_SIZE, num_kv_heads)
    pages = torch.full((*shape, head_dim), torch.nan, device=DEVICE).to(dtype)
    if dtype not in GREATEST:
        return PagedKV(*pages)
    return PagedKV(*pages, *torch.full(shape, torch.nan, device=DEVICE))


def rotations(num_tokens: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.rand(num_tokens, head_dim // 2, device=DEVICE) * 6.3
    return angle.cos(), angle.sin()


def head_norms(head_dim: int, dtype: torch.dtype) -> HeadNorms:
    return HeadNorms(*torch.randn(2, head_dim, device=DEVICE).to(dtype), 1e-6)


def norms_at_once(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> HeadNorms:
    query, key = (
        torch.randn((heads + kv_heads) * head_dim, device=DEVICE)
        .to(dtype)
        .split([heads * head_dim, kv_heads * head_dim])
    )
    return HeadNorms(query, key, 1e-6)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", ["no norms", "norms of heads", "norms of keys", "norms of all heads at once"])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim"),
    [(1, 1, 1, 2), (3, 6, 2, 10), (4, 9, 3, 64), (2, 8, 8, 80), (2, 4, 1, 96), (3, 32, 8, 128), (2, 4, 2, 256)],
)
def test_queries_keys_and_values_are_those_of_the_reference(
    dtype: torch.dtype, kind: str, tokens: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    qkv = (torch.randn(tokens, heads + 2 * kv_heads, head_dim, device=DEVICE) * 3).to(dtype)
    norms = {
        "no norms": None,
        "norms of heads": head_norms(head_dim, dtype),
        "norms of keys": replace(head_norms(head_dim, dtype), query=None),
        "norms of all heads at once": norms_at_once(heads, kv_heads, head_dim, dtype),
    }[kind]
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, device=DEVICE)[:tokens]
    slots[tokens // 2] = -1
    turns, before = rotations(tokens, head_dim), qkv.clone()
    kv, expected_kv = empty_pages(kv_heads, head_dim, dtype), empty_pages(kv_heads, head_dim, dtype)
    q = rope_and_store_kv_triton(qkv, *turns, slots, kv, norms)
    expected = rope_and_store_kv(qkv, *turns, slots, expected_kv, norms)
    tolerance = TOLERANCES[dtype]
    assert q.dtype == dtype
    assert torch.equal(qkv, before)
    torch.testing.assert_close(q, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(kv.keys, expected_kv.keys, atol=tolerance, rtol=tolerance, equal_nan=True)
    torch.testing.assert_close(kv.values, expected_kv.values, atol=0, rtol=0, equal_nan=True)


def test_rotations_are_looked_up_by_position() -> None:
    qkv, (cos, sin) = torch.randn(3, 6 + 2 * 2, 16, device=DEVICE), rotations(50, 16)
    slots, positions = torch.tensor([7, -1, 4], device=DEVICE), torch.tensor([49, 0, 31], device=DEVICE)
    kv, expected_kv = empty_pages(2, 16, torch.float32), empty_pages(2, 16, torch.float32)
    q = rope_and_store_kv_triton(qkv, cos, sin, slots, kv, positions=positions)
    assert torch.equal(q, rope_and_store_kv_triton(qkv, cos[positions], sin[positions], slots, expected_kv))
    torch.testing.assert_close(kv.keys, expected_kv.keys, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(3, 2, 10), (9, 3, 64), (4, 2, 80), (32, 8, 128)])
@pytest.mark.parametrize("dtype", GREATEST, ids=str)
def test_pages_in_8_bits_and_their_scales_are_those_of_the_reference(
    dtype: torch.dtype, has_norms: bool, heads: int, kv_heads: int, head_dim: int
) -> None:
    qkv = torch.randn(4, heads + 2 * kv_heads, head_dim, device=DEVICE).half()
    qkv[:, heads:] *= torch.logspace(-2, 2, 2 * kv_heads, device=DEVICE)[:, None]
    qkv[1, -1] = 0
    norms = head_norms(head_dim, torch.float16) if has_norms else None
    centre = None if has_norms else 10 * torch.randn(kv_heads, head_dim, device=DEVICE)
    slots = torch.tensor([17, 0, -1, 5], device=DEVICE)
    turns = rotations(4, head_dim)
    kv, expected_kv = (empty_pages(kv_heads, head_dim, dtype) for _ in range(2))
    q = rope_and_store_kv_triton(qkv, *turns, slots, kv, norms, centre=centre)
    expected_q = rope_and_store_kv(qkv, *turns, slots, expected_kv, norms, centre=centre)
    torch.testing.assert_close(q, expected_q, atol=4e-3, rtol=4e-3)
    for scales, expected in ((kv.key_scales, expected_kv.key_scales), (kv.value_scales, expected_kv.value_scales)):
        torch.testing.assert_close(scales, expected, atol=0, rtol=4e-3, equal_nan=True)
    for pages, expected in ((kv.keys, expected_kv.keys), (kv.values, expected_kv.values)):
        # A value between two steps may be rounded to either.
        steps = {"atol": 1, "rtol": 0} if dtype == torch.int8 else {"atol": 2**-9, "rtol": 0.14}
        torch.testing.assert_close(pages.float(), expected.float(), **steps, equal_nan=True)
        is_same = (pages.float() == expected.float()) | expected.float().isnan()
        assert is_same.float().mean() > 0.99


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("dtype", GREATEST, ids=str)
def test_a_broken_head_stays_broken_in_8_bits_and_spoils_no_other(dtype: torch.dtype) -> None:
    qkv = torch.randn(2, 4 + 2 * 2, 16, device=DEVICE)
    qkv[0, 5, 3] = qkv[0, 7, 9] = torch.inf if IS_INTERPRETED else torch.nan  # it turns NaN into numbers in float8
    kv = empty_pages(2, 16, dtype)
    rope_and_store_kv_triton(qkv, *rotations(2, 16), torch.tensor([1, 2], device=DEVICE), kv)
    for pages, scales in ((kv.keys, kv.key_scales), (kv.values, kv.value_scales)):
        assert scales is not None
        restored = pages.float() * scales[..., None]
        assert restored.flatten(0, 1)[1:3].isnan().any(dim=-1).tolist() == [[False, True], [False, False]]


def test_a_batch_of_padding_writes_nothing() -> None:
    kv = empty_pages(2, 16, torch.float32)
    qkv, slots = torch.randn(3, 8, 16, device=DEVICE), torch.full((3,), -1, device=DEVICE)
    rope_and_store_kv_triton(qkv, *rotations(3, 16), slots, kv)
    assert kv.keys.isnan().all()
    assert kv.values.isnan().all()

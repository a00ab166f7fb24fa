from __future__ import annotations

import pytest
import torch

from kernels import PagedKV
from kernels.backend import Backend
from tests.kernels.backends import BACKENDS

NUM_BLOCKS, BLOCK_SIZE = 5, 4


def empty_pages(num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> PagedKV:
    shape = (NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim)
    return PagedKV(torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype))


def angles(num_tokens: int, head_dim: int) -> torch.Tensor:
    return torch.rand(num_tokens, head_dim // 2) * 6.3


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "head_dim"), [(1, 1, 1, 2), (3, 6, 2, 10), (7, 9, 3, 64)])
def test_pairs_of_dimensions_turn_like_complex_numbers(
    backend: Backend, dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    kv, angle, slots = empty_pages(kv_heads, head_dim, dtype), angles(tokens, head_dim), torch.randperm(20)[:tokens]
    q = backend.rope_and_store_kv(qkv, angle.cos(), angle.sin(), slots, kv)
    half = head_dim // 2
    turned = torch.complex(qkv[..., :half].double(), qkv[..., half:].double()) * torch.polar(
        torch.ones_like(angle, dtype=torch.float64), angle.double()
    ).unsqueeze(1)
    turned = torch.cat((turned.real, turned.imag), dim=-1)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    stored = kv.keys.flatten(0, 1)[slots].double()
    torch.testing.assert_close(q.double(), turned[:, :heads], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(stored, turned[:, heads : heads + kv_heads], atol=tolerance, rtol=tolerance)
    assert torch.equal(kv.values.flatten(0, 1)[slots], qkv[:, heads + kv_heads :])


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_only_the_named_slots_are_written(backend: Backend) -> None:
    kv, angle = empty_pages(2, 8), angles(4, 8)
    slots = torch.tensor([17, -1, 2, -1])
    q = backend.rope_and_store_kv(torch.randn(4, 7, 8), angle.cos(), angle.sin(), slots, kv)
    assert q.shape == (4, 3, 8)
    assert q.isfinite().all()
    for pages in (kv.keys, kv.values):
        written = ~pages.flatten(0, 1).isnan().any(dim=-1).any(dim=-1)
        assert written.nonzero()[:, 0].tolist() == [2, 17]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_projections_are_left_alone(backend: Backend) -> None:
    qkv, angle = torch.randn(2, 5, 6), angles(2, 6)
    before = qkv.clone()
    backend.rope_and_store_kv(qkv, angle.cos(), angle.sin(), torch.tensor([0, 1]), empty_pages(1, 6))
    assert torch.equal(qkv, before)

from __future__ import annotations

import pytest
import torch

from pagoda_server.kernels import HeadNorms, PagedKV
from pagoda_server.kernels.backend import REFERENCE, Backend
from pagoda_server.kernels.paged import GREATEST
from pagoda_server.kernels.rope_and_store_kv import quantize_heads
from tests.kernels.backends import BACKENDS

NUM_BLOCKS, BLOCK_SIZE = 5, 4


def empty_pages(num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> PagedKV:
    shape = (NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim)
    return PagedKV(torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype))


def mixing(head_dim: int) -> torch.Tensor:
    """The matrix of `mix`, from its definition."""
    half = head_dim // 2
    width = half & -half
    signs = torch.zeros(head_dim, head_dim, dtype=torch.float64)
    for row in range(head_dim):
        for column in range(head_dim):
            if row % half // width == column % half // width:
                common = (row % half % width) & (column % half % width)
                odd = common.bit_count() + (row // half) * (column // half)
                signs[row, column] = (-1) ** odd
    return signs / (2 * width) ** 0.5


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
def test_rotations_are_looked_up_by_position(backend: Backend) -> None:
    qkv, slots, table = torch.randn(4, 7, 8), torch.tensor([17, -1, 2, 5]), angles(9, 8)
    positions = torch.tensor([8, 0, 8, 3])
    kv, expected_kv = empty_pages(2, 8), empty_pages(2, 8)
    q = backend.rope_and_store_kv(qkv, table.cos(), table.sin(), slots, kv, positions=positions)
    angle = table[positions]
    assert torch.equal(q, backend.rope_and_store_kv(qkv, angle.cos(), angle.sin(), slots, expected_kv))
    torch.testing.assert_close(kv.keys, expected_kv.keys, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_projections_are_left_alone(backend: Backend) -> None:
    qkv, angle = torch.randn(2, 5, 6), angles(2, 6)
    before = qkv.clone()
    backend.rope_and_store_kv(qkv, angle.cos(), angle.sin(), torch.tensor([0, 1]), empty_pages(1, 6))
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [False, True])
def test_queries_and_keys_but_not_values_are_normalised_first_by_head_or_at_once(
    backend: Backend, dtype: torch.dtype, at_once: bool
) -> None:
    heads, kv_heads, head_dim, tokens = 6, 2, 16, 3
    query_size, key_size = (heads * head_dim, kv_heads * head_dim) if at_once else (head_dim, head_dim)
    qkv = (torch.randn(tokens, heads + 2 * kv_heads, head_dim) * 7).to(dtype)
    norms = HeadNorms(torch.randn(query_size).to(dtype), torch.randn(key_size).to(dtype), 1e-6)
    angle, slots = angles(tokens, head_dim), torch.tensor([3, 0, 9])
    kv, expected_kv = empty_pages(kv_heads, head_dim, dtype), empty_pages(kv_heads, head_dim, dtype)
    queries, keys, values = qkv.double().split([heads, kv_heads, kv_heads], dim=1)

    def normalised(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(tokens, -1, len(weight))
        rows = (rows / (rows.square().mean(dim=-1, keepdim=True) + norms.eps).sqrt()).to(dtype) * weight
        return rows.view(x.shape)

    by_hand = torch.cat((normalised(queries, norms.query), normalised(keys, norms.key), values.to(dtype)), dim=1)
    before = qkv.clone()
    q = backend.rope_and_store_kv(qkv, angle.cos(), angle.sin(), slots, kv, norms)
    expected = REFERENCE.rope_and_store_kv(by_hand, angle.cos(), angle.sin(), slots, expected_kv)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(q, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(kv.keys, expected_kv.keys, atol=tolerance, rtol=tolerance, equal_nan=True)
    assert torch.equal(kv.values.flatten(0, 1)[slots], values.to(dtype))
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("key_size", [16, 32])
def test_queries_are_left_as_they_are_where_keys_alone_have_a_norm(backend: Backend, key_size: int) -> None:
    qkv, angle, slots = torch.randn(3, 10, 16) * 7, angles(3, 16), torch.tensor([3, 0, 9])
    key = torch.randn(key_size)
    kv, kv_of_both, kv_of_none = (empty_pages(2, 16) for _ in range(3))
    q = backend.rope_and_store_kv(qkv, angle.cos(), angle.sin(), slots, kv, HeadNorms(None, key, 1e-6))
    both = HeadNorms(torch.ones(3 * key_size), key, 1e-6)
    backend.rope_and_store_kv(qkv, angle.cos(), angle.sin(), slots, kv_of_both, both)
    torch.testing.assert_close(kv.keys, kv_of_both.keys, equal_nan=True)
    assert torch.equal(q, backend.rope_and_store_kv(qkv, angle.cos(), angle.sin(), slots, kv_of_none))


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("head_dim", [8, 10, 16, 64, 80, 96])
@pytest.mark.parametrize("dtype", GREATEST, ids=str)
@pytest.mark.parametrize("has_centre", [False, True])
def test_pages_in_8_bits_hold_mixed_keys_less_their_centre_and_values(
    backend: Backend, dtype: torch.dtype, head_dim: int, has_centre: bool
) -> None:
    qkv, angle, slots = torch.randn(4, 7, head_dim).bfloat16(), angles(4, head_dim), torch.tensor([17, -1, 2, 5])
    qkv[:, -2:] *= torch.tensor([1e-3, 1e3])[None, :, None]
    qkv[3, -1] = 0
    centre = 30 * torch.randn(2, head_dim) if has_centre else None
    shape = (NUM_BLOCKS, BLOCK_SIZE, 2)
    pages = torch.full((2, *shape, head_dim), torch.nan).to(dtype)
    scales = torch.full((2, *shape), torch.nan)
    kv, turns = PagedKV(*pages, *scales), (angle.cos(), angle.sin())
    q = backend.rope_and_store_kv(qkv, *turns, slots, kv, centre=centre)
    whole = empty_pages(2, head_dim)
    rotated = REFERENCE.rope_and_store_kv(qkv.float(), *turns, slots, whole)
    torch.testing.assert_close(q.double(), rotated.double() @ mixing(head_dim), atol=1e-2, rtol=1e-2)
    assert (~scales[0].flatten(0, 1).isnan().any(dim=-1)).nonzero()[:, 0].tolist() == [2, 5, 17]
    keys = (whole.keys if centre is None else whole.keys - centre).double() @ mixing(head_dim)
    for stored, scale, exact in ((kv.keys, kv.key_scales, keys), (kv.values, kv.value_scales, whole.values)):
        assert scale is not None
        at = slots[slots >= 0]
        restored = (stored.float() * scale[..., None]).flatten(0, 1)[at]
        exact = exact.flatten(0, 1)[at].float()
        greatest = exact.abs().amax(dim=-1, keepdim=True)
        expected_scale = torch.where(greatest == 0, 1.0, greatest / GREATEST[dtype])[..., 0]
        torch.testing.assert_close(scale.flatten(0, 1)[at], expected_scale, atol=0, rtol=1e-5)
        if dtype == torch.int8:
            limit = (greatest / 254).expand(exact.shape)
        else:  # three bits of mantissa; below 2^-6 of the scale, steps of 2^-9
            limit = (exact.abs() / 16).maximum(greatest / 448 * 2**-10)
        assert ((restored - exact).abs() <= limit * 1.001).all()


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", GREATEST, ids=str)
def test_large_dimensions_that_keys_share_cost_no_accuracy_of_scores_in_8_bits(
    backend: Backend, dtype: torch.dtype
) -> None:
    tokens, head_dim = 20, 64
    qkv, angle, slots = torch.randn(tokens, 3, head_dim), torch.zeros(tokens, head_dim // 2), torch.arange(tokens)
    centre = torch.zeros(1, head_dim)
    centre[0, [3, 31, 63]] = torch.tensor([150.0, -90.0, 120.0])
    qkv[:, 1] += centre[0]
    qkv[:, 1, 7] *= 20  # differs between keys, so that mixing alone helps
    shape = (2, NUM_BLOCKS, BLOCK_SIZE, 1)
    kv = PagedKV(
        torch.zeros(*shape, head_dim).to(dtype)[0], torch.zeros(*shape, head_dim).to(dtype)[1], *torch.zeros(shape)
    )
    q = backend.rope_and_store_kv(qkv, angle.cos(), angle.sin(), slots, kv, centre=centre)
    assert kv.key_scales is not None
    keys = (kv.keys.float() * kv.key_scales[..., None]).flatten(0, 1)[:, 0]

    def errors(queries: torch.Tensor, keys: torch.Tensor) -> float:
        """What is wrong in scores beside a number for each query."""
        wrong = queries @ keys.T - qkv[:, 0] @ qkv[:, 1].T
        return (wrong - wrong.mean(dim=1, keepdim=True)).square().mean().sqrt().item() / head_dim**0.5

    naive, scales = quantize_heads(qkv[:, 1], dtype)
    assert errors(q[:, 0], keys) < errors(qkv[:, 0], naive.float() * scales[:, None]) / 5


@pytest.mark.parametrize("dtype", GREATEST, ids=str)
def test_a_head_of_zeros_has_scale_1_and_a_broken_one_stays_broken(dtype: torch.dtype) -> None:
    heads = torch.zeros(3, 8)
    heads[1, 2], heads[2, 3] = torch.nan, torch.inf
    values, scales = quantize_heads(heads, dtype)
    assert scales[0] == 1
    restored = values.float() * scales[:, None]
    assert (restored[0] == 0).all()
    assert restored.isnan().any(dim=1).tolist() == [False, True, True]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_broken_head_stays_broken_in_int8_and_spoils_no_other(backend: Backend) -> None:
    qkv, angle, slots = torch.randn(2, 4 + 2 * 2, 20), angles(2, 20), torch.tensor([1, 2])
    qkv[0, 5, 3], qkv[0, 7, 19], qkv[1, 6, 0], qkv[1, 4] = torch.nan, torch.nan, torch.inf, 1e-45
    shape = (2, NUM_BLOCKS, BLOCK_SIZE, 2)
    kv = PagedKV(*torch.zeros(*shape, 20, dtype=torch.int8), *torch.zeros(shape))
    backend.rope_and_store_kv(qkv, angle.cos(), angle.sin(), slots, kv)
    for pages, scales, expected in (
        (kv.keys, kv.key_scales, [[False, True], [False, False]]),
        (kv.values, kv.value_scales, [[False, True], [True, False]]),
    ):
        assert scales is not None
        restored = pages.float() * scales[..., None]
        assert restored.flatten(0, 1)[1:3].isnan().any(dim=-1).tolist() == expected

from __future__ import annotations

import math

import torch

from pagoda_server.kernels.gumbel import gumbel
from tests.kernels.plain_noise import noise_key


def finalize(x: int) -> int:
    """MurmurHash3's 32-bit finalizer, on Python's integers."""
    x ^= x >> 16
    x = x * 0x85EB_CA6B & 0xFFFF_FFFF
    x ^= x >> 13
    x = x * 0xC2B2_AE35 & 0xFFFF_FFFF
    return x ^ x >> 16


def noise_by_hand(key: int, token: int) -> float:
    key &= 0xFFFF_FFFF_FFFF_FFFF
    bits = finalize(finalize(token ^ key & 0xFFFF_FFFF) ^ key >> 32)
    return -math.log(-math.log((bits >> 8 | 1) / 2**24))


def test_noise_is_what_integer_arithmetic_makes_of_key_and_token() -> None:
    keys = [noise_key(seed, position) for seed, position in ((0, 0), (1, 7), (2**64 - 1, 100_000), (2**63, 3))]
    tokens = [0, 1, 31_337, 151_935]
    noise = gumbel(torch.tensor(keys)[:, None], torch.tensor(tokens))
    expected = torch.tensor([[noise_by_hand(key, token) for token in tokens] for key in keys])
    torch.testing.assert_close(noise, expected, atol=1e-5, rtol=1e-5)


def test_every_possible_noise_is_as_exact_as_compiled_draws_take_it_to_be() -> None:
    uniform = torch.arange(1, 2**24, 2, dtype=torch.float64) * 2.0**-24
    noise = uniform.float().log_().neg_().log_().neg_()
    exact = uniform.log_().neg_().log_().neg_()
    assert (exact - noise).abs().max() < 2**-16


def test_noise_does_not_depend_on_what_it_is_computed_beside() -> None:
    keys = torch.tensor([noise_key(5, 9), noise_key(6, 9)])
    tokens = torch.arange(1000)
    together = gumbel(keys[:, None], tokens)
    assert torch.equal(gumbel(keys[1], tokens[123:457]), together[1, 123:457])


def test_noise_is_finite_and_distributed_as_gumbel() -> None:
    noise = gumbel(torch.tensor([noise_key(1, position) for position in range(64)])[:, None], torch.arange(4096))
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.5772) < 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.02
    # Adjacent positions and adjacent tokens share nothing.
    for other in (noise.roll(1, 0), noise.roll(1, 1)):
        assert abs(torch.corrcoef(torch.stack((noise.flatten(), other.flatten())))[0, 1]) < 0.01


def test_seed_and_position_both_change_the_key_and_do_not_cancel() -> None:
    keys = {noise_key(seed, position) for seed in range(100) for position in range(100)}
    assert len(keys) == 10_000
    assert all(-(2**63) <= key < 2**63 for key in keys)

"""Counter-based noise: a function of (seed, position, token id) alone, the same at any load.

A 64-bit key is made from seed and position; two rounds of 32-bit integer arithmetic then turn key and token id into
noise, the same on every device.
"""

from __future__ import annotations

from torch import Tensor

_MASK_64 = 0xFFFF_FFFF_FFFF_FFFF

# Uniform numbers are odd multiples of 2^-24: never 0 or 1, exact in float32, so their noise is finite.
_STEP = 2.0**-24


def noise_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """A splitmix64 step (Steele et al., 2014) over the seed, then over the position.

    seeds, positions, return  [n] int64, where unsigned numbers are the same 64 bits
    """
    return _mix_64(_mix_64(seeds) ^ positions)


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Gumbel noise -log(-log u) of each token.

    keys, token_ids  int64, shapes that broadcast; keys by `noise_keys`
    return           float32 of the broadcast shape

    u comes from two rounds of the 32-bit finalizer of MurmurHash3 (Appleby, 2011), keyed by the key's halves.
    """
    bits = token_ids.int() ^ keys.int()
    _mix_32_(bits)
    bits ^= (keys >> 32).int()
    _mix_32_(bits)
    bits.bitwise_right_shift_(8).bitwise_and_(0xFF_FFFF).bitwise_or_(1)
    return bits.float().mul_(_STEP).log_().neg_().log_().neg_()


def _mix_64(x: Tensor) -> Tensor:
    """On int64 whose sums and products wrap; a right shift must not carry the sign along, hence the masks."""
    x = x + _signed(0x9E37_79B9_7F4A_7C15, 64)
    x = (x ^ ((x >> 30) & (_MASK_64 >> 30))) * _signed(0xBF58_476D_1CE4_E5B9, 64)
    x = (x ^ ((x >> 27) & (_MASK_64 >> 27))) * _signed(0x94D0_49BB_1331_11EB, 64)
    return x ^ ((x >> 31) & (_MASK_64 >> 31))


def _mix_32_(x: Tensor) -> None:
    """In place, on int32 whose products wrap; a right shift must not carry the sign along, hence the masks."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= _signed(0x85EB_CA6B, 32)
    x ^= (x >> 13).bitwise_and_(0x7_FFFF)
    x *= _signed(0xC2B2_AE35, 32)
    x ^= (x >> 16).bitwise_and_(0xFFFF)


def _signed(bits: int, width: int) -> int:
    return bits - (1 << width) if bits >> (width - 1) else bits

"""The keys of noise on Python's integers."""

from __future__ import annotations

_MASK = 0xFFFF_FFFF_FFFF_FFFF


def noise_key(seed: int, position: int) -> int:
    """64 bits, as a signed integer."""
    key = splitmix(splitmix(seed & _MASK) ^ position)
    return key - (1 << 64) if key >> 63 else key


def splitmix(x: int) -> int:
    """A step of splitmix64."""
    x = (x + 0x9E37_79B9_7F4A_7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
    return x ^ (x >> 31)

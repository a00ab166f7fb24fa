"""Stride keys: short names of a prompt's first 64 tokens, its first 128, and so on.

Engines name what their prefix caches hold by them, and routers what a prompt begins with. A key is a hint: whoever
uses cached content has compared addresses of 32 bytes, so that a collision costs time and never shows another's prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

STRIDE = 64  # tokens


def first_key(salt: bytes) -> int:
    """Return where the keys of prompts with this salt start. Prompts of different salts never share a key."""
    return int.from_bytes(blake2b(salt, digest_size=8).digest(), "little")


def stride_keys(previous: int, tokens: Sequence[int]) -> list[int]:
    """Return the keys of the full strides of these tokens, which follow the key `previous`.

    tokens  ids below 2**32
    """
    content = array("I", tokens).tobytes()
    size = 4 * STRIDE
    key, keys = previous.to_bytes(8, "little"), []
    for start in range(0, len(content) - size + 1, size):
        key = blake2b(key + content[start : start + size], digest_size=8).digest()
        keys.append(int.from_bytes(key, "little"))
    return keys

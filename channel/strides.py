"""Stride keys: short names of a prompt's first 64 tokens, its first 128, and so on.

An engine reports which keys its prefix cache holds, and a router computes the keys of each prompt. A key is a hint.
Before an engine uses cached content, it compares full addresses of 32 bytes: a collision of keys costs time, and never
shows another prompt's content.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b, sha256

STRIDE = 64  # tokens
STRIDE_BYTES = 4 * STRIDE

IDENTITY_BYTES = 32  # of an adapter: a SHA-256
_EMPTY = blake2b(digest_size=8)  # copied for each key: to make one takes longer
_ADAPTED = b"\xff"  # no salt starts with this byte, because it is in no text's UTF-8


@lru_cache(maxsize=256)  # most requests have no salt, so they share one root
def chain_root(salt: str, adapter: bytes = b"") -> bytes:
    """Return where the addresses of a prompt's blocks start. Those of different salts or adapters are never the same.

    adapter  the identity of the adapter that the prompt is computed with; empty: the base model
    """
    if not adapter:
        return sha256(salt.encode()).digest()
    if len(adapter) != IDENTITY_BYTES:  # else its end could be the start of a salt
        raise ValueError(f"an adapter's identity has {IDENTITY_BYTES} bytes, not {len(adapter)}")
    return sha256(_ADAPTED + adapter + salt.encode()).digest()


def first_key(root: bytes) -> int:
    """Return where the stride keys of prompts with this chain_root start."""
    return int.from_bytes(root[:8], "little")


def stride_keys(previous: int, tokens: Sequence[int]) -> list[int]:
    """Return the keys of the full strides of these tokens, which follow the key `previous`.

    tokens  ids below 2**32
    """
    return keys_of_strides(previous, full_strides(tokens))


def full_strides(tokens: Sequence[int]) -> bytes:
    """Return what `keys_of_strides` reads of these tokens: STRIDE_BYTES for each full stride."""
    whole = len(tokens) // STRIDE * STRIDE
    return array("I", tokens if whole == len(tokens) else tokens[:whole]).tobytes()  # to slice all tokens takes time


def keys_of_strides(previous: int, content: bytes) -> list[int]:
    key, digests = previous.to_bytes(8, "little"), []
    for (stride,) in struct.iter_unpack(f"{STRIDE_BYTES}s", content):
        digest = _EMPTY.copy()
        digest.update(key)
        digest.update(stride)
        digests.append(key := digest.digest())
    return list(struct.unpack(f"<{len(digests)}Q", b"".join(digests)))

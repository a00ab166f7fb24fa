"""Changes JSON as a tree: changes of single bytes rarely leave a document that a reader takes."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 32, (1 << 63), 1 << 64, 10**30,
    0.0, -0.5, 1e-30, 1e308, float("nan"), float("inf"), "", "a", " ", "\0", "\ud800", "\u2028", "x" * 2000,
    [], {}, [[]], [None], {"": None},
]  # fmt: skip


def mutated(data: bytes, max_size: int, seed: int) -> bytes:
    """Change one of the documents, which zero bytes separate, as a tree or as bytes. A fuzzer's custom mutator."""
    chance = random.Random(seed)
    documents = data.split(b"\0")
    at = chance.randrange(len(documents))
    try:
        document = json.loads(documents[at]) if b"[[[[[[[[" not in documents[at] else None
    except (ValueError, RecursionError):
        document = None
    if document is None or chance.random() < 0.1:
        start, end = sorted(chance.randrange(len(data) + 1) for _ in range(2))
        return (data[:start] + chance.randbytes(chance.randrange(4)) + data[chance.choice((start, end)) :])[:max_size]
    try:
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            document = _changed(document, chance)
        documents[at] = json.dumps(document, separators=(",", ":")).encode()
    except RecursionError:  # it has become too deep to be written
        return data[:max_size]
    return b"\0".join(documents)[:max_size]


def _changed(document: Any, chance: random.Random) -> Any:
    places = [(holder, key) for holder in _holders(document) for key in _keys(holder)]
    if not places:
        return copy.deepcopy(chance.choice(_VALUES))
    (holder, key), (other, other_key) = chance.choice(places), chance.choice(places)
    match chance.randrange(4):
        case 0:
            holder[key] = copy.deepcopy(chance.choice(_VALUES))  # later changes must not reach the list
        case 1:
            holder[key] = json.loads(json.dumps(other[other_key]))  # a copy, so that nothing holds itself
        case 2 if isinstance(holder, dict):
            holder[str(other_key)] = holder.pop(key)
        case 3 if isinstance(holder[key], int | float):
            holder[key] = holder[key] * chance.choice((-1, 2, 0.5, 1000)) + chance.choice((-1, 0, 1))
        case _:
            del holder[key]
    return document


def _holders(value: Any) -> list[Any]:
    """The objects and lists in a document."""
    found, left = [], [value]
    while left:
        each = left.pop()
        if isinstance(each, dict | list):
            found.append(each)
            left += each.values() if isinstance(each, dict) else each
    return found


def _keys(holder: Any) -> list[Any]:
    return list(holder) if isinstance(holder, dict) else list(range(len(holder)))

"""A client's own names of the fields that errors name as the protocol does."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, MutableMapping
from typing import TypeAlias

# What a translation notes: where a client has put a part of a message, by the protocol's path of that part.
FieldPlaces: TypeAlias = MutableMapping[str, str]
Rule: TypeAlias = tuple[str, str]  # a pattern and its replacement

_OF_ALL = (
    (r"^request$", "body"),
    (r"^request_id$", "x-request-id"),
    (r"^lora_name$", "model"),  # an adapter is named in the model's place
    (r"^cache\.salt$", "cache_salt"),
    (r"^(sampling|stopping|output|chat)\.", ""),
)
_PART = re.compile(r"[.\[]|$")  # where a part of a path ends


class FieldNames:
    """What an API calls the protocol's fields.

    rules   each is applied to what the one before it has left
    inside  the same for the part of a path behind a noted place. They are applied before places are: afterwards a path
            looks like one that a translation has named, where the client's own `id` is no `tool_call_id`.
    """

    def __init__(self, *rules: Rule, inside: Iterable[Rule] = ()) -> None:
        self._inside = [(re.compile(pattern), replacement) for pattern, replacement in inside]
        self._rules = [(re.compile(pattern), replacement) for pattern, replacement in (*rules, *_OF_ALL)]

    def of(self, path: str, places: Mapping[str, str] | None = None) -> str:
        """The API's name of a field, by the place that was noted for it or for the longest part of its path."""
        for pattern, replacement in self._inside:
            path = pattern.sub(replacement, path)
        if places:
            ends = [match.start() for match in _PART.finditer(path)]
            known = (end for end in reversed(ends) if path[:end] in places)
            if (end := next(known, None)) is not None:
                path = places[path[:end]] + path[end:]
        for pattern, replacement in self._rules:
            path = pattern.sub(replacement, path)
        return path

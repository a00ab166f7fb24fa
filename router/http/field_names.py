"""A client's own names of the fields that errors name as the protocol does."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from typing import TypeAlias

# What a translation notes: where a client has put a part of a message, by the protocol's path of that part.
Places: TypeAlias = MutableMapping[str, str]

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

    rules  patterns and their replacements, each applied to what the one before it has left
    """

    def __init__(self, *rules: tuple[str, str]) -> None:
        self._rules = [(re.compile(pattern), replacement) for pattern, replacement in (*rules, *_OF_ALL)]

    def of(self, path: str, places: Mapping[str, str] | None = None) -> str:
        """The API's name of a field, by the place that was noted for it or for the longest part of its path."""
        if places:
            ends = [match.start() for match in _PART.finditer(path)]
            known = (end for end in reversed(ends) if path[:end] in places)
            if (end := next(known, None)) is not None:
                path = places[path[:end]] + path[end:]
        for pattern, replacement in self._rules:
            path = pattern.sub(replacement, path)
        return path

"""What a tool's JSON schema says of its arguments: their types, what is inside them, and how their text is bounded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..text.chat_template import Json

_MAX_STEPS = 16  # from a reference to another, or from an alternative to its own
_NO_SCHEMA: dict[str, Json] = {}  # one object: grammars know a schema by its identity
_TYPES = ((str, "string"), (bool, "boolean"), (int | float, "number"), (list, "array"), (dict, "object"))

# A schema with one of them may ask for what its list of properties does not show.
_COMBINED = {"allOf", "anyOf", "oneOf", "if"}


@dataclass(frozen=True, slots=True)
class Schema:
    """One place in a schema.

    value  the schema there; an empty one says nothing
    root   the whole, in which references are looked up
    """

    value: Mapping[str, Json]
    root: Mapping[str, Json]

    @classmethod
    def of(cls, parameters: Mapping[str, Json]) -> Schema:
        return cls(parameters, parameters).at(parameters)

    def at(self, value: Json | Mapping[str, Json]) -> Schema:
        """The place of a schema inside this one, its references followed."""
        for _ in range(_MAX_STEPS):
            if not isinstance(value, Mapping):
                break
            if not isinstance(reference := value.get("$ref"), str):
                return Schema(value, self.root)
            value = self._referred(reference)
        return Schema(_NO_SCHEMA, self.root)

    def member(self, name: str) -> Schema:
        properties = self.value.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            return self.at(properties[name])
        return self.at(self.value.get("additionalProperties"))

    @property
    def item(self) -> Schema:
        return self.at(self.value.get("items"))

    @property
    def members(self) -> list[tuple[str, Schema, bool]] | None:
        """The properties, and whether each is required; None: the schema does not list what it asks for."""
        properties = self.value.get("properties")
        listed = list(properties) if isinstance(properties, Mapping) else []
        required = self.value.get("required")
        names = [str(name) for name in required] if isinstance(required, list) else []
        if _COMBINED & self.value.keys() or not (listed or names or self.value.get("additionalProperties") is False):
            return None
        return [(name, self.member(name), name in names) for name in dict.fromkeys([*listed, *names])]

    @property
    def options(self) -> list[Json] | None:
        """The values of an enumeration; None: it is none."""
        if "const" in self.value:
            return [self.value["const"]]
        options = self.value.get("enum")
        return list(options) if isinstance(options, list) and options else None

    @property
    def alternatives(self) -> list[Schema]:
        """Schemas of which one has to hold, if this one says no more than that."""
        for key in ("anyOf", "oneOf", "allOf"):
            found = self.value.get(key)
            if isinstance(found, list) and found and (key != "allOf" or len(found) == 1):
                return [self.at(each) for each in found]
        return []

    @property
    def types(self) -> frozenset[str]:
        """Types that the value may have, an integer as a number; none: the schema does not say."""
        return self._types(_MAX_STEPS)

    def _types(self, steps: int) -> frozenset[str]:
        given = self.value.get("type")
        names = [given] if isinstance(given, str) else given if isinstance(given, list) else []
        if names:
            return frozenset("number" if name == "integer" else str(name) for name in names)
        if self.options is not None:
            return frozenset(_type_of(option) for option in self.options)
        if not steps:
            return frozenset()
        found = [each._types(steps - 1) for each in self.alternatives]
        return frozenset().union(*found) if all(found) else frozenset()

    @property
    def patterns(self) -> list[str]:
        """Regular expressions for the whole of a string, in the syntax of Rust's crate `regex`."""
        least, most = self.value.get("minLength"), self.value.get("maxLength")
        found = []
        if isinstance(least, int) or isinstance(most, int):
            found.append(f"(?s:.{{{least or 0},{most if isinstance(most, int) else ''}}})")
        if isinstance(pattern := self.value.get("pattern"), str) and (whole := _whole(pattern)):
            found.append(whole)
        return found

    @property
    def alone(self) -> Mapping[str, Json]:
        """This schema as one of its own, with what its references may point at."""
        definitions = {key: self.root[key] for key in ("$defs", "definitions") if key in self.root}
        return {**definitions, **self.value}

    def _referred(self, reference: str) -> Json | Mapping[str, Json]:
        value: Json | Mapping[str, Json] = self.root
        for step in reference.removeprefix("#").split("/")[1:]:
            value = value.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(value, Mapping) else None
        return value


def _type_of(value: Json) -> str:
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "null")


def _whole(pattern: str) -> str:
    """A pattern that may be found anywhere in a string, for the whole string; empty: it cannot be said."""
    is_first, is_last = pattern.startswith("^"), re.search(r"(?<!\\)(?:\\\\)*\$$", pattern) is not None
    plain = re.sub(r"\\.|\[(?:\\.|[^\]])*\]", "", pattern)
    while (shorter := re.sub(r"\([^()]*\)", "", plain)) != plain:
        plain = shorter
    if "|" in plain and (is_first or is_last):  # an anchor would belong to one alternative alone
        return ""
    inner = pattern[is_first : len(pattern) - is_last]
    return f"{'' if is_first else '(?s:.*)'}(?:{inner}){'' if is_last else '(?s:.*)'}"

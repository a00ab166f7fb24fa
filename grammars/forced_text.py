"""How long a text a grammar may force at once: bytes to which there is no alternative, from one token on.

llguidance follows forced text to its end, in one call, and no limit of its own ends that: a grammar of a few bytes that
repeats a repeated text holds up the caller for a minute. So the grammar's source is read beforehand. The result is an
upper bound, often far above the real length, and math.inf where the source does not show one: for a grammar or a schema
that refers to itself, and for what is not understood here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

_PUNCTUATION = 8  # bytes around a value or a key
_NUMBER = 64  # bytes of a number, or of a text in one of the formats, that has one form only
_LONGEST_STYLE = 400  # characters of x-guidance: it may hold separators of any length
# They say nothing of the text, or their own values are read with the key that they belong to.
_PLAIN = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions"}
_REFERENCES = {"$ref", "$dynamicRef", "$recursiveRef"}
_LARK = re.compile(
    r"""
      (?P<comment>//[^\n]*|\#[^\n]*)
    | (?P<json>%json\s*)
    | (?P<text>"(?:\\.|[^"\\])*"i?|<[^>\n]*>)
    | (?P<regex>/(?:\\.|[^/\\])+/[a-z]*)
    | (?P<rule>^[?!]*\w+(?:\[[^\]\n]*\])?(?:\.-?\d+)?\s*:)
    | (?:\{\s*|~\s*)(?P<times>\d+)(?:\s*(?:,\s*\d*|\.\.\s*\d+))?(?:\s*\})?
    | (?P<name>\w+)
    | (?P<either>\|)
    | (?P<opens>[(\[])
    | (?P<closes>[)\]])
    | (?P<again>[*+])
    | (?P<other>[^\s?])
    """,
    re.VERBOSE | re.MULTILINE,
)
# The longest text that is forced in a part of a grammar, and whether every text of that part has alternatives.
_Part: TypeAlias = tuple[float, bool]


def longest_forced(format: str, value: str | Sequence[str]) -> float:
    """Bound the bytes that a grammar may force at once. Its format and value are those of `grammar_of`; it compiles."""
    try:
        return _longest_forced(format, value)
    except RecursionError:  # so many of its parts are within each other
        return math.inf


def _longest_forced(format: str, value: str | Sequence[str]) -> float:
    if format == "json_object":
        return _PUNCTUATION
    if format == "choice":
        return max(len(option.encode()) for option in value)
    if format == "regex":
        return _of_regex(str(value))
    if format == "json_schema":
        return _forced_in_schema(json.loads(str(value)))
    return _Lark(str(value), _forced_in_schema, unknown=math.inf).of("start")


class _Tally:
    """Adds up the bytes of a pattern's parts, each as often as it must be repeated."""

    def __init__(self) -> None:
        # Each open group has the length of its longest alternative, of the current one, and of that one's last part.
        self._groups: list[list[float]] = [[0, 0, 0]]

    def part(self, num_bytes: float) -> None:
        self._groups[-1][1] += num_bytes
        self._groups[-1][2] = num_bytes

    def times(self, least: int) -> None:
        """Repeat the last part. Where it need not be there at all, it counts once: it is followed when it has begun."""
        if least > 1:
            self._groups[-1][1] += self._groups[-1][2] * (least - 1)
            self._groups[-1][2] *= least

    def either(self) -> None:
        longest, current, _ = self._groups[-1]
        self._groups[-1] = [max(longest, current), 0, 0]

    def opens(self) -> None:
        self._groups.append([0, 0, 0])

    def closes(self) -> None:
        if len(self._groups) > 1:
            longest, current, _ = self._groups.pop()
            self.part(max(longest, current))

    @property
    def total(self) -> float:
        while len(self._groups) > 1:
            self.closes()
        return max(self._groups[0][:2])


_REGEX = re.compile(
    r"""
      (?P<escape>\\(?:[pPxuU]\{[^}]*\}|[pP].|x..|u....|U........|.))
    | (?P<set>\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\\\]])*\])
    | (?P<opens>\((?:\?(?:P?<\w+>|[a-zA-Z-]*:|[=!]))?)
    | (?P<closes>\))
    | (?P<either>\|)
    | \{(?P<least>\d+)(?:,\d*)?\}
    | (?P<again>[*+?])
    | (?P<part>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_MOST_DIGITS = 9


def _of_regex(regex: str) -> float:
    tally = _Tally()
    for found in _REGEX.finditer(regex):
        match found.lastgroup:
            case "opens":
                tally.opens()
            case "closes":
                tally.closes()
            case "either":
                tally.either()
            case "least":
                tally.times(_count(found["least"]))
            case "again":
                pass
            case _:
                tally.part(1 if found[0].isascii() else 4)
    return tally.total


def _count(digits: str) -> int:
    return int(digits) if len(digits) <= _MOST_DIGITS else 10**_MOST_DIGITS


def longest_repeated(format: str, value: str | Sequence[str]) -> float:
    """Return the longest text, in bytes, that a regular expression or a rule of a grammar asks for at least.

    Bounds what compiling it costs. Unlike `longest_forced`, it takes what it does not understand for nothing, and needs
    no grammar that compiles.
    """
    if format == "regex":
        return _of_regex(str(value))
    if format == "json_schema":
        return _patterns_of(json.loads(str(value)))
    return _Lark(str(value), _patterns_of, unknown=0).longest if format == "ebnf_grammar" else 0


def _patterns_of(schema: object) -> float:
    longest, waiting = 0.0, [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            patterns = [value.get("pattern"), value.get("whitespace_pattern")]
            named = value.get("patternProperties")
            patterns += named if isinstance(named, dict) else []
            longest = max([longest, *(_of_regex(each) for each in patterns if isinstance(each, str))])
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return longest


def names_in(grammar: str) -> set[str]:
    """Return the words of a grammar in Lark, among which are the names of its rules and terminals."""
    return {_name_of(text) for kind, text in _lark_parts(grammar) if kind in ("rule", "name")}


def _name_of(rule: str) -> str:
    """The name in the head of a rule or terminal, such as `?name.2:`."""
    return re.sub(r"[?!\s]|[\[.:].*", "", rule)


def levels_of(schema: object) -> int:
    """Bound how deep the values of a JSON schema lie within each other, with each of its references followed once."""
    depths: dict[int, int] = {}  # by object: they live while the schema does
    pointers = set[str]()

    def depth(value: object) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        if inner is None:
            return 0
        if isinstance(value, dict):
            pointers.update(each for key, each in value.items() if key in _REFERENCES and isinstance(each, str))
        found = depths[id(value)] = 1 + max(map(depth, inner), default=0)
        return found

    whole = depth(schema)
    return whole + sum(depths.get(id(target_of(schema, pointer)), whole) for pointer in pointers)


def target_of(root: object, pointer: str) -> object:
    """What a reference in a JSON schema points to; an object of no known meaning if that is not in the schema."""
    target = root
    for part in pointer.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(target, Mapping) or name not in target:
            return {"unknown": True}
        target = target[name]
    return target if pointer.startswith("#") else {"unknown": True}


def schemas_in(grammar: str, parse_float: Callable[[str], object] = float) -> list[object]:
    """Return the JSON schemas that stand in a grammar in Lark. parse_float: see json.JSONDecoder."""
    return [value for kind, value in _lark_parts(grammar, parse_float) if kind == "json"]


def _lark_parts(grammar: str, parse_float: Callable[[str], object] = float) -> Iterator[tuple[str, Any]]:
    """Each part of a grammar in Lark: its kind, as in _LARK, and its text, or the schema behind `%json`."""
    decoder = json.JSONDecoder(parse_float=parse_float)
    position = 0
    while (found := _LARK.search(grammar, position)) is not None:
        position, kind = found.end(), str(found.lastgroup)
        value: object = found[kind]
        if kind == "json":
            try:
                value, position = decoder.raw_decode(grammar, position)
            except (ValueError, RecursionError):
                kind = "other"
        yield kind, value


class _Lark:
    """The rules of a grammar in Lark, each of which has a length in bytes.

    of_schema  gives the length of a JSON schema
    unknown    the length of what is not understood, and of a rule within itself
    """

    def __init__(self, grammar: str, of_schema: Callable[[object], float], *, unknown: float) -> None:
        self._of_schema = of_schema
        self._unknown = unknown
        self._known: dict[str, float] = {}
        self._rules: dict[str, list[tuple[str, Any]]] = {}
        parts = self._rules[""] = []  # what precedes the first rule
        for kind, value in _lark_parts(grammar):
            if kind == "rule":
                parts = self._rules[_name_of(value)] = []
            else:
                parts.append((kind, value))

    @property
    def longest(self) -> float:
        try:
            return max(map(self.of, self._rules))
        except RecursionError:  # so many rules repeat nothing that is long: their number is bounded
            return self._unknown

    def of(self, name: str) -> float:
        """The length of a rule."""
        if name not in self._known:
            self._known[name] = self._unknown  # it refers to itself
            parts = self._rules.get(name, [("other", "")])
            self._known[name] = self._sum(parts)
        return self._known[name]

    def _sum(self, parts: Iterable[tuple[str, Any]]) -> float:
        tally = _Tally()
        for kind, value in parts:
            match kind:
                case "text":
                    tally.part(len(value.encode()))
                case "regex":
                    tally.part(_of_regex(value.strip("/")))
                case "name":
                    tally.part(self.of(value))
                case "json":
                    tally.part(self._of_schema(value))
                case "either":
                    tally.either()
                case "opens":
                    tally.opens()
                case "closes":
                    tally.closes()
                case "times":
                    tally.times(_count(value))
                case "again":
                    tally.times(2 if self._unknown else 1)  # one repetition may continue the text of another
                case "other":
                    tally.part(self._unknown)
        most: float = 10**_MOST_DIGITS
        return min(tally.total, max(most, self._unknown))


def _forced_in_schema(schema: object) -> float:
    return _Schema(schema).both[0]


class _Schema:
    """A JSON schema. Where a value has alternatives in any case, it ends the text that is forced before it."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._known: dict[str, _Part] = {}
        self.both = self._of(root)

    def _of(self, schema: object) -> _Part:
        """Return the longest text that is forced within a value, and whether each value has alternatives."""
        if not isinstance(schema, Mapping):
            return _PUNCTUATION, schema is True
        if len(json.dumps(schema.get("x-guidance", {}))) > _LONGEST_STYLE:
            return math.inf, False
        parts = {key: self._of_key(key, value, schema) for key, value in schema.items() if key not in _PLAIN}
        longest = _PUNCTUATION + sum(length for length, _ in parts.values())
        return longest, self._has_choice(schema, parts)

    def _of_key(self, key: str, value: object, schema: Mapping[str, object]) -> _Part:
        match key, value:
            case "$ref", str():
                return self._of_reference(value)
            case "properties" | "patternProperties", Mapping():
                times = 1 if key == "properties" else 1 + _number(schema.get("minProperties"))
                named = [(len(json.dumps(name)), *self._of(each)) for name, each in value.items()]
                return _in_line([(length + _PUNCTUATION + inner, ends) for length, inner, ends in named], times)
            case "required", list():
                listed = schema.get("properties")
                names = [name for name in value if not isinstance(listed, Mapping) or name not in listed]
                return sum([len(json.dumps(name)) + _PUNCTUATION for name in names]), False
            case "prefixItems", list():
                return _in_line([self._of(each) for each in value])
            case "items" | "additionalProperties" | "unevaluatedProperties", _:
                count = schema.get("minItems") if key == "items" else schema.get("minProperties")
                return _in_line([self._of(value)], max(2, _number(count)))
            case "anyOf" | "oneOf" | "allOf", list():
                inner = [self._of(each) for each in value]
                return sum(length for length, _ in inner), all(ends for _, ends in inner)
            case "const" | "enum", _:
                return len(json.dumps(value)), False
            case "pattern", str():
                return _of_regex(value) + _number(schema.get("minLength")), False
            case "type" | "minItems" | "maxItems" | "minLength" | "maxLength" | "minProperties" | "maxProperties", _:
                return 0, False
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "multipleOf" | "format", _:
                return _NUMBER, False
            case "x-guidance", _:
                return 0, False
        return math.inf, False

    def _of_reference(self, pointer: str) -> _Part:
        found = self._known.get(pointer)
        if found is None:
            self._known[pointer] = math.inf, False  # what refers to it meanwhile is a part of it
            found = self._known[pointer] = self._of(target_of(self._root, pointer))
        return found

    def _has_choice(self, schema: Mapping[str, object], parts: Mapping[str, _Part]) -> bool:
        kind, keys = schema.get("type"), schema.keys() - _PLAIN - {"type", "x-guidance", "required"}
        if len(keys) == 1 and keys <= {"$ref", "anyOf", "oneOf"}:
            return parts[next(iter(keys))][1]
        if keys == {"enum"}:
            return len({json.dumps(each) for each in schema["enum"]}) > 1  # type: ignore[attr-defined]
        if kind == "string":
            return keys <= {"minLength", "maxLength"} and _number(schema.get("maxLength", 1)) > 0
        if kind in ("integer", "number"):
            low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
            return keys <= {"minimum", "maximum"} and high - low >= 1  # type: ignore[operator]
        if kind == "array":
            return keys <= {"items", "minItems", "maxItems"} and "items" in parts and parts["items"][1]
        if kind == "object":
            named = parts.get("properties", (0, False))
            return keys <= {"properties", "additionalProperties"} and named[1]
        return kind == "boolean" and not keys


def _in_line(parts: Iterable[_Part], times: float = 1) -> _Part:
    """Bound the text that is forced at once in parts that follow each other: a part with alternatives ends it.

    Returns also whether any part has alternatives: then repetitions add nothing.
    """
    longest = current = 0.0
    has_choice = False
    for length, ends in parts:
        current += length
        longest = max(longest, current)
        if ends:
            current, has_choice = length, True
    return longest * (2 if has_choice else max(1, times)), has_choice


def _number(value: object) -> float:
    return value if isinstance(value, int | float) else 0

"""How long a text a grammar may force at once: bytes to which there is no alternative, from one token on.

llguidance follows forced text to its end, in one call, and no limit of its own ends that: a grammar of a few bytes that
repeats a repeated text holds up the caller for a minute. So the grammar's source tells beforehand. What is returned is
an upper bound, often far above the real length, and math.inf where the source does not tell: for a grammar or a schema
that refers to itself, and for what is not understood here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

_PUNCTUATION = 8  # bytes around a value or a key
_NUMBER = 64  # bytes of a number, or of a text in one of the formats, that has one form only
_LONGEST_STYLE = 400  # characters of x-guidance: it may hold separators of any length
# They say nothing of the text, or their own values are read with the key that they belong to.
_PLAIN = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions"}
_LARK = re.compile(
    r"""
      (?P<comment>//[^\n]*|\#[^\n]*)
    | (?P<json>%json)
    | (?P<text>"(?:\\.|[^"\\])*"i?|<[^>\n]*>)
    | (?P<regex>/(?:\\.|[^/\\])+/[a-z]*)
    | (?P<rule>^[?!]*\w+(?:\[[^\]\n]*\])?(?:\.-?\d+)?\s*:)
    | (?P<name>\w+)
    | (?P<or>\|)
    | (?P<group>[()\[\]])
    | (?P<again>[*+])
    | (?P<other>[^\s?])
    """,
    re.VERBOSE | re.MULTILINE,
)
_COUNTED_LARK = re.compile(
    r"""
      (?://[^\n]*|\#[^\n]*)
    | (?P<text>"(?:\\.|[^"\\])*"i?|<[^>\n]*>)
    | (?P<regex>/(?:\\.|[^/\\])+/[a-z]*)
    | (?P<rule>^[?!]*\w+(?:\[[^\]\n]*\])?(?:\.-?\d+)?\s*:)
    | \{\s*(?P<least>\d+)\s*(?:,\s*\d*\s*)?\}
    | ~\s*(?P<exactly>\d+)
    | (?P<name>\w+)
    | (?P<or>\|)
    | (?P<group>[()\[\]])
    """,
    re.VERBOSE | re.MULTILINE,
)
# The longest text that is forced in a part of a grammar, and whether every text of that part has alternatives.
_Part: TypeAlias = tuple[float, bool]
_SPACE = re.compile(r"\s*")


def longest_forced(format: str, value: str | Sequence[str]) -> float:
    """Bound the bytes that a grammar may force at once. Its format and value are those of `grammar_of`; it compiles."""
    if format == "json_object":
        return _PUNCTUATION
    if format == "choice":
        return max(len(option.encode()) for option in value)
    if format == "regex":
        return _of_regex(str(value))
    if format == "json_schema":
        return _Schema(json.loads(str(value))).both[0]
    return _of_lark(str(value))


class _Tally:
    """Adds up the bytes of a pattern's parts, each as often as it must be repeated."""

    def __init__(self) -> None:
        self._groups = [[0, 0, 0]]  # of each open group: its longest alternative, the current one, that one's last part

    def part(self, num_bytes: int) -> None:
        self._groups[-1][1] += num_bytes
        self._groups[-1][2] = num_bytes

    def times(self, least: int) -> None:
        """Repeat the last part. Where it need not be there at all, it counts once: it is followed when it has begun."""
        self._groups[-1][1] += self._groups[-1][2] * (max(1, least) - 1)
        self._groups[-1][2] *= max(1, least)

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
    def total(self) -> int:
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


def _of_regex(regex: str) -> int:
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


def longest_repeated(format: str, value: str | Sequence[str]) -> int:
    """Return the longest text, in bytes, that a regular expression or a rule of a grammar asks for at least.

    Bounds what compiling it costs. Unlike `longest_forced`, it knows a grammar's counts, takes what it does not
    understand for nothing, and needs no grammar that compiles.
    """
    if format == "regex":
        return _of_regex(str(value))
    if format == "json_schema":
        return _patterns_of(json.loads(str(value)))
    return _repeated_in_lark(str(value)) if format == "ebnf_grammar" else 0


def _patterns_of(schema: object) -> int:
    longest, waiting = 0, [schema]
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


def schemas_in(grammar: str, parse_float: Callable[[str], object] = float) -> list[object]:
    """Return the JSON schemas that stand in a grammar in Lark. parse_float: see json.JSONDecoder."""
    found: list[object] = []
    decoder = json.JSONDecoder(parse_float=parse_float)
    for token in _LARK.finditer(grammar):
        if token.lastgroup == "json":
            start = _SPACE.match(grammar, token.end())
            try:
                found.append(decoder.raw_decode(grammar, start.end() if start else token.end())[0])
            except (ValueError, RecursionError):
                continue
    return found


def _repeated_in_lark(grammar: str) -> int:
    rules: dict[str, list[re.Match[str]]] = {}
    parts: list[re.Match[str]] = []
    for found in _COUNTED_LARK.finditer(grammar):
        if found.lastgroup == "rule":
            parts = rules[re.sub(r"[?!\s]|[\[.:].*", "", found[0])] = []
        elif found.lastgroup is not None:
            parts.append(found)
    known: dict[str, int] = {}
    try:
        in_rules = max((_of_rule(name, rules, known) for name in rules), default=0)
    except RecursionError:  # so many rules repeat nothing that is long: their number is bounded
        in_rules = 0
    return max([in_rules, *(_patterns_of(schema) for schema in schemas_in(grammar))])


def _of_rule(name: str, rules: Mapping[str, list[re.Match[str]]], known: dict[str, int]) -> int:
    if name in known:
        return known[name]
    known[name] = 0  # what refers to it meanwhile is a part of it
    tally = _Tally()
    for part in rules.get(name, []):
        match part.lastgroup:
            case "text":
                tally.part(len(part[0].encode()))
            case "regex":
                tally.part(_of_regex(part[0].strip("/")))
            case "name":
                tally.part(_of_rule(part[0], rules, known))
            case "or":
                tally.either()
            case "group":
                tally.opens() if part[0] in "([" else tally.closes()
            case "least" | "exactly":
                tally.times(_count(part[part.lastgroup]))
    known[name] = min(tally.total, 10**_MOST_DIGITS)
    return known[name]


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
            found = self._known[pointer] = self._of(self._target(pointer))
        return found

    def _target(self, pointer: str) -> object:
        target = self._root
        for part in pointer.removeprefix("#").split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, Mapping) or name not in target:
                return {"unknown": True}
            target = target[name]
        return target if pointer.startswith("#") else {"unknown": True}

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


def _of_lark(grammar: str) -> float:
    rules = _Rules()
    at = 0
    while (found := _LARK.search(grammar, at)) is not None:
        at, kind, text = found.end(), str(found.lastgroup), found[0]
        if kind == "rule":
            rules.begin(re.sub(r"[?!\s]|[\[.:].*", "", text))
        elif kind == "json":
            start = _SPACE.match(grammar, at)
            try:
                schema, at = json.JSONDecoder().raw_decode(grammar, start.end() if start else at)
            except ValueError:
                return math.inf
            rules.parts.append(_Schema(schema).both)
        elif kind == "text":
            rules.parts.append((len(text.encode()), False))
        elif kind == "regex":
            rules.parts.append((_of_regex(text), False))
        elif kind == "other":  # a count, a directive, or what is not understood
            return math.inf
        elif kind != "comment":
            rules.parts.append(text)
    return rules.of("start")[0]


class _Rules:
    """The rules of a grammar in Lark, each a list of bounds as `_in_line` takes them, names and signs."""

    def __init__(self) -> None:
        self.parts: list[_Part | str] = []
        self._rules: dict[str, list[_Part | str]] = {}
        self._known: dict[str, _Part] = {}

    def begin(self, name: str) -> None:
        self.parts = self._rules[name] = []

    def of(self, name: str) -> _Part:
        found = self._known.get(name)
        if found is None:
            self._known[name] = math.inf, False  # what refers to it meanwhile is a part of it
            found = self._known[name] = self._of(self._rules.get(name, [(math.inf, False)]))
        return found

    def _of(self, parts: list[_Part | str]) -> _Part:
        """Bound a rule. In one with parentheses, all that stands in it counts, alternatives too."""
        is_grouped = any(part in ("(", "[") for part in parts)
        alternatives: list[list[_Part]] = [[]]
        for before, part in zip(["", *parts], parts, strict=False):
            if part == "|":
                if not is_grouped:
                    alternatives.append([])
            elif part in ("*", "+"):  # one repetition may continue the text of another
                count = len(alternatives[-1]) if before in (")", "]") else 1
                alternatives[-1][-count:] = [(2 * length, False) for length, _ in alternatives[-1][-count:]]
            elif isinstance(part, str):
                if part not in ("(", ")", "[", "]"):
                    alternatives[-1].append(self.of(part))
            else:
                alternatives[-1].append(part)
        if is_grouped:
            return sum([length for length, _ in alternatives[0]]), False
        bounds = [_in_line(each) for each in alternatives]
        return max(length for length, _ in bounds), all(ends for _, ends in bounds)

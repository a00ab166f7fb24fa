"""Write a grammar in llguidance's dialect of Lark. There an added token is a terminal of its own, not its text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...settings.request import JSON_STYLE
from ..text.chat_template import Json
from .schema import Schema


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of a grammar, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that an answer may call; `parameters` is a JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Calls:
    """What an answer has to call: any of these tools, once or more often."""

    tools: tuple[Tool, ...]
    may_repeat: bool


# A schema with one of them may mean properties that it does not list itself.
_OPEN = {"additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref", "if"}

_KEY = "[A-Za-z_][A-Za-z0-9_]{0,31}"  # the name of a property that no schema lists


def _closed(schema: Mapping[str, Json]) -> Mapping[str, Json]:
    """The schema without properties that it does not list: a model would invent some. What matches it still does."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not properties or _OPEN & schema.keys():
        return schema
    required = schema.get("required", [])
    if not isinstance(required, list) or not {str(name) for name in required} <= properties.keys():
        return schema
    return {**schema, "additionalProperties": False}


class Lark:
    """A grammar in the making.

    added  ids of added tokens, by text
    """

    def __init__(self, added: Mapping[str, int]) -> None:
        self._added = added
        self._rules: list[str] = []
        self._named: dict[Hashable, Rule] = {}

    def grammar(self, start: Rule) -> str:
        return "\n".join((f"start: {start.name}", *self._rules, ""))

    def sequence(self, *parts: Rule | str) -> Rule:
        """One part after the other: rules, and texts, in which added tokens are tokens."""
        return self._rule(" ".join(filter(None, map(self._written, parts))))

    def one_of(self, rules: Iterable[Rule]) -> Rule:
        return self._rule(" | ".join(rule.name for rule in rules))

    def repeated(self, rule: Rule, separator: str = "", least: int = 1, most: int | None = None) -> Rule:
        """So many times at least, and at most."""
        more = f" ({self._written(separator)} {rule.name}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        some = "" if most == 0 else rule.name if most == 1 else rule.name + more
        return self._rule(" | ".join(filter(None, (some, '""' if least == 0 or most == 0 else ""))))

    def members(self, members: Sequence[tuple[Rule, bool]], separator: str = "") -> Rule:
        """These parts in this order. One that is not required, which the flag says, may be left out."""
        first = behind = self._rule('""')  # what follows, without a part before it and behind one
        for rule, is_required in reversed(members):
            first, behind = (
                self._rule(f"{before} {rule.name} {behind.name}{'' if is_required else f' | {rest.name}'}")
                for before, rest in (("", first), (self._written(separator), behind))
            )
        return first

    def arguments_of(self, schema: Schema, member: Callable[[Rule | str, Schema], Rule], separator: str = "") -> Rule:
        """The members of an object of a schema, of which `member` writes one from its name and its schema.

        Where the schema does not list them, they have any names.
        """
        if (members := schema.members) is None:
            rest = schema.at(schema.value.get("additionalProperties"))
            return self.repeated(member(self.regex(_KEY), rest), separator, 0)
        return self.members([(member(name, each), required) for name, each, required in members], separator)

    def named(self, key: Hashable, build: Callable[[], Rule]) -> Rule:
        """The rule that `build` makes, once for each key: it may contain itself."""
        if key not in self._named:
            self._named[key] = rule = Rule(f"n{len(self._named)}")
            self._rules.append(f"{rule.name}: {build().name}")
        return self._named[key]

    def optional(self, first: Rule, then: Rule, *, repeats: bool = False) -> Rule:
        """`then`, and maybe `first` before it."""
        return self._rule(f"{first.name}{'*' if repeats else '?'} {then.name}")

    def space(self) -> Rule:
        """A little white space, or none."""
        return self._rule("/[ \\n]{0,4}/")

    def through(self, marker: str) -> Rule:
        """Any text up to and including the first such marker."""
        if marker in self._added:
            return self._rule(f"{self._rule('/(?s:.*)/').name} {self._written(marker)}")
        return self._rule(f"/(?s:.*){_escaped(marker)}/", "[lazy]")

    def text(self, end: str, patterns: Sequence[str] = (), before: str = "") -> Rule:
        """A text without `end`, which matches all these regular expressions as a whole, then `before` and `end`."""
        parts = [f"/{_with_escaped_slashes(pattern)}/" for pattern in patterns or ["(?s:.*)"]]
        if end not in self._added:
            parts.append(f"~/(?s:.*){_escaped(end)}(?s:.*)/")
            before += end
        text = self._terminal(f"({' & '.join(parts)}) {json.dumps(before, ensure_ascii=False)}")
        return self.sequence(text, end) if end in self._added else text

    def regex(self, regex: str) -> Rule:
        """What a regular expression matches, in the syntax of Rust's crate `regex`."""
        return self._rule(f"/{_with_escaped_slashes(regex)}/")

    def json(self, schema: Mapping[str, Json] | bool) -> Rule:
        """JSON of a schema, written as it is without a grammar around it."""
        styled = {"x-guidance": JSON_STYLE, **schema} if isinstance(schema, Mapping) else schema
        return self._rule(f"%json {json.dumps(styled)}")

    def nested(self, grammar: str) -> Rule:
        """What another grammar of this dialect describes, with rules of its own."""
        return self._rule(f"%lark {{\n{grammar}\n}}")

    def arguments(self, tool: Tool) -> Rule:
        return self.json({"type": "object", **_closed(tool.parameters)})

    def call_object(self, tool: Tool, key: str) -> Rule:
        """A call as one JSON object."""
        return self.sequence(f'{{"name": {json.dumps(tool.name)}, "{key}": ', self.arguments(tool), "}")

    def _rule(self, expression: str, attributes: str = "") -> Rule:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {expression}")
        return Rule(name)

    def _terminal(self, expression: str) -> Rule:
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return Rule(name)

    def _written(self, part: Rule | str) -> str:
        if isinstance(part, Rule):
            return part.name
        pattern = "|".join(map(re.escape, self._added)) or "(?!)"
        texts, tokens = re.split(pattern, part), re.findall(pattern, part)
        written = [json.dumps(texts[0], ensure_ascii=False) if texts[0] else ""]
        for token, text in zip(tokens, texts[1:], strict=True):
            written += [f"<[{self._added[token]}]>", json.dumps(text, ensure_ascii=False) if text else ""]
        return " ".join(filter(None, written))


def _escaped(text: str) -> str:
    """A text as a regular expression between slashes."""
    return _with_escaped_slashes(re.sub(r"[\\.+*?()|\[\]{}^$]", r"\\\g<0>", text))


def _with_escaped_slashes(regex: str) -> str:
    """The regular expression between slashes, where a line break may stand but not behind a backslash."""
    written = {"/": "\\/", "\\\n": "\\n"}
    return re.sub(r"\\.|/", lambda found: written.get(found[0], found[0]), regex, flags=re.DOTALL)

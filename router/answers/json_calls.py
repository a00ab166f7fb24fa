"""How models write tool calls as JSON. A new format is a class, and an entry and a sign of it in formats.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from .json_object import JsonObject
from .json_writer import MAX_HELD, JsonWriter
from .lark import Calls, Lark, Rule
from .reader import AnswerReader, NotACall, Steps

_ARGUMENTS = ("arguments", "parameters")
_IGNORED_KEYS = ("id", "type")


class ToolFormat(ABC):
    """How a model writes tool calls.

    markers   texts that may be special tokens of the tokenizer
    openings  what a call begins with, anywhere in the answer
    starts    what a call begins with at the answer's start
    """

    markers: Sequence[str] = ()
    openings: Sequence[str]
    starts: Sequence[str] = ()

    @abstractmethod
    def calls(self, reader: AnswerReader, opening: str) -> Steps[None]:
        """Read calls, from their opening on. Raises NotACall, at any place."""

    @abstractmethod
    def grammar(self, lark: Lark, calls: Calls) -> Rule:
        """A rule for an answer of calls."""


class Hermes(ToolFormat):
    """<tool_call>{"name": …, "arguments": …}</tool_call>: Hermes, Qwen 2.5, Qwen 3."""

    markers = ("<tool_call>", "</tool_call>")
    openings = ("<tool_call>",)

    def calls(self, reader: AnswerReader, opening: str) -> Steps[None]:
        yield from reader.expect("<tool_call>")
        yield from reader.space()
        yield from _call_object(reader)
        yield from reader.space()
        yield from reader.expect("</tool_call>")
        reader.accept()

    def grammar(self, lark: Lark, calls: Calls) -> Rule:
        begin, end = self.markers
        one = lark.one_of(
            lark.sequence(f"{begin}\n", lark.call_object(tool, "arguments"), f"\n{end}") for tool in calls.tools
        )
        return lark.repeated(one, "\n") if calls.may_repeat else one


class Llama3(ToolFormat):
    """{"name": …, "parameters": …}, several with ; between them: Llama 3.1 to 3.3."""

    markers = ("<|python_tag|>",)
    openings = ("<|python_tag|>",)
    starts = ("{",)

    def calls(self, reader: AnswerReader, opening: str) -> Steps[None]:
        yield from reader.has("<|python_tag|>")
        while True:
            yield from reader.space()
            yield from _call_object(reader)
            yield from reader.space()
            if (yield from reader.peek()) != "{" and not (yield from reader.has(";")):
                return

    def grammar(self, lark: Lark, calls: Calls) -> Rule:
        one = lark.one_of(lark.call_object(tool, "parameters") for tool in calls.tools)
        return lark.repeated(one, "; ") if calls.may_repeat else one


class Mistral(ToolFormat):
    """[TOOL_CALLS]name[ARGS]{…}, from the tokenizer's version 11 on.

    lists  [TOOL_CALLS][{"name": …, "arguments": …}], as before. Both are read.
    """

    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    openings = ("[TOOL_CALLS]",)

    def __init__(self, lists: bool) -> None:
        self._lists = lists

    def calls(self, reader: AnswerReader, opening: str) -> Steps[None]:
        yield from reader.expect("[TOOL_CALLS]")
        yield from reader.space()
        if (yield from reader.peek()) == "[":
            yield from _call_list(reader)
            return
        tool = yield from reader.name()
        if (yield from reader.has("[CALL_ID]")):
            yield from reader.name()
        yield from reader.has("[ARGS]")
        yield from reader.space()
        yield from reader.arguments(tool)
        reader.accept()

    def grammar(self, lark: Lark, calls: Calls) -> Rule:
        if self._lists:
            one = lark.one_of(lark.call_object(tool, "arguments") for tool in calls.tools)
            return lark.sequence("[TOOL_CALLS]", "[", lark.repeated(one, ", ") if calls.may_repeat else one, "]")
        one = lark.one_of(
            lark.sequence("[TOOL_CALLS]", tool.name, "[ARGS]", lark.arguments(tool)) for tool in calls.tools
        )
        return lark.repeated(one) if calls.may_repeat else one


class Gemma(ToolFormat):
    """{"name": …, "parameters": …}, alone, in a list, or in a fence of tool_code or json.

    Gemma 3 has no tokens for calls and its own template shows no tools. This is the format that its authors' guide to
    function calling asks the model for, and which templates of others follow.
    """

    openings = ("```tool_code\n", "```json\n")
    starts = ("{", "[")

    def calls(self, reader: AnswerReader, opening: str) -> Steps[None]:
        if opening in self.openings:
            yield from reader.expect(opening)
            yield from reader.space()
        if (yield from reader.peek()) == "[":
            yield from _call_list(reader)
        else:
            yield from _call_object(reader)
        if opening in self.openings:
            yield from reader.space()
            yield from reader.expect("```")
            reader.accept()

    def grammar(self, lark: Lark, calls: Calls) -> Rule:
        one = lark.one_of(lark.call_object(tool, "parameters") for tool in calls.tools)
        if not calls.may_repeat:
            return one
        return lark.one_of((one, lark.sequence("[", lark.repeated(one, ", "), "]")))


class DeepSeek(ToolFormat):
    """Calls between tokens of their own: name<｜tool▁sep｜>{…}, from DeepSeek V3.1 on.

    fences  function<｜tool▁sep｜>name and the arguments in a fence, as in V3 and R1. Both are read.
    """

    markers = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    )
    openings = markers[:1]

    def __init__(self, fences: bool) -> None:
        self._fences = fences

    def calls(self, reader: AnswerReader, opening: str) -> Steps[None]:
        begin, begin_call, separator, end_call, end = self.markers
        yield from reader.expect(begin)
        while True:
            yield from reader.space()
            yield from reader.expect(begin_call)
            tool = yield from reader.name()
            yield from reader.expect(separator)
            is_fenced = (yield from reader.peek()) != "{"
            if is_fenced:
                tool = yield from reader.name()
                yield from reader.expect("\n```json\n")
            yield from reader.arguments(tool)
            if is_fenced:
                yield from reader.space()
                yield from reader.expect("```")
            yield from reader.space()
            yield from reader.expect(end_call)
            reader.accept()
            yield from reader.space()
            if (yield from reader.has(end)):
                reader.accept()
                return

    def grammar(self, lark: Lark, calls: Calls) -> Rule:
        begin, begin_call, separator, end_call, end = self.markers

        def one(before: str, after: str) -> Rule:
            return lark.one_of(
                lark.sequence(begin_call, before.format(tool.name), lark.arguments(tool), after, end_call)
                for tool in calls.tools
            )

        call = one(f"function{separator}{{}}\n```json\n", "\n```") if self._fences else one(f"{{}}{separator}", "")
        between = "\n" if self._fences else ""
        return lark.sequence(begin, lark.repeated(call, between) if calls.may_repeat else call, end)


def _call_object(reader: AnswerReader) -> Steps[None]:
    """A call as one JSON object of a name and arguments."""
    tool, held, is_written = "", "", False
    yield from reader.expect("{")
    while True:
        yield from reader.space()
        key = yield from _string(reader)
        yield from reader.space()
        yield from reader.expect(":")
        yield from reader.space()
        if key in _IGNORED_KEYS:
            yield from _string(reader)
        elif key == "name" and not tool:
            tool = yield from _string(reader)
            if held:
                reader.begin(tool).value(held)
                reader.num_calls += 1
                is_written = True
        elif key in _ARGUMENTS and not (held or is_written) and tool:
            yield from reader.arguments(tool)
            is_written = True
        elif key in _ARGUMENTS and not (held or is_written):
            held = yield from _held_object(reader)
        else:
            raise NotACall
        yield from reader.space()
        if not (yield from reader.has(",")):
            break
    yield from reader.expect("}")
    if not is_written:
        raise NotACall
    reader.accept()


def _call_list(reader: AnswerReader) -> Steps[None]:
    """Calls as a JSON list of such objects."""
    yield from reader.expect("[")
    while True:
        yield from reader.space()
        yield from _call_object(reader)
        yield from reader.space()
        if not (yield from reader.has(",")):
            break
    yield from reader.expect("]")
    reader.accept()


def _held_object(reader: AnswerReader) -> Steps[str]:
    """Arguments that come before their tool's name."""
    held = ""

    def hold(text: str) -> None:
        nonlocal held
        held += text
        if len(held) > MAX_HELD:
            raise NotACall

    yield from reader.json(JsonWriter(hold), JsonObject())
    return held


def _string(reader: AnswerReader) -> Steps[str]:
    """A short JSON string, such as a key or a name."""
    yield from reader.expect('"')
    return (yield from reader.key('"', "\\\n"))

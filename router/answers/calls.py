"""How models write tool calls. A new format is a class here, and an entry and a sign of it in formats.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from pagoda_server.router.answers.lark import Calls, Lark, Rule
from pagoda_server.router.answers.reader import AnswerReader, Steps


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
        yield from reader.call_object()
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
            yield from reader.call_object()
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
            yield from reader.call_list()
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
            yield from reader.call_list()
        else:
            yield from reader.call_object()
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

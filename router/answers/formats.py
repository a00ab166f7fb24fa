"""Read whole answers: reasoning, then text and calls. `format_of` finds how a model writes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ...settings import SettingError
from .events import Reasoning, Text
from .gemma_calls import GemmaCalls
from .json_calls import DeepSeek, Gemma, Hermes, Llama3, Mistral, ToolFormat
from .lark import Calls, Lark, Rule
from .pythonic_calls import Pythonic
from .reader import MAX_NAME, AnswerReader, Kind, NotACall, Steps
from .tagged_calls import Glm, QwenCoder

TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": Hermes(),
    "qwen3-coder": QwenCoder(),
    "glm": Glm(),
    "llama3": Llama3(),
    "pythonic": Pythonic(),
    "mistral": Mistral(lists=False),
    "mistral-v3": Mistral(lists=True),
    "gemma": Gemma(),
    "functiongemma": GemmaCalls("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": GemmaCalls("<|tool_call>", "<tool_call|>", '<|"|>'),
    "deepseek": DeepSeek(fences=False),
    "deepseek-v3": DeepSeek(fences=True),
}
# The marker that opens the reasoning, a word that follows it, and the marker that closes it.
REASONING_FORMATS = {
    "think": ("<think>", "", "</think>"),
    "mistral": ("[THINK]", "", "[/THINK]"),
    "gemma4": ("<|channel>", "thought", "<channel|>"),
}
HARMONY = "harmony"

# What a chat template contains, and what it does not, if the model has a format. The first one counts.
_SIGNS_OF_TOOLS: Sequence[tuple[str, tuple[str, ...], tuple[str, ...]]] = (
    (HARMONY, ("<|channel|>", "<|message|>"), ()),
    ("deepseek-v3", ("<｜tool▁calls▁begin｜>", "```json"), ()),
    ("deepseek", ("<｜tool▁calls▁begin｜>",), ()),
    ("mistral", ("[TOOL_CALLS]", "[ARGS]"), ()),
    ("mistral-v3", ("[TOOL_CALLS]",), ()),
    ("gemma4", ("<|tool_call>call:",), ()),
    ("functiongemma", ("<start_function_call>",), ()),
    ("qwen3-coder", ("<tool_call>", "<function=", "<parameter="), ()),
    ("glm", ("<tool_call>", "<arg_key>"), ()),
    # A prompt that asks for Python has a call of func_name1; others put such a list between tags of their own.
    ("pythonic", ("[func_name1(",), ("<tool_call>", "<function_calls>")),
    ("hermes", ("<tool_call>",), ("<function=", "[func_name1(")),
    ("llama3", ("<|start_header_id|>", "tools"), ()),
    ("gemma", ("<start_of_turn>", "tools"), ()),
)
_SIGNS_OF_REASONING: Sequence[tuple[str, tuple[str, ...], tuple[str, ...]]] = (
    (HARMONY, ("<|channel|>", "<|message|>"), ()),
    ("mistral", ("[THINK]",), ()),
    ("gemma4", ("<|channel>thought", "<channel|>"), ()),
    ("think", ("</think>",), ()),
)


class AnswerFormat(ABC):
    """How a model writes its answers.

    tool_format, reasoning_format  by name; empty: it is not known, and what is written so stays text
    markers                        texts that may be special tokens of the tokenizer
    """

    tool_format: str
    reasoning_format: str
    markers: Sequence[str]

    @abstractmethod
    def read(self, reader: AnswerReader, prompt_end: str) -> Steps[None]:
        """Read an answer to its end. `prompt_end`: the prompt's last characters, after which the answer goes on."""

    @abstractmethod
    def calls(self, lark: Lark, calls: Calls, prompt_end: str) -> Rule:
        """An answer of calls, after reasoning if the model likes. There is a tool format."""

    @abstractmethod
    def answer(self, lark: Lark, answer: Rule, prompt_end: str) -> Rule:
        """An answer of this text, after reasoning if the model likes. There is a reasoning format."""


class Marked(AnswerFormat):
    """Reasoning between two markers at the answer's start, and calls behind an opening of their own."""

    def __init__(self, tool_format: str, reasoning_format: str) -> None:
        self.tool_format = tool_format
        self.reasoning_format = reasoning_format
        self._tools = TOOL_FORMATS.get(tool_format)
        begin, word, self._end = REASONING_FORMATS.get(reasoning_format, ("", "", ""))
        self._begin = begin + word  # empty: reasoning stays text
        self.markers = (*filter(None, (begin, self._end)), *(self._tools.markers if self._tools else ()))

    def read(self, reader: AnswerReader, prompt_end: str) -> Steps[None]:
        yield from self._read_reasoning(reader, prompt_end)
        if self._tools is None or not reader.tools:
            yield from reader.until(())
            return
        opening = yield from reader.at_start(self._tools.starts)
        while opening or (opening := (yield from reader.until(self._tools.openings))):
            try:
                yield from self._tools.calls(reader, opening)
            except NotACall:
                reader.reject()
            opening = ""

    def _read_reasoning(self, reader: AnswerReader, prompt_end: str) -> Steps[None]:
        if not self._begin:
            return
        if not self._is_open(prompt_end):
            if not (yield from reader.at_start((self._begin,))):
                return
            yield from reader.expect(self._begin)
            reader.accept()
        reader.is_thinking = True
        yield from reader.skip_space()
        if (yield from reader.until((self._end,), Reasoning)):
            yield from reader.expect(self._end)
            reader.accept()
            reader.is_thinking = False
            yield from reader.skip_space()

    def _is_open(self, prompt_end: str) -> bool:
        """Whether the prompt has begun the reasoning."""
        return prompt_end.rstrip().endswith(self._begin)

    def calls(self, lark: Lark, calls: Calls, prompt_end: str) -> Rule:
        assert self._tools is not None, "there is a tool format"
        return self.answer(lark, self._tools.grammar(lark, calls), prompt_end)

    def answer(self, lark: Lark, answer: Rule, prompt_end: str) -> Rule:
        if not self._begin:
            return answer
        rest = lark.sequence(lark.through(self._end), lark.space())
        if self._is_open(prompt_end):
            return lark.sequence(rest, answer)
        return lark.optional(lark.sequence(self._begin, rest), answer)


class Harmony(AnswerFormat):
    """GPT-OSS: messages with a header that names their channel and, for a call, the function."""

    markers = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
    _ENDS = ("<|end|>", "<|return|>", "<|call|>")
    _CHANNELS = ("analysis", "commentary", "final")
    _START = "<|start|>assistant"
    _ANALYSIS = "<|channel|>analysis<|message|>"

    def __init__(self, has_tools: bool, has_reasoning: bool) -> None:
        self.tool_format = HARMONY if has_tools else ""
        self.reasoning_format = HARMONY if has_reasoning else ""

    def read(self, reader: AnswerReader, prompt_end: str) -> Steps[None]:
        opening = ""
        if prompt_end.endswith(self._ANALYSIS) and self.reasoning_format:
            yield from self._read_body(reader, Reasoning)
        elif prompt_end.endswith("<|message|>"):
            yield from self._read_body(reader, Text)
        else:
            opening = yield from reader.at_start(("to=",))
        while opening or (opening := (yield from reader.until((self._START, "<|channel|>")))):
            try:
                yield from self._read_message(reader)
            except NotACall:
                reader.reject()
            opening = ""

    def _read_message(self, reader: AnswerReader) -> Steps[None]:
        yield from reader.has(self._START)
        recipient = yield from self._read_recipient(reader)
        yield from reader.expect("<|channel|>")
        channel = yield from reader.name()
        recipient = (yield from self._read_recipient(reader)) or recipient
        if (yield from reader.has("<|constrain|>")) or (yield from reader.peek()) != "<":
            yield from reader.name()  # the type of the content
        yield from reader.expect("<|message|>")
        kind, _, tool = recipient.partition(".")
        if kind == "functions" and tool in reader.tools and (yield from reader.peek()) == "{":
            yield from reader.arguments(tool)
            reader.accept()
            for end in self._ENDS:
                if (yield from reader.has(end)):
                    break
            reader.accept()
        elif recipient or channel not in self._CHANNELS or (channel == "analysis" and not self.reasoning_format):
            reader.reject(whole=True)
        else:
            reader.accept()
            yield from self._read_body(reader, Reasoning if channel == "analysis" else Text)

    def _read_recipient(self, reader: AnswerReader) -> Steps[str]:
        """Whom a message goes to, such as functions.add; empty: the user."""
        yield from reader.space()
        if not (yield from reader.has("to=")):
            return ""
        recipient = yield from reader.name(len("functions.") + MAX_NAME)
        yield from reader.space()
        return recipient

    def _read_body(self, reader: AnswerReader, kind: Kind) -> Steps[None]:
        reader.is_thinking = kind is Reasoning
        if end := (yield from reader.until(self._ENDS, kind)):
            yield from reader.expect(end)
            reader.accept()
            reader.is_thinking = False

    def calls(self, lark: Lark, calls: Calls, prompt_end: str) -> Rule:
        call = lark.one_of(
            lark.sequence(
                f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>", lark.arguments(tool)
            )
            for tool in calls.tools
        )
        return self._after_analysis(lark, call, prompt_end)

    def answer(self, lark: Lark, answer: Rule, prompt_end: str) -> Rule:
        return self._after_analysis(lark, lark.sequence("<|channel|>final<|message|>", answer), prompt_end)

    def _after_analysis(self, lark: Lark, message: Rule, prompt_end: str) -> Rule:
        rest = lark.sequence(lark.through("<|end|>"), self._START)
        before = lark.sequence(self._ANALYSIS, rest)
        if prompt_end.endswith(self._ANALYSIS):
            return lark.sequence(rest, lark.optional(before, message, repeats=True))
        return lark.optional(before, message, repeats=True)


def format_of(template: str | None, tool_format: str = "auto", reasoning_format: str = "auto") -> AnswerFormat | None:
    """The format in which a model of this chat template answers; None if neither calls nor reasoning are known.

    tool_format, reasoning_format  a name, or `none`; auto: as the template shows

    Raises SettingError for two that do not go together.
    """
    if template is None:
        return None
    tools = _named(template, tool_format, _SIGNS_OF_TOOLS)
    reasoning = _named(template, reasoning_format, _SIGNS_OF_REASONING)
    if HARMONY in (tools, reasoning):
        if {tools, reasoning} - {HARMONY, ""}:
            raise SettingError(
                f"--tool-format {tools} does not go with --reasoning-format {reasoning}: "
                f"{HARMONY} goes with itself and with none"
            )
        return Harmony(bool(tools), bool(reasoning))
    return Marked(tools, reasoning) if tools or reasoning else None


def _named(template: str, name: str, signs: Sequence[tuple[str, tuple[str, ...], tuple[str, ...]]]) -> str:
    if name != "auto":
        return "" if name == "none" else name
    for found, present, absent in signs:
        if all(sign in template for sign in present) and not any(sign in template for sign in absent):
            return found
    return ""

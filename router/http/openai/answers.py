"""Answers of the OpenAI API: messages of the protocol as its JSON, at once or as server-sent events.

A streamed answer has one event for each message with text, thousands a second in all: what every event of an answer has
in common is put together once, and only the text is escaped.
"""

from __future__ import annotations

import codecs
import json
from collections import defaultdict
from collections.abc import Sequence
from json.encoder import encode_basestring as quoted  # in C; leaves UTF-8 as it is
from typing import Protocol

from pagoda.v1 import inference_pb2

from ...errors import Aborted
from ..http_call import Answer
from .requests import Asked, check_whole

DONE = b"data: [DONE]\n\n"
_LEAST_LOGPROB = -9999.0  # JSON has no infinity
_REASONS = {
    inference_pb2.FINISH_REASON_STOP: '"stop"',
    inference_pb2.FINISH_REASON_LENGTH: '"length"',
    inference_pb2.FINISH_REASON_CANCELLED: "null",
    inference_pb2.FINISH_REASON_TOOL_CALLS: '"tool_calls"',
}


def answer_to(asked: Asked, request_id: str, model: str) -> Answer:
    """What makes the answer that was asked for of a call's messages."""
    return (StreamedAnswer if asked.is_stream else _Whole)(asked, request_id, model)


class _Shape:
    """What chats and completions spell differently, and what all sequences of an answer share.

    logprobs  writes those of each sequence, by index; None: none are asked for
    """

    def __init__(self, asked: Asked, request_id: str, model: str, event: str) -> None:
        kind, name = ("chatcmpl", "chat.completion") if asked.is_chat else ("cmpl", "text_completion")
        name += event if asked.is_chat else ""
        self.head = (
            f'{{"id":{quoted(f"{kind}-{request_id}")},"object":"{name}","created":{asked.created},'
            f'"model":{quoted(model)},"choices":['
        )
        texts = [prompt if isinstance(prompt, str) else "" for prompt in asked.prompts]
        self.echoes = [_Echo(text) for text in texts] if asked.is_echo else []
        self.logprobs: defaultdict[int, _Logprobs] | None = None
        if asked.logprobs is not None:
            make: type[_Logprobs] = _ChatLogprobs if asked.is_chat else _CompletionLogprobs
            self.logprobs = defaultdict(make)


class StreamedAnswer(Answer):
    """Server-sent events: one for each message with text, and those that begin and end a sequence."""

    media_type = "text/event-stream; charset=utf-8"

    def __init__(self, asked: Asked, request_id: str, model: str) -> None:
        shape = _Shape(asked, request_id, model, ".chunk")
        self._head = f"data: {shape.head}"
        self._logprobs = shape.logprobs
        self._has_usage = asked.has_usage
        self._end = '}],"usage":null}\n\n' if asked.has_usage else "}]}\n\n"
        self._content, after = ('"delta":{"content":', "}") if asked.is_chat else ('"text":', "")
        self._before: dict[int, str] = {}  # what stands before a sequence's text, once it has begun
        self._n = asked.n
        self._echoes, self._drops_output = shape.echoes, asked.drops_output
        self._before_logprobs = f'{after},"logprobs":'
        self._after = f'{self._before_logprobs}null,"finish_reason":null{self._end}'
        self._is_chat = asked.is_chat
        self._usage = _Usage(asked.drops_output)
        self._unfinished = len(asked.prompts)
        self._has_timings, self._timings = asked.has_timings, ""
        self._last = ""
        self._is_cut = False

    def take(self, message: inference_pb2.GenerateResponse, prompt: int = 0) -> bytes:
        if message.HasField("finished"):
            return self._finished(message, prompt)
        if message.HasField("prompt"):
            return self._echoed(message.prompt, prompt)
        tokens = message.tokens
        index, text, kind = self._n * prompt + tokens.index, tokens.text, tokens.WhichOneof("delta")
        if self._drops_output:
            return b""
        if not text and self._logprobs is None and kind in ("text", None):
            return b""
        first = "" if index in self._before else self._first(index)
        if kind == "reasoning" or kind == "tool_call":
            event = f'{self._head}{{"index":{index},"delta":{{{_delta(tokens)}{self._after_delta(index, tokens)}'
        elif self._logprobs is None:
            event = f"{self._before[index]}{quoted(text)}{self._after}"
        else:
            event = f"{self._before[index]}{quoted(text)}{self._after_delta(index, tokens)}"
        return (first + event).encode()

    def _after_delta(self, index: int, tokens: inference_pb2.Tokens) -> str:
        if self._logprobs is None:
            return self._after
        logprobs = self._logprobs[index]
        entries = logprobs.joined(logprobs.of(tokens.tokens))
        return f'{self._before_logprobs}{entries},"finish_reason":null{self._end}'

    def _echoed(self, part: inference_pb2.Prompt, prompt: int) -> bytes:
        """A completion's prompt, as the beginning of each of its texts."""
        if not self._echoes:
            return b""
        text, events = quoted(self._echoes[prompt].next(part)), []
        for index in range(self._n * prompt, self._n * (prompt + 1)):
            self._first(index)
            entries = "null"
            if self._logprobs is not None:
                entries = self._logprobs[index].joined(self._logprobs[index].of(part.tokens))
            events.append(
                f'{self._before[index]}{text}{self._before_logprobs}{entries},"finish_reason":null{self._end}'
            )
        return "".join(events).encode()

    def _first(self, index: int) -> str:
        """Begin a sequence. Returns the event that does so in a chat."""
        self._before[index] = f'{self._head}{{"index":{index},{self._content}'
        if not self._is_chat:
            return ""
        return (
            f'{self._head}{{"index":{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,'
            f'"finish_reason":null{self._end}'
        )

    def _finished(self, message: inference_pb2.GenerateResponse, prompt: int) -> bytes:
        index, reason = self._n * prompt + message.finished.index, message.finished.reason
        self._is_cut |= reason == inference_pb2.FINISH_REASON_CANCELLED
        nothing = '"delta":{}' if self._is_chat else '"text":""'
        event = f'{self._head}{{"index":{index},{nothing},"logprobs":null,"finish_reason":{_REASONS[reason]}{self._end}'
        if index not in self._before:
            event = self._first(index) + event
        if message.HasField("usage"):
            self._usage.add(message.usage)
            self._timings = _timings(message, self._n) if self._has_timings else ""
            self._unfinished -= 1
        if self._unfinished:
            return event.encode()
        self._last = event  # goes with the end, when the call has given back what it held
        return b""

    def end(self) -> bytes:
        if self._is_cut:
            raise _cut()
        usage = f'{self._head}],"usage":{self._usage.json()}}}\n\n' if self._has_usage else ""
        events = f"{self._last}{usage}"
        if self._timings:
            events = events.removesuffix("}\n\n") + f"{self._timings}}}\n\n"
        return events.encode() + DONE


class _Choice:
    """One sequence of an answer that is not streamed."""

    __slots__ = ("calls", "entries", "reason", "reasonings", "texts")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.reasonings: list[str] = []
        self.calls: dict[int, _ToolCall] = {}
        self.entries: list[tuple[str, ...]] = []  # of its log-probabilities
        self.reason = "null"


class _Whole(Answer):
    def __init__(self, asked: Asked, request_id: str, model: str) -> None:
        self._shape = _Shape(asked, request_id, model, "")
        self._is_chat = asked.is_chat
        self._n = asked.n
        self._drops_output = asked.drops_output
        self._choices: defaultdict[int, _Choice] = defaultdict(_Choice)
        self._num_logprobs = 0
        self._per_token = 1 + (asked.logprobs or 0)
        self._usage = _Usage(asked.drops_output)
        self._has_timings, self._timings = asked.has_timings, ""
        self._is_cut = False

    def take(self, message: inference_pb2.GenerateResponse, prompt: int = 0) -> bytes:
        if message.HasField("finished"):
            reason = message.finished.reason
            self._is_cut |= reason == inference_pb2.FINISH_REASON_CANCELLED
            self._choices[self._n * prompt + message.finished.index].reason = _REASONS[reason]
            if message.HasField("usage"):
                self._usage.add(message.usage)
                self._timings = _timings(message, self._n) if self._has_timings else ""
            return b""
        if message.HasField("prompt"):
            self._echo(message.prompt, prompt)
            return b""
        tokens = message.tokens
        if self._drops_output:
            return b""
        index = self._n * prompt + tokens.index
        choice = self._choices[index]
        match tokens.WhichOneof("delta"):
            case "text":
                choice.texts.append(tokens.text)
            case "reasoning":
                choice.reasonings.append(tokens.reasoning)
            case "tool_call":
                part = tokens.tool_call
                choice.calls.setdefault(part.index, _ToolCall()).add(part)
        if self._shape.logprobs is not None:
            choice.entries += self._shape.logprobs[index].of(tokens.tokens)
            self._num_logprobs += len(tokens.tokens) * self._per_token
            check_whole(self._num_logprobs)  # without max_tokens only this shows it
        return b""

    def _echo(self, part: inference_pb2.Prompt, prompt: int) -> None:
        if not self._shape.echoes:
            return
        text = self._shape.echoes[prompt].next(part)
        for index in range(self._n * prompt, self._n * (prompt + 1)):
            self._choices[index].texts.append(text)
            if self._shape.logprobs is not None:
                self._choices[index].entries += self._shape.logprobs[index].of(part.tokens)

    def end(self) -> bytes:
        if self._is_cut:
            raise _cut()
        choices = ",".join(self._json(index, choice) for index, choice in sorted(self._choices.items()))
        return f'{self._shape.head}{choices}],"usage":{self._usage.json()}{self._timings}}}'.encode()

    def _json(self, index: int, choice: _Choice) -> str:
        logprobs = self._shape.logprobs
        entries = "null" if logprobs is None else logprobs[index].joined(choice.entries)
        text = quoted("".join(choice.texts))
        if self._is_chat:
            if calls := ",".join(each.json(at) for at, each in sorted(choice.calls.items())):
                text = f'{text if choice.texts else "null"},"tool_calls":[{calls}]'
            if choice.reasonings:
                text += f',"reasoning_content":{quoted("".join(choice.reasonings))}'
            text = f'"message":{{"role":"assistant","content":{text},"refusal":null}}'
        else:
            text = f'"text":{text}'
        return f'{{"index":{index},{text},"logprobs":{entries},"finish_reason":{choice.reason}}}'


class _ToolCall:
    """A tool call that is put together of its parts."""

    def __init__(self) -> None:
        self.id = self.name = ""
        self._arguments: list[str] = []

    def add(self, part: inference_pb2.ToolCallDelta) -> None:
        self.id, self.name = self.id or part.id, self.name or part.name
        self._arguments.append(part.arguments)

    def json(self, index: int) -> str:
        function = f'{{"name":{quoted(self.name)},"arguments":{quoted("".join(self._arguments))}}}'
        return f'{{"id":{quoted(self.id)},"type":"function","function":{function}}}'


def _delta(tokens: inference_pb2.Tokens) -> str:
    """What a streamed event adds to the reasoning or to a tool call. The call's first part names it."""
    if tokens.HasField("reasoning"):
        return f'"reasoning_content":{quoted(tokens.reasoning)}'
    part = tokens.tool_call
    head, name = "", ""
    if part.name:
        head, name = f'"id":{quoted(part.id)},"type":"function",', f'"name":{quoted(part.name)},'
    arguments = quoted(part.arguments)
    return f'"tool_calls":[{{"index":{part.index},{head}"function":{{{name}"arguments":{arguments}}}}}]'


class _Echo:
    """The prompt's text, as a completion repeats it. A prompt with log-probabilities may come in several parts."""

    def __init__(self, given: str) -> None:
        self._given = given
        self._has_begun = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, part: inference_pb2.Prompt) -> str:
        """The text that a part adds; a prompt that was given as text comes whole with its first part."""
        if not self._given:
            return self._decoder.decode(b"".join(each.bytes for each in part.tokens))
        text, self._has_begun = "" if self._has_begun else self._given, True
        return text


class _Usage:
    """The tokens of an answer, summed over its prompts.

    drops_output  no completion token counts: the one that the engine computed was not asked for
    """

    def __init__(self, drops_output: bool) -> None:
        self._drops_output = drops_output
        self._prompt = self._cached = self._completion = self._reasoning = 0

    def add(self, usage: inference_pb2.Usage) -> None:
        self._prompt += usage.prompt_tokens
        self._cached += usage.cached_tokens
        if not self._drops_output:
            self._completion += usage.completion_tokens
            self._reasoning += usage.reasoning_tokens

    def json(self) -> str:
        return (
            f'{{"prompt_tokens":{self._prompt},"completion_tokens":{self._completion},'
            f'"total_tokens":{self._prompt + self._completion},'
            f'"prompt_tokens_details":{{"cached_tokens":{self._cached}}},'
            f'"completion_tokens_details":{{"reasoning_tokens":{self._reasoning}}}}}'
        )


def _timings(message: inference_pb2.GenerateResponse, n: int) -> str:
    """How long the parts of a request took, by llama.cpp's names and some of the protocol's, as the end of an object.

    A sequence's first token belongs to the prompt's time: it is the last step of that which makes it.
    """
    usage, timing = message.usage, message.timing
    prompt, later = usage.prompt_tokens - usage.cached_tokens, max(0, usage.completion_tokens - n)
    prompt_ms, later_ms = 1e3 * timing.prefill_s, 1e3 * (timing.decode_s + timing.preempted_s)
    found = {
        "cache_n": usage.cached_tokens,
        "prompt_n": prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / prompt if prompt else 0,
        "prompt_per_second": 1e3 * prompt / prompt_ms if prompt_ms else 0,
        "predicted_n": usage.completion_tokens,
        "predicted_ms": later_ms,
        "predicted_per_token_ms": later_ms / later if later else 0,
        "predicted_per_second": 1e3 * later / later_ms if later_ms else 0,
        "queue_ms": 1e3 * timing.queue_s,
        "time_to_first_token_ms": 1e3 * timing.time_to_first_token_s,
        "total_ms": 1e3 * timing.total_s,
    }
    if usage.drafted_tokens:
        found |= {"draft_n": usage.drafted_tokens, "draft_n_accepted": usage.accepted_tokens}
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}
    return f',"timings":{json.dumps(rounded, separators=(",", ":"))}'


def _cut() -> Aborted:
    return Aborted("the server ended the request before its answer was complete")


# -- log-probabilities ------------------------------------------------------------------------------------------------


class _Logprobs(Protocol):
    """Log-probabilities of one sequence: an entry for each token, as pieces of JSON.

    offset  where the next token's text begins, and the bytes before it that are no whole character; None: is not told
    """

    offset: tuple[int, bytes] | None

    def of(self, tokens: Sequence[inference_pb2.Token]) -> list[tuple[str, ...]]: ...

    def joined(self, entries: Sequence[tuple[str, ...]]) -> str: ...


class _ChatLogprobs:
    offset: tuple[int, bytes] | None = None

    def of(self, tokens: Sequence[inference_pb2.Token]) -> list[tuple[str, ...]]:
        return [
            (f'{{{_chat_token(each)},"top_logprobs":[{",".join(f"{{{_chat_token(top)}}}" for top in each.top)}]}}',)
            for each in tokens
        ]

    def joined(self, entries: Sequence[tuple[str, ...]]) -> str:
        return f'{{"content":[{",".join(entry for (entry,) in entries)}],"refusal":null}}'


class _CompletionLogprobs:
    def __init__(self) -> None:
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")

    @property
    def offset(self) -> tuple[int, bytes] | None:
        return self._offset, self._decoder.getstate()[0]

    @offset.setter
    def offset(self, offset: tuple[int, bytes] | None) -> None:
        self._offset, pending = offset or (0, b"")
        self._decoder.setstate((pending, 0))

    def of(self, tokens: Sequence[inference_pb2.Token]) -> list[tuple[str, ...]]:
        found: list[tuple[str, ...]] = []
        for each in tokens:
            token = quoted(_name(each.bytes))
            if not each.HasField("logprob"):  # the first of a prompt
                found.append((token, "null", "null", str(self._offset)))
                self._offset += len(self._decoder.decode(each.bytes))
                continue
            logprob = _number(each.logprob)
            tops = {quoted(_name(top.bytes)): _number(top.logprob) for top in each.top} | {token: logprob}
            found.append(
                (
                    token,
                    logprob,
                    f"{{{','.join(f'{name}:{value}' for name, value in tops.items())}}}",
                    str(self._offset),
                )
            )
            self._offset += len(self._decoder.decode(each.bytes))
        return found

    def joined(self, entries: Sequence[tuple[str, ...]]) -> str:
        lists = [",".join(column) for column in zip(*entries, strict=True)] or [""] * 4
        return (
            f'{{"tokens":[{lists[0]}],"token_logprobs":[{lists[1]}],"top_logprobs":[{lists[2]}],'
            f'"text_offset":[{lists[3]}]}}'
        )


def _chat_token(token: inference_pb2.Token | inference_pb2.TopToken) -> str:
    raw = token.bytes
    text = quoted(raw.decode(errors="replace"))
    return f'"token":{text},"logprob":{_number(token.logprob)},"bytes":{json.dumps([*raw])}'


def _name(raw: bytes) -> str:
    """A token's text; the bytes of one that is no whole characters, so that two of them differ."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _number(logprob: float) -> str:
    return f"{max(logprob, _LEAST_LOGPROB):.7g}"

"""The blocks of an answer: runs of text and of reasoning, and tool calls, as newer APIs than chat completions do it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal, NamedTuple

from pagoda.v1 import inference_pb2

from ..errors import Aborted
from .http_call import Answer

Kind = Literal["text", "reasoning", "tool_call"]


@dataclass(slots=True)
class Block:
    """One block.

    index  its place in the answer
    id     of a tool call
    name   of the tool that it calls
    """

    index: int
    kind: Kind
    id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)

    @property
    def content(self) -> str:
        """Text, reasoning, or a tool call's arguments, which are JSON."""
        return "".join(self.parts)


class Phase(Enum):
    BEGUN = auto()
    GROWN = auto()
    ENDED = auto()


class Change(NamedTuple):
    """What has become of a block. part: what was added to one that has grown."""

    phase: Phase
    block: Block
    part: str = ""


class Blocks:
    """Puts an answer's blocks together, of messages of Generate for one sequence."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._tool: int | None = None  # the index of the call that the last block is

    def add(self, tokens: inference_pb2.Tokens) -> Iterator[Change]:
        """Add what the tokens add to the answer, and say what that changes."""
        match tokens.WhichOneof("delta"):
            case "text":
                yield from self._grow("text", tokens.text)
            case "reasoning":
                yield from self._grow("reasoning", tokens.reasoning)
            case "tool_call":
                call = tokens.tool_call
                yield from self._grow("tool_call", call.arguments, call)

    def end(self) -> Iterator[Change]:
        """End the last block."""
        if self.all:
            yield Change(Phase.ENDED, self.all[-1])

    def _grow(self, kind: Kind, part: str, call: inference_pb2.ToolCallDelta | None = None) -> Iterator[Change]:
        tool = None if call is None else call.index
        if not self.all or (self.all[-1].kind, self._tool) != (kind, tool):
            if not part and call is None:
                return
            yield from self.end()
            block = Block(len(self.all), kind, call.id if call else "", call.name if call else "")
            self._tool = tool
            self.all.append(block)
            yield Change(Phase.BEGUN, block)
        if part:
            self.all[-1].parts.append(part)
            yield Change(Phase.GROWN, self.all[-1], part)


class BlockAnswer(Answer):
    """An answer of blocks, for one sequence. What is streamed overrides `grown`."""

    def __init__(self) -> None:
        self.blocks = Blocks()
        self._last: inference_pb2.GenerateResponse | None = None

    def take(self, message: inference_pb2.GenerateResponse, prompt: int = 0) -> bytes:
        if message.HasField("finished"):
            self._last = inference_pb2.GenerateResponse()
            self._last.CopyFrom(message)
            return b""
        return self.grown([*self.blocks.add(message.tokens)])

    def grown(self, changes: list[Change]) -> bytes:
        """The bytes to send after these changes, which may be none."""
        return b""

    @property
    def last(self) -> inference_pb2.GenerateResponse:
        """The message that ended the sequence. Raises Aborted if the answer is not complete."""
        assert self._last is not None, "the call has ended well"
        if self._last.finished.reason == inference_pb2.FINISH_REASON_CANCELLED:
            raise Aborted("the server ended the request before its answer was complete")
        return self._last

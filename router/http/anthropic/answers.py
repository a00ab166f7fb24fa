"""Answers of Anthropic's Messages API: messages of the protocol as its JSON, at once or as server-sent events."""

from __future__ import annotations

import json
from typing import Any

from pagoda.v1 import inference_pb2

from ...errors import Aborted
from ...request.conversions import Tokenized
from ..blocks import Block, Blocks, Change, Phase
from ..errors import Refusal
from ..http_call import Answer

_REASONS = {
    inference_pb2.FINISH_REASON_STOP: "end_turn",
    inference_pb2.FINISH_REASON_LENGTH: "max_tokens",
    inference_pb2.FINISH_REASON_TOOL_CALLS: "tool_use",
}
_CONTENT = {"text": "text", "reasoning": "thinking", "tool_call": "input"}
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "tool_call": ("input_json_delta", "partial_json"),
}


class _Message:
    """What both forms of an answer share: the blocks, why it ended, and what it took."""

    def __init__(self, request_id: str, model: str) -> None:
        self.blocks = Blocks()
        self._head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model}
        self._finished: inference_pb2.GenerateResponse | None = None

    def finish(self, message: inference_pb2.GenerateResponse) -> None:
        self._finished = inference_pb2.GenerateResponse()
        self._finished.CopyFrom(message)

    def begun(self) -> dict[str, Any]:
        """The message before its first block; how long the prompt is becomes known with its end."""
        return self._head | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(0, 0, 0)}

    def whole(self) -> dict[str, Any]:
        content = [_complete(block) for block in self.blocks.all]
        return self._head | {"content": content} | self.ending() | {"usage": self.usage()}

    def ending(self) -> dict[str, str | None]:
        """Why the message ended. Raises Aborted if it is not complete."""
        assert self._finished is not None, "the call has ended well"
        finished = self._finished.finished
        if finished.reason == inference_pb2.FINISH_REASON_CANCELLED:
            raise Aborted("the server ended the request before its answer was complete")
        if finished.HasField("stop_string"):
            return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop_string}
        return {"stop_reason": _REASONS[finished.reason], "stop_sequence": None}

    def usage(self) -> dict[str, int]:
        assert self._finished is not None, "the call has ended well"
        usage = self._finished.usage
        return _usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


class WholeMessage(Answer):
    """An answer that is kept until it is complete."""

    def __init__(self, request_id: str, model: str) -> None:
        self._message = _Message(request_id, model)

    def take(self, message: inference_pb2.GenerateResponse, prompt: int = 0) -> bytes:
        if message.HasField("finished"):
            self._message.finish(message)
        for _ in self._message.blocks.add(message.tokens):
            pass
        return b""

    def end(self) -> bytes:
        return _json(self._message.whole())


class StreamedMessage(Answer):
    """Server-sent events: blocks that begin, grow and end one after the other, within a message that does."""

    media_type = "text/event-stream; charset=utf-8"

    def __init__(self, request_id: str, model: str) -> None:
        self._message = _Message(request_id, model)
        self._has_begun = False

    def take(self, message: inference_pb2.GenerateResponse, prompt: int = 0) -> bytes:
        if message.HasField("finished"):
            self._message.finish(message)
            return b""
        changes = [_event(*_of(change)) for change in self._message.blocks.add(message.tokens)]
        return b"".join([*self._begin(), *changes]) if changes else b""

    def _begin(self) -> list[bytes]:
        if self._has_begun:
            return []
        self._has_begun = True
        return [_event("message_start", message=self._message.begun())]

    def end(self) -> bytes:
        ending = self._message.ending()
        return b"".join(
            [
                *self._begin(),
                *(_event(*_of(change)) for change in self._message.blocks.end()),
                _event("message_delta", delta=ending, usage=self._message.usage()),
                _event("message_stop"),
            ]
        )

    def failed(self, refused: Refusal) -> bytes:
        return b"event: error\ndata: " + refused.body + b"\n\n"


class TokenCount(Answer):
    """How many tokens a request's prompt has."""

    def __init__(self) -> None:
        self._answer = b""

    def take(self, message: Tokenized, prompt: int = 0) -> bytes:
        self._answer = _json({"input_tokens": len(message.ids)})
        return b""

    def end(self) -> bytes:
        return self._answer


def _usage(prompt: int, cached: int, completion: int) -> dict[str, int]:
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion,
    }


def _empty(block: Block) -> dict[str, Any]:
    """A block before it grows."""
    match block.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}  # with nothing to sign
        case "tool_call":
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}


def _complete(block: Block) -> dict[str, Any]:
    content = _arguments(block) if block.kind == "tool_call" else block.content
    return _empty(block) | {_CONTENT[block.kind]: content}


def _arguments(block: Block) -> Any:
    try:
        return json.loads(block.content or "{}")
    except ValueError:  # max_tokens has cut it
        return {}


def _of(change: Change) -> tuple[str, dict[str, Any]]:
    """An event's name and fields."""
    place: dict[str, Any] = {"index": change.block.index}
    match change.phase:
        case Phase.BEGUN:
            return "content_block_start", place | {"content_block": _empty(change.block)}
        case Phase.GROWN:
            kind, name = _DELTAS[change.block.kind]
            return "content_block_delta", place | {"delta": {"type": kind, name: change.part}}
        case Phase.ENDED:
            return "content_block_stop", place


def _event(name: str, values: dict[str, Any] | None = None, **more: Any) -> bytes:
    body = _json({"type": name} | (values or {}) | more)
    return b"event: " + name.encode() + b"\ndata: " + body + b"\n\n"


def _json(values: dict[str, Any]) -> bytes:
    return json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()

"""Answers of Anthropic's Messages API: messages of the protocol as its JSON, at once or as server-sent events."""

from __future__ import annotations

import json
from typing import Any

from pagoda.v1 import inference_pb2

from ...request.conversions import Tokenized
from ..blocks import Block, BlockAnswer, Change, Phase
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


class WholeMessage(BlockAnswer):
    """An answer that is kept until it is complete."""

    def __init__(self, request_id: str, model: str) -> None:
        super().__init__()
        self._head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model}

    def end(self) -> bytes:
        content = [_complete(block) for block in self.blocks.all]
        return _json(self._head | {"content": content} | self._ending() | {"usage": self._usage()})

    def _ending(self) -> dict[str, str | None]:
        """Why the message ended. Raises Aborted."""
        finished = self.last.finished
        if finished.HasField("stop_string"):
            return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop_string}
        return {"stop_reason": _REASONS[finished.reason], "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        usage = self.last.usage
        return _usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


class StreamedMessage(WholeMessage):
    """Server-sent events: blocks that begin, grow and end one after the other, within a message that does."""

    media_type = "text/event-stream; charset=utf-8"

    def __init__(self, request_id: str, model: str) -> None:
        super().__init__(request_id, model)
        self._has_begun = False

    def grown(self, changes: list[Change]) -> bytes:
        return b"".join([*self._begin(), *(_event(*_of(change)) for change in changes)]) if changes else b""

    def _begin(self) -> list[bytes]:
        """The message before its first block; how long the prompt is becomes known with its end."""
        if self._has_begun:
            return []
        self._has_begun = True
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(0, 0, 0)}
        return [_event("message_start", message=self._head | empty)]

    def end(self) -> bytes:
        ending = self._ending()
        return b"".join(
            [
                *self._begin(),
                *(_event(*_of(change)) for change in self.blocks.end()),
                _event("message_delta", delta=ending, usage=self._usage()),
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

"""Answers of OpenAI's Responses API: messages of the protocol as its JSON, at once or as server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pagoda.v1 import inference_pb2

from ..blocks import Block, BlockAnswer, Change, Phase
from ..errors import Refusal
from .requests import Asked

_TYPES = {"text": "message", "reasoning": "reasoning", "tool_call": "function_call"}
_PREFIXES = {"text": "msg", "reasoning": "rs", "tool_call": "fc"}
_DELTAS = {"text": "output_text", "reasoning": "reasoning_text", "tool_call": "function_call_arguments"}


class WholeResponse(BlockAnswer):
    """An answer that is kept until it is complete."""

    def __init__(self, asked: Asked, request_id: str, model: str) -> None:
        super().__init__()
        self._id = request_id
        self._head = {
            "id": f"resp_{request_id}", "object": "response", "created_at": asked.created, "model": model,
            "background": False, "error": None, "previous_response_id": None, "store": False,
            "service_tier": "default", "truncation": "disabled",
        }  # fmt: skip
        self._echoed = asked.echoed

    def end(self) -> bytes:
        last, usage = len(self.blocks.all) - 1, self.last.usage
        return self.response(
            status=self.status,
            incomplete_details={"reason": "max_output_tokens"} if self.is_cut else None,
            output=[self.item(block, self.is_cut and block.index == last) for block in self.blocks.all],
            usage={
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        )

    def response(self, **values: Any) -> bytes:
        return _object(self._head | values)[:-1] + b"," + self._echoed + b"}"

    @property
    def is_cut(self) -> bool:
        """Whether the response has ended before the model ended it. Raises Aborted."""
        return self.last.finished.reason == inference_pb2.FINISH_REASON_LENGTH

    @property
    def status(self) -> str:
        return "incomplete" if self.is_cut else "completed"

    def id_of(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self._id}_{block.index}"

    def item(self, block: Block, is_cut: bool) -> dict[str, Any]:
        """A block that has ended, as an item of the output."""
        status = "incomplete" if is_cut else "completed"
        return self.begun_item(block) | {"status": status} | _content(block, is_begun=False)

    def begun_item(self, block: Block) -> dict[str, Any]:
        head = {"type": _TYPES[block.kind], "id": self.id_of(block), "status": "in_progress"}
        return head | _content(block, is_begun=True)


def _content(block: Block, is_begun: bool) -> dict[str, Any]:
    """What an item of this kind holds, at first or in the end."""
    match block.kind:
        case "text":
            return {"role": "assistant", "content": [] if is_begun else [part(block)]}
        case "reasoning":
            return {"summary": [], "content": [] if is_begun else [part(block)]}
        case "tool_call":
            return {"call_id": block.id, "name": block.name, "arguments": "" if is_begun else block.content}


def part(block: Block, content: str | None = None) -> dict[str, Any]:
    """A text as the part of an item. content: None for all of it."""
    text = block.content if content is None else content
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class StreamedResponse(WholeResponse):
    """Server-sent events, which are numbered: items begin, grow and end one after the other, within a response."""

    media_type = "text/event-stream; charset=utf-8"

    def __init__(self, asked: Asked, request_id: str, model: str) -> None:
        super().__init__(asked, request_id, model)
        self._num_events = 0

    def grown(self, changes: list[Change]) -> bytes:
        return b"".join([*self._begin(), *self._events(changes)]) if changes else b""

    def end(self) -> bytes:
        is_cut, name = self.is_cut, f"response.{self.status}"
        events = [*self._begin(), *self._events([*self.blocks.end()], is_cut)]
        return b"".join([*events, self._event(name, {}, super().end())])

    def failed(self, refused: Refusal) -> bytes:
        error = json.loads(refused.body)["error"]
        return self._event("error", {name: error[name] for name in ("code", "message", "param")})

    def _begin(self) -> Iterator[bytes]:
        if not self._num_events:
            begun = self.response(status="in_progress", incomplete_details=None, output=[], usage=None)
            for name in ("response.created", "response.in_progress"):
                yield self._event(name, {}, begun)

    def _events(self, changes: list[Change], is_cut: bool = False) -> Iterator[bytes]:
        for change in changes:
            block = change.block
            at: dict[str, Any] = {"output_index": block.index}
            inside = at | {"item_id": self.id_of(block)}
            is_call = block.kind == "tool_call"
            text = inside if is_call else inside | {"content_index": 0}
            name = f"response.{_DELTAS[block.kind]}"
            logprobs: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
            match change.phase:
                case Phase.BEGUN:
                    yield self._event("response.output_item.added", at | {"item": self.begun_item(block)})
                    if not is_call:
                        yield self._event("response.content_part.added", text | {"part": part(block, "")})
                case Phase.GROWN:
                    yield self._event(f"{name}.delta", text | {"delta": change.part} | logprobs)
                case Phase.ENDED:
                    if is_call:
                        yield self._event(f"{name}.done", text | {"name": block.name, "arguments": block.content})
                    else:
                        yield self._event(f"{name}.done", text | {"text": block.content} | logprobs)
                        yield self._event("response.content_part.done", text | {"part": part(block)})
                    yield self._event("response.output_item.done", at | {"item": self.item(block, is_cut)})

    def _event(self, name: str, values: dict[str, Any], response: bytes = b"") -> bytes:
        """An event's bytes. response: JSON that it holds besides these values."""
        body = _object({"type": name, "sequence_number": self._num_events} | values)
        if response:
            body = body[:-1] + b',"response":' + response + b"}"
        self._num_events += 1
        return b"event: " + name.encode() + b"\ndata: " + body + b"\n\n"


def _object(values: dict[str, Any]) -> bytes:
    return json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()

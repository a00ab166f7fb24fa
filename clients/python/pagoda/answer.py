"""A whole answer: what the chunks of a stream add up to."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pagoda.chunk import Chunk, FinishReason, Timing, Usage


@dataclass(slots=True)
class ToolCall:
    """A call of one of the tools. `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str

    @property
    def parsed(self) -> dict[str, Any]:
        """The arguments. Raises ValueError if the answer was cut before they were complete."""
        parsed: dict[str, Any] = json.loads(self.arguments or "{}")
        return parsed


@dataclass(slots=True)
class Answer:
    """A whole answer of one sequence.

    text           without reasoning and tool calls, where the server separates them
    tokens         the ids of all of its tokens
    finish_reason  None: the stream has broken off
    matched        the stop string or token id that ended it; True: its grammar
    """

    request_id: str = ""
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    matched: str | int | None = None
    usage: Usage | None = None
    timing: Timing | None = None
    _model: Any = None

    @property
    def parsed(self) -> Any:
        """The text as JSON; if `json_schema` was a class with `model_validate_json`, such as pydantic's, one of it.

        Raises ValueError if the text is not JSON, or does not fit the class: a limit may have cut it.
        """
        return self._model.model_validate_json(self.text) if self._model is not None else json.loads(self.text)


def answer_of(chunks: Iterable[Chunk], schema: object = None) -> Answer:
    """Put an answer together.

    schema  the option `json_schema`
    """
    answer = Answer(_model=schema if hasattr(schema, "model_validate_json") else None)
    calls: dict[int, ToolCall] = {}
    texts, reasonings = [], []
    for chunk in chunks:
        answer.request_id = chunk.request_id
        texts.append(chunk.text)
        reasonings.append(chunk.reasoning)
        answer.tokens += chunk.tokens
        if (part := chunk.tool_call) is not None:
            call = calls.setdefault(part.index, ToolCall("", "", ""))
            call.id, call.name = call.id or part.id, call.name or part.name
            call.arguments += part.arguments
        if chunk.finish_reason is not None:
            answer.finish_reason, answer.matched = chunk.finish_reason, chunk.matched
        answer.usage, answer.timing = chunk.usage or answer.usage, chunk.timing or answer.timing
    answer.text, answer.reasoning = "".join(texts), "".join(reasonings)
    answer.tool_calls = [call for _, call in sorted(calls.items())]
    return answer

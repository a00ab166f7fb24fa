"""Helpers that parse a whole answer, cut in any way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pagoda_server.router.answers.events import CallPart, Event, Reasoning, Text, joined
from pagoda_server.router.answers.formats import AnswerFormat
from pagoda_server.router.answers.parser import AnswerParser

TOOLS: dict[str, dict[str, Any]] = {
    "add": {"properties": {"c": {"type": "integer"}, "d": {"type": ["string", "null"]}}},
    "get_weather.v2": {"type": "object", "properties": {}},
}


def events_of(
    format: AnswerFormat,
    pieces: Iterable[str],
    prompt_end: str = "",
    tools: Mapping[str, Mapping[str, Any]] = TOOLS,
    is_due: bool = False,
) -> list[Event]:
    """What an answer consists of, its neighbours of one kind joined."""
    parser = AnswerParser(format, tools, prompt_end, lambda call: f"id{call}", is_due)
    found = [event for piece in pieces for event in parser.push(piece)]
    return joined([*found, *parser.flush()])


def cut(text: str, places: Iterable[int]) -> list[str]:
    """The text in pieces, which end at these places."""
    ends = sorted({*(place for place in places if place < len(text)), len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def call(index: int, name: str, arguments: str) -> CallPart:
    return CallPart(index, arguments, f"id{index}", name)


def told(events: Iterable[Event]) -> str:
    """All characters of all parts, in order, without the names of tools."""
    texts = []
    for event in events:
        match event:
            case Text(text) | Reasoning(text):
                texts.append(text)
            case CallPart():
                texts.append(event.arguments)
    return "".join(texts)

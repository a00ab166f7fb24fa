"""The parts of an answer as a client gets them. The parts of a kind, joined, are that kind's whole text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """A part of a tool call.

    index      which of the answer's calls
    id, name   in a call's first part only
    arguments  the next part of the JSON object
    """

    index: int
    arguments: str
    id: str = ""
    name: str = ""


Event: TypeAlias = Text | Reasoning | CallPart


def joined(events: Iterable[Event]) -> list[Event]:
    """The same parts with neighbours of one kind as one."""
    found: list[Event] = []
    for event in events:
        match (found[-1] if found else None), event:
            case Text(before), Text(after):
                found[-1] = Text(before + after)
            case Reasoning(before), Reasoning(after):
                found[-1] = Reasoning(before + after)
            case CallPart(index, before, id, name), CallPart(same, after, "", "") if index == same:
                found[-1] = CallPart(index, before + after, id, name)
            case _:
                found.append(event)
    return found

"""Turn an answer's text into events while it arrives."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..text.chat_template import Json
from .events import CallPart, Event, joined
from .formats import AnswerFormat
from .reader import AnswerReader


class AnswerParser:
    """One sequence's answer.

    tools       schemas of the arguments of the tools that it may call, by name; none: calls stay text
    prompt_end  the prompt's last characters
    call_id     gives the id of the answer's nth call
    is_due      it has to call: half a marker at its end is no text
    is_single   it ends with its first call: what follows is dropped
    """

    def __init__(
        self,
        format: AnswerFormat,
        tools: Mapping[str, Mapping[str, Json]],
        prompt_end: str,
        call_id: Callable[[int], str],
        is_due: bool = False,
        is_single: bool = False,
    ) -> None:
        self._is_single = is_single
        self._reader = AnswerReader(tools, call_id, is_due)
        self._steps = format.read(self._reader, prompt_end)
        next(self._steps)

    @property
    def num_calls(self) -> int:
        """Calls whose arguments are complete."""
        return self._reader.num_calls

    @property
    def has_ended(self) -> bool:
        """Whether the answer ends here, whatever the model goes on with."""
        return self._is_single and self.num_calls > 0

    @property
    def is_thinking(self) -> bool:
        """Whether the answer is inside its reasoning."""
        return self._reader.is_thinking

    def push(self, text: str) -> list[Event]:
        """What is certain now. Joined, the events do not depend on how the text was cut."""
        self._reader.feed(text)
        next(self._steps)
        return self._taken()

    def flush(self) -> list[Event]:
        """The rest, when the answer has ended."""
        self._reader.has_ended = True
        for _ in self._steps:
            raise AssertionError("a format waits for more text than there is")
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._reader.events = self._reader.events, []
        if self.has_ended:
            while events and not (isinstance(events[-1], CallPart) and events[-1].index == 0):
                events.pop()
        return joined(events)

"""The sequences that an engine computes for this router, and what it has said of its load."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import control_pb2

from ..errors import EngineLost, Internal
from .stream import EngineStream, Wakeups
from .table import EngineTable


class Sequences:
    """Delivers what an engine sends to the streams that its sequences belong to. Numbers are never used again.

    load, tenants  as of the engine's last report
    """

    def __init__(self, wakeups: Wakeups, table: EngineTable, row: int) -> None:
        """
        table, row  where the engine's load is kept up to date: its sequences and uncomputed prompt tokens, this
                    router's as they are and those of others as of the last report
        """
        self.load = control_pb2.EngineLoad()
        self.tenants = engine_pb2.Tenants()
        self._wakeups = wakeups
        self._next_number = itertools.count(1)
        self._routes: dict[int, tuple[EngineStream, int]] = {}
        self._num_others = 0  # sequences of other routers, as of the last report
        self._uncomputed: dict[EngineStream, int] = {}  # prompt tokens of streams that have not begun
        self._num_uncomputed = 0  # their sum
        self._num_others_uncomputed = 0  # of other routers' sequences, as of the last report
        self._table, self._row = table, row

    def __len__(self) -> int:
        return len(self._routes)

    def add(
        self,
        count: int,
        num_uncomputed: int,
        *,
        abort: Callable[[list[int]], None],
        forget: Callable[[EngineStream], None],
        on_start: Callable[[], None],
    ) -> EngineStream:
        """Return a stream of new sequences.

        num_uncomputed          tokens of the prompt that the engine has not cached
        abort, forget, on_start  see EngineStream
        """
        numbers = [next(self._next_number) for _ in range(count)]
        stream = EngineStream(numbers[0], count, abort=abort, forget=forget, on_start=on_start)
        for index, number in enumerate(numbers):
            self._routes[number] = (stream, index)
        self._uncomputed[stream] = num_uncomputed
        self._num_uncomputed += num_uncomputed
        self._look_ahead()
        return stream

    def _look_ahead(self) -> None:
        self._table.update(
            self._row,
            len(self._routes) + self._num_others,
            self._num_uncomputed + self._num_others_uncomputed,
            self.load.prefill_tokens_per_s,
        )

    def adapters(self) -> tuple[Counter[bytes], Counter[bytes]]:
        """Count requests that run, and that wait for their first token, by the identities of their adapters."""
        streams = {stream for stream, _ in self._routes.values() if stream.adapter}
        running = Counter(stream.adapter for stream in streams if stream.has_begun)
        return running, Counter(stream.adapter for stream in streams if not stream.has_begun)

    def known(self, numbers: list[int]) -> list[int]:
        """Return those of these sequences that have not ended."""
        return [number for number in numbers if number in self._routes]

    def forget(self, stream: EngineStream) -> range:
        """Deliver nothing more to a stream; return its numbers."""
        self._computed(stream)
        numbers = range(stream.first_sequence, stream.first_sequence + len(stream.inboxes))
        for number in numbers:
            self._routes.pop(number, None)
        self._look_ahead()
        return numbers

    def deliver(self, step: engine_pb2.StepOutput) -> None:
        self.load = step.load
        if step.HasField("tenants"):
            self.tenants = step.tenants
        for number in step.started:
            if route := self._routes.get(number):
                self._report_start(route[0])
        for reading in step.readings:
            if route := self._routes.get(reading.sequence):
                route[0].inboxes[route[1]].readings.append(reading)
        logprobs = {entry.at: entry for entry in step.logprobs}
        for at, (number, token) in enumerate(zip(step.sequences, step.tokens, strict=True)):
            if route := self._routes.get(number):
                stream, index = route
                stream.inboxes[index].tokens.append(token)
                if logprobs and at in logprobs:
                    stream.inboxes[index].logprobs.append(logprobs[at])
                self._wakeups.add(stream)
                if not stream.has_begun:
                    stream.has_begun = True
                    self._computed(stream)
                    self._report_start(stream)
        for ended in step.ended:
            if route := self._routes.pop(ended.sequence, None):
                stream, index = route
                stream.inboxes[index].ended = ended
                stream.live.discard(index)
                if not stream.live:
                    self._computed(stream)
                self._report_start(stream)
                self._wakeups.add(stream)
        self._num_others = max(0, step.load.waiting + step.load.running - len(self._routes))
        self._num_others_uncomputed = max(0, step.load.uncomputed_tokens - self._num_uncomputed)
        self._look_ahead()
        self._wakeups.start()

    def lose(self, error: Callable[[], EngineLost]) -> None:
        """Fail every stream, and forget what the engine has reported.

        error  makes that of one stream
        """
        self._num_others = self._num_uncomputed = self._num_others_uncomputed = 0
        self._uncomputed.clear()
        self.load, self.tenants = control_pb2.EngineLoad(), engine_pb2.Tenants()
        for stream, _ in self._routes.values():
            stream.error = error()
            self._wakeups.add(stream)
        self._wakeups.start()
        self._routes.clear()
        self._look_ahead()

    def _report_start(self, stream: EngineStream) -> None:
        """Call a stream's on_start. What it raises ends that stream: the step has output of others."""
        try:
            stream.on_start()
        except Exception as error:
            stream.error = Internal("a stream's on_start failed")
            stream.error.__cause__ = error
            self._wakeups.add(stream)

    def _computed(self, stream: EngineStream) -> None:
        """Note that a stream's prompt needs no more computing."""
        self._num_uncomputed -= self._uncomputed.pop(stream, 0)

"""Which engine computes a request, from its first one to the last."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from pagoda.engine.v1 import engine_pb2

from ..engines.channel import EngineChannel
from ..engines.choosing import Asked
from ..engines.fleet import Engines
from ..errors import EngineLost
from .client_call import time_left
from .generate_call import GenerateCall, Stream
from .migration import Migration
from .resuming import Progress, has_begun, submit_again
from .services import AdmittedCall


class Placement:
    """The engine that computes a request, and the stream from it: another one when the engine is lost or leaves.

    A context manager that ends the sequences which still run.

    admitted      the call
    engines       those of its model
    submit        the request as the first engine gets it
    submitted_at  when it was first submitted, on the monotonic clock
    on_start      called when it starts to be computed
    """

    engine: EngineChannel
    stream: Stream

    def __init__(
        self,
        admitted: AdmittedCall,
        engines: Engines,
        submit: engine_pb2.Submit,
        submitted_at: float,
        on_start: Callable[[], None],
    ) -> None:
        self._admitted = admitted
        self._engines = engines
        self._submit = submit
        self._submitted_at = submitted_at
        self._on_start = on_start
        self._left: list[Stream] = []  # streams from engines that were not lost: how their sequences end is counted
        self._migration: Migration | None = None

    def begin(self, asked: Asked, progress: Progress | None) -> None:
        """Submit the request to an engine.

        progress  of a stream that is resumed; None: it is new, and the engine can have the message as it is
        """
        engine = self._engines.pick(asked=asked)
        if progress is not None:
            self._submit_to(engine, progress, asked)
        else:
            self._note(engine, engine.submit(self._submit, self._on_start, asked))

    async def run(self, answer: GenerateCall, prompt: Sequence[int]) -> bool:
        """Write what the engine sends. Return whether that was all; otherwise the request is at another engine now.

        prompt  see GenerateCall.run
        """
        if self._migration is None:
            self._migration = self._new_migration(answer)
        try:
            if await answer.run(self.stream, prompt, self._migration.is_due):
                return True
        except EngineLost as lost:
            self.stream.close()
            begun = has_begun(answer.progress)
            engine = await self._admitted.elsewhere(self._engines, self.engine, lost, has_begun=begun)
        else:
            target = self._migration.target
            assert target is not None, "it is due"
            engine = target
            answer.left.append(self.stream.inboxes)
            self._left.append(self.stream)
            self.stream.abort()
        self._migration.close()
        self._migration = None
        ends = self._admitted.live.is_aborted
        self._submit_to(engine, [None] * len(answer.progress) if ends else answer.progress)
        return False

    def _new_migration(self, answer: GenerateCall) -> Migration:
        return Migration(
            self._admitted.services.migrations,
            self._engines,
            self.engine,
            self._submit,
            lambda: answer.progress,
            lambda: time_left(self._admitted.call),
        )

    def _submit_to(self, engine: EngineChannel, progress: Progress, asked: Asked | None = None) -> None:
        age_s, timeout_s = time.monotonic() - self._submitted_at, time_left(self._admitted.call)
        self._note(
            engine,
            submit_again(
                engine, self._submit, progress, age_s=age_s, timeout_s=timeout_s, on_start=self._on_start, asked=asked
            ),
        )

    def _note(self, engine: EngineChannel, stream: Stream) -> None:
        self.engine, self.stream = engine, stream
        self._admitted.record.engine = engine.name
        self._admitted.live.stream = stream

    def __enter__(self) -> Placement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._migration is not None:
            self._migration.close()
        for each in (self.stream, *self._left):
            each.close()

"""Which engine computes a request, from its first one to the last."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from pagoda.engine.v1 import engine_pb2

from ..engines.channel import EngineChannel
from ..engines.choosing import Asked
from ..engines.fleet import Engines
from ..engines.stream import EngineStream, SequenceInbox
from ..errors import EngineLost
from .client_call import time_left
from .generate_call import GenerateCall, Stream
from .migration import Migration
from .resuming import Progress, has_begun, new_progress, submit_again
from .services import AdmittedCall


class HandedOver(Exception):
    """All that a prefill engine computes of a request is there, and has been taken."""


class FirstTokens:
    """The first tokens of a request, from a prefill engine; with an EngineStream's interface.

    Its sequences end there with one token, as far as the engine is concerned. Their readers do not see that end.

    inboxes  what `wait` has found; what arrives later stays out of them, so that no end is seen before it is hidden
    ends     of these sequences, by index
    """

    def __init__(self, stream: EngineStream) -> None:
        self.inboxes = [SequenceInbox() for _ in stream.inboxes]
        self.ends = [SequenceInbox() for _ in stream.inboxes]
        self._stream = stream

    async def wait(self) -> None:
        """Wait until an inbox holds something. Raises EngineLost, and HandedOver once every first token was taken."""
        if not self._stream.live and not self._stream.has_output:
            raise HandedOver
        await self._stream.wait()
        for inbox, end, arrived in zip(self.inboxes, self.ends, self._stream.inboxes, strict=True):
            inbox.tokens, arrived.tokens = inbox.tokens + arrived.tokens, []
            inbox.logprobs, arrived.logprobs = inbox.logprobs + arrived.logprobs, []
            inbox.readings, arrived.readings = inbox.readings + arrived.readings, []
            if (ended := arrived.ended) is not None:
                seen = end if ended.reason == engine_pb2.END_REASON_LENGTH else inbox
                seen.ended, arrived.ended = ended, None

    def abort(self, index: int | None = None) -> None:
        self._stream.abort(index)

    def close(self) -> None:
        self._stream.close()


class Placement:
    """The engine that computes a request, and the stream from it.

    Another engine takes its place when it is lost, when it is going to end, and once an engine for prompts has sent the
    first tokens. A context manager that ends the sequences which still run.

    admitted      the call
    engines       those of its model
    submit        the request as an engine for all of it gets it
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
        self._left: list[Stream] = []  # of engines that go on without the request
        self._lends: Stream | None = None  # runs on where the request was, until the next engine has fetched its blocks
        self._prefill: EngineChannel | None = None  # has computed the prompt
        self._migration: Migration | None = None

    def begin(self, asked: Asked, progress: Progress | None) -> None:
        """Submit the request to an engine.

        progress  of a stream that is resumed; None: it is new, and the engine can have the message as it is
        """
        begun = progress is not None and has_begun(progress)
        engine = self._engines.pick(asked=asked, has_begun=begun)
        if progress is not None or engine.role == "prefill":
            self._submit_to(engine, progress or new_progress(self._submit.sampling.n), asked)
        else:
            self._note(engine, engine.submit(self._submit, self._on_start, asked))

    async def run(self, answer: GenerateCall, prompt: Sequence[int]) -> bool:
        """Write what the engine sends. Return whether that was all; otherwise the request is at another engine now.

        prompt  see GenerateCall.run
        """
        migration, lender = self._new_migration(answer), None
        self._migration = migration
        try:
            if await answer.run(self.stream, prompt, self._is_due):
                return True
            assert migration.target is not None, "it is due"
            engine, lender = migration.target, migration.lender
            self._leave(answer, self.stream.inboxes)
            if lender is None:
                self.stream.abort()
            else:  # an engine that is going to end does so once it has no sequences
                self._lends = self.stream
        except HandedOver:
            assert isinstance(self.stream, FirstTokens), "others do not raise it"
            self._prefill = self.engine
            self._leave(answer, self.stream.ends)
            failover = self._admitted.services.failover
            engine = await failover.decoder(self._engines, self.engine, time_left(self._admitted.call))
        except EngineLost as lost:
            self.stream.close()
            begun = has_begun(answer.progress)
            engine = await self._admitted.elsewhere(self._engines, self.engine, lost, has_begun=begun)
        migration.close()
        ends = self._admitted.live.is_aborted
        self._submit_to(engine, [None] * len(answer.progress) if ends else answer.progress, lender=lender)
        return False

    def _is_due(self) -> bool:
        """Say whether the request is to leave its engine now. Asked after each message."""
        if self._lends is not None:
            self._lends.abort()
            self._lends = None
        return self._migration is not None and self._migration.is_due()

    def _leave(self, answer: GenerateCall, ends: Sequence[SequenceInbox]) -> None:
        """Let the engine go on without the request.

        ends  where it is going to be seen how its sequences ended there
        """
        answer.left.append(ends)
        self._left.append(self.stream)

    def _new_migration(self, answer: GenerateCall) -> Migration:
        return Migration(
            self._admitted.services.migrations,
            self._engines,
            self.engine,
            self._submit,
            lambda: answer.progress,
            lambda: time_left(self._admitted.call),
        )

    def _submit_to(
        self,
        engine: EngineChannel,
        progress: Progress,
        asked: Asked | None = None,
        lender: tuple[str, int] | None = None,
    ) -> None:
        submit = self._submit
        is_first = engine.role == "prefill" and not has_begun(progress) and submit.max_tokens > 1
        if is_first:
            submit = engine_pb2.Submit()
            submit.CopyFrom(self._submit)
            submit.max_tokens, submit.min_tokens = 1, min(1, submit.min_tokens)
        stream = submit_again(
            engine,
            submit,
            progress,
            age_s=time.monotonic() - self._submitted_at,
            timeout_s=time_left(self._admitted.call),
            on_start=self._on_start,
            asked=asked,
            lender=lender or self._lender(engine),
        )
        self._note(engine, FirstTokens(stream) if is_first and isinstance(stream, EngineStream) else stream)

    def _lender(self, engine: EngineChannel) -> tuple[str, int] | None:
        """The engine that has computed the prompt, if this one can fetch blocks from it."""
        prefill = self._prefill
        if prefill is None or not prefill.is_ready or not prefill.block_layout:
            return None
        if prefill is engine or prefill.block_layout != engine.block_layout:
            return None
        return prefill.address, len(self._submit.prompt)

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
            self._migration = None  # it refers to this, and the garbage collector would have to find the cycle
        for each in (self.stream, *self._left):
            each.close()

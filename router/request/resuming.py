"""Streams that can be resumed: what was sent of them is kept for a while, and an engine goes on from it.

A kept stream is the request as the engine got it, and each sequence's tokens as the client got them. That is enough:
the engine continues a sequence that arrives with output, and feeding kept tokens through `SequenceOutput` restores the
text, the stop strings' state and the counts. Ordinary streams pay nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeAlias

from google.rpc import error_details_pb2

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import inference_pb2

from ..engines.channel import EngineChannel
from ..engines.choosing import Asked
from ..engines.stream import EngineStream, SequenceInbox, Wake
from ..errors import ERROR_DOMAIN, Aborted, InvalidArgument, NotFound, PagodaError, Unavailable
from .models import Target
from .output import SequenceOutput
from .validation import GenerateParams

MAX_STREAMS = 4096
MAX_BYTES = 64 << 20
RESUMABLE = "RESUMABLE"  # reason of the ErrorInfo
_STREAM_BYTES = 8 << 10  # a stream without tokens, with room for its stop strings
_TOKEN_BYTES = 4
_LOGPROBS_BYTES = 48  # a bytes object, and the reference to it
_REPLAYED_AT_ONCE = 256  # tokens: with all logprobs a message of about 100 KB, which stock clients accept
_TIMER_MARGIN_S = 0.1  # the event loop's clock is coarser than the other one
_SEED_MASK = (1 << 64) - 1
# Of each sequence the tokens that its client has; None: it needs no more.
Progress: TypeAlias = Sequence["array[int] | None"]
_KEPT_ENDS = (engine_pb2.END_REASON_STOP, engine_pb2.END_REASON_LENGTH, engine_pb2.END_REASON_ABORTED)


class KeptSequence:
    """One sequence of a kept stream: its tokens as the client got them, and its end.

    ended      its end; None if it can go on. A sequence that met a stop string has ended, whatever the engine knows
    ends_late  the end came after the last token: text that it added was sent in a message without tokens
    """

    def __init__(self) -> None:
        self.ids = array("I")
        self.ended: engine_pb2.Ended | None = None
        self._logprobs: list[bytes] = []  # not as messages, each of which would keep its whole step's memory
        self._ends_late = False

    def note(self, ids: Sequence[int], logprobs: Sequence[engine_pb2.Logprobs], ended: engine_pb2.Ended | None) -> int:
        """Add what was sent. Returns the bytes that it takes."""
        packed = [found.SerializeToString() for found in logprobs[: len(ids)]]
        self.ids.extend(ids)
        self._logprobs += packed
        if ended is not None:
            self._ends_late = not ids
            self.ended = engine_pb2.Ended.FromString(ended.SerializeToString())
        return _TOKEN_BYTES * len(ids) + sum(_LOGPROBS_BYTES + len(each) for each in packed)

    def inboxes(self, num_received: int) -> Iterator[tuple[SequenceInbox, bool]]:
        """Yield the tokens and the end as they came from an engine, with whether the client lacks this part."""
        cuts = sorted({*range(0, len(self.ids), _REPLAYED_AT_ONCE), num_received, len(self.ids)})
        has_late_end = self.ended is not None and self._ends_late
        for start, end in itertools.pairwise(cuts):
            logprobs = [engine_pb2.Logprobs.FromString(each) for each in self._logprobs[start:end]]
            ended = self.ended if end == len(self.ids) and not has_late_end else None
            yield SequenceInbox(self.ids[start:end].tolist(), logprobs, ended), start >= num_received
        if has_late_end:
            yield SequenceInbox(ended=self.ended), True


class KeepingOutput(SequenceOutput):
    """A sequence's output that is kept as it is taken. `arguments` are those of SequenceOutput."""

    def __init__(self, kept: KeptStream, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._kept = kept

    def take(self, inbox: SequenceInbox, into: inference_pb2.Tokens) -> bool:
        ids, logprobs, ended = inbox.tokens, inbox.logprobs, inbox.ended
        num_before, had_stopped = self.num_tokens, self.stop is not None
        has_news = super().take(inbox, into)
        if had_stopped:
            return has_news
        if self.stop is not None:
            ended = engine_pb2.Ended(reason=engine_pb2.END_REASON_ABORTED)
        elif ended is not None and ended.reason not in _KEPT_ENDS:
            ended = None  # an end of the call: the sequence itself can go on
        self._kept.note(self.index, ids[: self.num_tokens - num_before], logprobs, ended)
        return has_news

    def replay(self, inbox: SequenceInbox, into: inference_pb2.Tokens) -> bool:
        """`take` of what is kept already."""
        return super().take(inbox, into)


class KeptStream:
    """A stream that can be resumed. An async context manager around the one call that writes it.

    Entering ends the call that wrote it before, which raises Aborted. Entering raises NotFound if nothing is kept.

    target         that it asks for
    submit         the request for the engine; None until its prompt is tokenized
    submitted_at   when it was first submitted
    received       when the router received the first call
    first_written  when its first message was written; None before
    ended_at       when the last call that wrote it ended
    """

    def __init__(
        self, streams: KeptStreams, tenant: str, params: GenerateParams, received: float, target: Target
    ) -> None:
        self.key = (tenant, params.request_id)
        self.params = params
        self.target = target
        self.submit: engine_pb2.Submit | None = None
        self.submitted_at = received
        self.received = received
        self.first_written: float | None = None
        self.sequences = [KeptSequence() for _ in range(params.n)]
        self.num_bytes = 0
        self.ended_at = received
        self._streams = streams
        self._writer: _Writer | None = None

    @property
    def is_kept(self) -> bool:
        return self._streams.holds(self)

    @property
    def progress(self) -> Progress:
        """How far the sequences are."""
        return [None if sequence.ended else sequence.ids for sequence in self.sequences]

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.ids) for sequence in self.sequences)

    @property
    def num_unfinished(self) -> int:
        return sum(sequence.ended is None for sequence in self.sequences)

    def submitted(self, submit: engine_pb2.Submit) -> None:
        """Note the request for the engine. The input itself is not needed any more."""
        self.submit = submit
        self.submitted_at = time.monotonic()
        self.params = replace(self.params, prompt=(), sampling=submit.sampling, guided=None)
        ids = len(submit.prompt) + 2 * len(submit.sampling.allowed_token_ids)
        others = 32 * len(submit.sampling.logit_bias) + submit.guided.ByteSize()
        self._streams.grow(self, _STREAM_BYTES + _TOKEN_BYTES * ids + others)

    def note(
        self,
        index: int,
        ids: Sequence[int],
        logprobs: Sequence[engine_pb2.Logprobs],
        ended: engine_pb2.Ended | None,
    ) -> None:
        """Add what a sequence's client is sent."""
        if self.first_written is None and ids:
            self.first_written = time.monotonic()
        if self.is_kept:
            self._streams.grow(self, self.sequences[index].note(ids, logprobs, ended))
        else:  # it made room for others; not earlier, because a call may be about to replay them
            self.sequences = []

    def check(self, received: Sequence[int]) -> list[int]:
        """The number of tokens that the client has of each sequence. Raises InvalidArgument."""
        if len(received) > len(self.sequences):
            raise InvalidArgument("received", f"has {len(received)} entries, the request has n = {len(self.sequences)}")
        for index, (count, sequence) in enumerate(zip(received, self.sequences, strict=False)):
            if count > len(sequence.ids):
                raise InvalidArgument(f"received[{index}]", f"is {count}; {len(sequence.ids)} tokens were sent")
        return [*received, *[0] * (len(self.sequences) - len(received))]

    def resumable(self, error: Unavailable, retry_after_s: float | None) -> Unavailable:
        """The error that ended the stream, as one that says that it can be resumed."""
        info = error_details_pb2.ErrorInfo(
            reason=RESUMABLE, domain=ERROR_DOMAIN, metadata={"request_id": self.params.request_id}
        )
        return Unavailable(f"{error.message}; the stream can be resumed", info, retry_after_s=retry_after_s)

    async def __aenter__(self) -> KeptStream:
        while self._writer is not None:
            await self._writer.end()
        if not self.is_kept:
            raise not_kept()
        self._writer = _Writer()
        await self._writer.timeout.__aenter__()
        self._streams.begin(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        writer, self._writer = self._writer, None
        assert writer is not None
        writer.has_ended.set()
        self._streams.end(self)
        try:
            await writer.timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise Aborted("another call has resumed the stream") from None


class _Writer:
    """The call that writes a kept stream."""

    def __init__(self) -> None:
        self.timeout = asyncio.timeout(None)
        self.has_ended = asyncio.Event()
        self._has_timed_out = False

    async def end(self) -> None:
        """End the call, wherever it waits."""
        if not self._has_timed_out:
            self._has_timed_out = True
            self.timeout.reschedule(asyncio.get_running_loop().time())
        await self.has_ended.wait()


class KeptStreams:
    """The streams that are kept, by tenant and request id, within bounds of number, memory and time.

    keep_s  how long a stream is kept after its call has ended; 0: none is kept

    Beyond the other bounds, streams that no call writes go first, and among those the ones that ended first.
    """

    def __init__(
        self,
        keep_s: float,
        max_streams: int = MAX_STREAMS,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.keep_s = keep_s
        self.num_bytes = 0
        self._max_streams = max_streams
        self._max_bytes = max_bytes
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._live: OrderedDict[tuple[str, str], KeptStream] = OrderedDict()
        self._ended: OrderedDict[tuple[str, str], KeptStream] = OrderedDict()  # in the order of their ends

    def __len__(self) -> int:
        return len(self._live) + len(self._ended)

    def add(self, tenant: str, params: GenerateParams, received: float, target: Target) -> KeptStream:
        """Keep a new stream. It replaces one of the same id that has ended; the caller knows that none is live."""
        stream = KeptStream(self, tenant, params, received, target)
        if (former := self._ended.get(stream.key)) is not None:
            self._drop(former)
        self._live[stream.key] = stream
        self._shrink()
        return stream

    def find(self, tenant: str, request_id: str) -> KeptStream | None:
        self.expire()
        return self._find((tenant, request_id))

    def holds(self, stream: KeptStream) -> bool:
        return self._find(stream.key) is stream

    def _find(self, key: tuple[str, str]) -> KeptStream | None:
        return self._live.get(key) or self._ended.get(key)

    def grow(self, stream: KeptStream, num_bytes: int) -> None:
        if self.holds(stream):
            stream.num_bytes += num_bytes
            self.num_bytes += num_bytes
            self._shrink()

    def begin(self, stream: KeptStream) -> None:
        """A call begins to write the stream."""
        self._ended.pop(stream.key, None)
        self._live[stream.key] = stream

    def end(self, stream: KeptStream) -> None:
        """No call writes the stream now."""
        if not self.holds(stream):
            return
        if stream.submit is None:
            self._drop(stream)  # nothing was sent
            return
        del self._live[stream.key]
        stream.ended_at = self._clock()
        self._ended[stream.key] = stream
        self._set_timer()

    def expire(self) -> None:
        """Drop the streams whose time has passed."""
        while self._ended:
            first = next(iter(self._ended.values()))
            if self._clock() - first.ended_at < self.keep_s:
                return
            self._drop(first)

    def _set_timer(self) -> None:
        """One timer for all streams, at the time of the first one."""
        if self._timer is None and self._ended:
            rest_s = next(iter(self._ended.values())).ended_at + self.keep_s - self._clock()
            self._timer = asyncio.get_running_loop().call_later(rest_s + _TIMER_MARGIN_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.expire()
        self._set_timer()

    def _shrink(self) -> None:
        while len(self) > self._max_streams or self.num_bytes > self._max_bytes:
            self._drop(next(iter((self._ended or self._live).values())))

    def _drop(self, stream: KeptStream) -> None:
        self._live.pop(stream.key, None)
        self._ended.pop(stream.key, None)
        self.num_bytes -= stream.num_bytes
        stream.num_bytes = 0


def not_kept() -> NotFound:
    return NotFound("request_id: no stream is kept under this id; see --resume-s")


def new_progress(count: int) -> Progress:
    """That of so many sequences of which a client has nothing."""
    return [array("I") for _ in range(count)]


def has_begun(progress: Progress) -> bool:
    """Whether a client has got anything of the sequences."""
    return any(ids is None or ids for ids in progress)


def submit_again(
    engine: EngineChannel,
    submit: engine_pb2.Submit,
    progress: Progress,
    *,
    age_s: float,
    timeout_s: float | None,
    on_start: Callable[[], None],
    asked: Asked | None = None,
    lender: tuple[str, int] | None = None,
) -> EngineStream | ContinuedStream:
    """Submit a request to an engine that goes on where another one was. Raises Unavailable unless it is ready.

    submit    the request as the first engine got it
    age_s     since then
    asked     see EngineChannel.submit
    lender    another engine that has so many of a begun request's tokens cached; None: none is known
    on_start  called when it starts to be computed. For a request that has begun that was before: called at once
    """
    again = engine_pb2.Submit()
    again.CopyFrom(submit)
    again.age_s = age_s
    again.ClearField("timeout_s")
    if timeout_s is not None:
        again.timeout_s = timeout_s
    if has_begun(progress):
        on_start()
        return ContinuedStream(engine, again, progress, lender)
    return engine.submit(again, on_start, asked)  # all of its sequences share the prompt


def continuing(submit: engine_pb2.Submit, index: int, ids: Sequence[int]) -> engine_pb2.Submit:
    """Return a request for one sequence of another request, which has these tokens of output.

    Each is a request of its own, because the seeds of those that are left need not follow one another.
    """
    part = engine_pb2.Submit()
    part.CopyFrom(submit)
    part.ClearField("readout")  # the client has the prompt
    part.sampling.n = 1
    part.sampling.seed = (submit.sampling.seed + index) & _SEED_MASK
    part.outputs.add(ids=ids)
    return part


class ContinuedStream:
    """Sequences that have begun elsewhere, on an engine that continues them; with an EngineStream's interface.

    One that needs no more ends at once.

    lender  another engine, and how many tokens it has cached
    """

    def __init__(
        self,
        engine: EngineChannel,
        submit: engine_pb2.Submit,
        progress: Progress,
        lender: tuple[str, int] | None = None,
    ) -> None:
        asked = Asked((), None, num_cached=lender[1] if lender is not None else 0, lender=lender)
        self.inboxes = [SequenceInbox() for _ in progress]
        self._wake = Wake()
        self._streams: dict[int, EngineStream] = {}
        for index, ids in enumerate(progress):
            if ids is None:
                self.inboxes[index].ended = engine_pb2.Ended(reason=engine_pb2.END_REASON_ABORTED)
                self._wake.set()
                continue
            self._streams[index] = stream = engine.submit(continuing(submit, index, ids), asked=asked)
            stream.wake = self._wake
            self.inboxes[index] = stream.inboxes[0]

    async def wait(self) -> None:
        """Wait until an inbox holds something. Raises EngineLost once all that a lost engine sent has been taken."""
        if self._error is None:
            await self._wake.wait()
        if (error := self._error) is not None and not any(stream.has_output for stream in self._streams.values()):
            raise error

    @property
    def _error(self) -> PagodaError | None:
        return next((stream.error for stream in self._streams.values() if stream.error is not None), None)

    def abort(self, index: int | None = None) -> None:
        """Ask the engine to end one sequence, or all; their ends still arrive."""
        for stream in self._streams.values() if index is None else [self._streams[index]]:
            stream.abort()

    def close(self) -> None:
        """End the sequences that still run, and stop delivery."""
        for stream in self._streams.values():
            stream.close()

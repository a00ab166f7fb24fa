"""What is known of a call that an engine serves, for those who count, log and trace calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from pagoda.v1 import inference_pb2

from ..errors import PagodaError, Passed

log = logging.getLogger("pagoda.router")


class Answer(Protocol):
    """What the engine has done for a call so far.

    num_tokens     of its output
    first_written  when the first message was written; None: none was, or the only one is the last
    reasons        why each sequence that has ended did
    """

    @property
    def num_tokens(self) -> int: ...

    @property
    def first_written(self) -> float | None: ...

    @property
    def reasons(self) -> list[inference_pb2.FinishReason]: ...

    def usage(self) -> inference_pb2.Usage: ...

    def timing(self) -> inference_pb2.Timing: ...


@dataclass(slots=True, eq=False)
class Record:
    """A call that a handler has taken up, filled in on its way.

    method       Generate, Resume, Embed or Score
    metadata     what came with the call
    route        what the client called: a gRPC method such as pagoda.v1.Inference/Generate, or an HTTP method and path
    received_s   when it came, in seconds since 1970
    is_chat      whether the prompt is a conversation
    trace_id     of the trace that the call belongs to, in hexadecimal digits; "" if it belongs to none
    model        the name of the one that it asks for, where the server has several; else ""
    adapter      the name of the one that it asks for; else ""
    request_id   "" until the request is read
    prompt_len   tokens; 0 until the prompt is tokenized
    answer       None until the request is submitted
    engine       name of the engine that has the request, once it is submitted
    num_failovers  how often the request has lost its engine
    code         the status that ends the call
    error        the error of that status; None for one that completed or was cancelled
    """

    method: str
    tenant: str
    metadata: Sequence[tuple[str, str | bytes]]
    route: str
    received_s: float = field(default_factory=time.time)
    model: str = ""
    adapter: str = ""
    request_id: str = ""
    is_chat: bool = False
    trace_id: str = ""
    prompt_len: int = 0
    answer: Answer | None = None
    engine: str = ""
    num_failovers: int = 0
    code: grpc.StatusCode = grpc.StatusCode.OK
    error: Exception | None = None
    _begun: float = field(default_factory=time.monotonic)

    @property
    def duration_s(self) -> float:
        """How long the call has lasted."""
        return time.monotonic() - self._begun


class Observer(Protocol):
    """Gets each call that has ended. It runs in the event loop: whatever takes long it leaves to a thread."""

    def ended(self, record: Record, /) -> None: ...


class Observers(list[Observer]):
    """All observers of a router's calls.

    on_refusal  are notified of calls that were refused before a handler took them up: the method's full name, and why.
                A flood of calls causes as many refusals, so only what is very cheap belongs here
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_refusal: list[Callable[[str, PagodaError], None]] = []

    def refused(self, method: str, error: PagodaError) -> None:
        for notify in self.on_refusal:
            notify(method, error)

    def notify(self, record: Record) -> None:
        """Notify all observers of a call that has ended."""
        for observer in self:
            try:
                observer.ended(record)
            except Exception:  # a fault of telemetry must not end a call
                log.exception("an observer of calls failed")

    @contextlib.contextmanager
    def recording(self, record: Record) -> Iterator[Record]:
        """Around a call: find out how it ends, and notify the observers."""
        try:
            yield record
        except (asyncio.CancelledError, grpc.aio.InternalError):  # the second one: the client has gone during a write
            record.code = grpc.StatusCode.CANCELLED
            raise
        except Passed as passed:
            record.error, record.code = passed, passed.status.code
            raise
        except Exception as error:
            record.error = error
            record.code = error.code if isinstance(error, PagodaError) else grpc.StatusCode.INTERNAL
            raise
        finally:
            self.notify(record)
            record.error = None  # its traceback holds the frame that holds the record

"""What is known of a call of Generate or Resume, for those who count, log and trace calls."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from pagoda_server.router.errors import PagodaError
from pagoda_server.router.request.generate_call import GenerateCall


@dataclass(slots=True, eq=False)
class Record:
    """A call that a handler has taken up, filled in on its way.

    method       Generate or Resume
    metadata     what came with the call
    received_s   when it came, in seconds since 1970
    request_id   "" until the request is read
    prompt_len   tokens; 0 until the prompt is tokenized
    answer       None until the request is submitted
    code         the status that ends the call
    error        the error of that status; None for one that completed or was cancelled
    """

    method: str
    tenant: str
    metadata: Sequence[tuple[str, str | bytes]]
    received_s: float = field(default_factory=time.time)
    request_id: str = ""
    prompt_len: int = 0
    answer: GenerateCall | None = None
    code: grpc.StatusCode = grpc.StatusCode.OK
    error: Exception | None = None


class Observer(Protocol):
    """Is told of each call's end. It runs in the event loop: whatever takes long it leaves to a thread."""

    def ended(self, record: Record, /) -> None: ...


class Observers(list[Observer]):
    """All observers of a router's calls."""

    @contextlib.contextmanager
    def recording(self, record: Record) -> Iterator[Record]:
        """Around a call: find out how it ends, and tell the observers."""
        try:
            yield record
        except asyncio.CancelledError:
            record.code = grpc.StatusCode.CANCELLED
            raise
        except Exception as error:
            record.error = error
            record.code = error.code if isinstance(error, PagodaError) else grpc.StatusCode.INTERNAL
            raise
        finally:
            for observer in self:
                observer.ended(record)

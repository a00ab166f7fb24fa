"""A client's call, whatever protocol brought it. A gRPC call's context is one; so is what another protocol wraps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import grpc

from pagoda.v1 import inference_pb2

from ..errors import DeadlineExceeded

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"  # of a gRPC call, whatever its messages are


class ClientCall(Protocol):
    """What the Inference service needs of a call."""

    async def read(self) -> Any:
        """The next message in bytes; grpc.aio.EOF after the last one."""

    async def write(self, message: inference_pb2.GenerateResponse, /) -> None:
        """Send a response, which may be reused when this returns. Waits while the client does not read."""

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None: there is none."""

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]] | None:
        """What came with the call, by lower-case names: gRPC's metadata, or HTTP's headers."""


def sender_clock(call: ClientCall) -> Callable[[], float]:
    """The clock by which a client has to send its message, in seconds.

    A protocol that lets bytes wait before it reads them has a clock that stands meanwhile.
    """
    clock: Callable[[], float] = getattr(call, "sender_clock", time.monotonic)
    return clock


def time_left(call: ClientCall) -> float | None:
    """Seconds until the client's deadline; None: there is none. Raises DeadlineExceeded."""
    remaining_s = call.time_remaining()
    if remaining_s is not None and remaining_s <= 0:
        raise DeadlineExceeded("the deadline passed before the request was scheduled")
    return remaining_s

"""Exceptions for failed calls, made from the gRPC status and its google.rpc details."""

from __future__ import annotations

from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

STATUS_DETAILS_KEY = "grpc-status-details-bin"

M = TypeVar("M", bound=Message)


class PagodaError(Exception):
    """A call failed. Statuses without a subclass raise this class itself.

    code           the gRPC status
    retry_after_s  the delay that the server suggests before a retry; None if it suggests none
    """

    def __init__(self, message: str, code: grpc.StatusCode, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class InvalidArgument(PagodaError):
    """An argument is wrong. field: its path, such as `sampling.temperature`; None if the server does not name it."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message, grpc.StatusCode.INVALID_ARGUMENT)
        self.field = field


class Unauthenticated(PagodaError):
    """The token is missing or wrong."""


class PermissionDenied(PagodaError):
    """The token does not have a right that the call needs; the message names it."""


class NotFound(PagodaError):
    """There is no such model, or the tenant has no live request, or no kept stream, with this id."""


class AlreadyExists(PagodaError):
    """A live request of the tenant has this id."""


class Overloaded(PagodaError):
    """The queue is full, a quota is used up, the message too large, or this client has stopped reading.

    Under a fair policy it may also mean that the request waited, and another tenant's was admitted in its place.

    queue_depth  requests that the server has admitted, if it says so
    reason       QUEUE_FULL, QUOTA_EXCEEDED or another constant of the server; empty if it gives none
    """

    def __init__(
        self,
        message: str,
        retry_after_s: float | None = None,
        queue_depth: int | None = None,
        reason: str = "",
    ) -> None:
        super().__init__(message, grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after_s)
        self.queue_depth = queue_depth
        self.reason = reason


class DeadlineExceeded(PagodaError):
    """`timeout_s` has passed."""


class Unavailable(PagodaError):
    """The server cannot be reached, is draining, or has no running engine."""


class Cancelled(PagodaError):
    """The call was cancelled from elsewhere, or its client is closed."""


class Unimplemented(PagodaError):
    """The server does not support a call or a feature. field: path of the feature's field; None for a call."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message, grpc.StatusCode.UNIMPLEMENTED)
        self.field = field


_PLAIN: dict[grpc.StatusCode, type[PagodaError]] = {
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.CANCELLED: Cancelled,
}


def error_from(failure: grpc.RpcError) -> PagodaError:
    """Convert a failed call of grpc or grpc.aio to a typed error."""
    code, message, status = failure.code(), failure.details() or "", _status(failure)
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED):
        violations = _detail(status, error_details_pb2.BadRequest()).field_violations
        kind = InvalidArgument if code == grpc.StatusCode.INVALID_ARGUMENT else Unimplemented
        return kind(message or code.name, violations[0].field if violations else None)
    retry_info = _detail(status, error_details_pb2.RetryInfo())
    has_delay = retry_info.HasField("retry_delay")
    retry_after_s = retry_info.retry_delay.ToTimedelta().total_seconds() if has_delay else None
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        info = _detail(status, error_details_pb2.ErrorInfo())
        queue_depth = info.metadata.get("queue_depth", "")
        return Overloaded(message, retry_after_s, int(queue_depth) if queue_depth.isdecimal() else None, info.reason)
    return _PLAIN.get(code, PagodaError)(message or code.name, code, retry_after_s)


def client_closed() -> Cancelled:
    return Cancelled("the client is closed", grpc.StatusCode.CANCELLED)


def _status(failure: grpc.RpcError) -> status_pb2.Status:
    for key, value in failure.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY:
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:  # the status says what happened even without details
                break
    return status_pb2.Status()


def _detail(status: status_pb2.Status, message: M) -> M:
    """Unpack the first detail of this message's type into the message; leave it empty if there is none."""
    for detail in status.details:
        if detail.Unpack(message):
            break
    return message

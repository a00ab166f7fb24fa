"""Errors that a client can distinguish, and how each becomes a gRPC status."""

from __future__ import annotations

import logging
import math
from typing import NamedTuple

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from pagoda.v1 import control_pb2

from .config_error import ConfigError as ConfigError

logger = logging.getLogger(__name__)

ERROR_DOMAIN = "pagoda"
STATUS_DETAILS_KEY = "grpc-status-details-bin"
INTERNAL_MESSAGE = "internal error; the server's log has the details"


class PagodaError(Exception):
    """Base class of errors that end a call.

    The message goes to the client, so it must not hold a path, host name, repr or prompt.

    about          google.rpc messages that travel with the status
    retry_after_s  how long the client should wait before a retry; None if waiting does not help
    queue_depth    requests admitted now, for clients that balance load themselves; None if that is not the reason
    reason         UPPER_SNAKE_CASE constant for programs to compare; empty if the code says it all
    """

    code: grpc.StatusCode = grpc.StatusCode.INTERNAL

    def __init__(self, message: str, *about: Message, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.queue_depth: int | None = None
        self.reason = ""
        self._about = about

    @property
    def details(self) -> tuple[Message, ...]:
        """All google.rpc messages that travel with the status; made when asked for, since refusals often share one."""
        return (*self._about, *_retry_info(self.retry_after_s))


class InvalidArgument(PagodaError):
    """A field of the request is wrong.

    field        its path, such as `sampling.temperature` or `stopping.stop[3]`
    description  what was wrong, the value, the limit
    """

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, description: str) -> None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=description)
        super().__init__(f"{field}: {description}", error_details_pb2.BadRequest(field_violations=[violation]))
        self.field = field
        self.description = description


class Unimplemented(PagodaError):
    """The request sets a field that this server does not support; the details name the field."""

    code = grpc.StatusCode.UNIMPLEMENTED

    def __init__(self, field: str, description: str = "is not supported by this server") -> None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=description)
        super().__init__(f"{field}: {description}", error_details_pb2.BadRequest(field_violations=[violation]))
        self.field = field
        self.description = description


class NotFound(PagodaError):
    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(PagodaError):
    code = grpc.StatusCode.ALREADY_EXISTS


class FailedPrecondition(PagodaError):
    """The request is in order, and something else has to change before it can succeed."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Aborted(PagodaError):
    """Another call has taken over, or has ended this one."""

    code = grpc.StatusCode.ABORTED


class ResourceExhausted(PagodaError):
    """The queue is full, a quota is used up, or the client has stopped reading or sending.

    about  more for programs, by name
    """

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float | None = None,
        queue_depth: int | None = None,
        reason: str = "QUEUE_FULL",
        **about: str,
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.queue_depth = queue_depth
        self.reason = reason
        self._metadata = about

    @property
    def details(self) -> tuple[Message, ...]:
        depth = {} if self.queue_depth is None else {"queue_depth": str(self.queue_depth)}
        info = error_details_pb2.ErrorInfo(reason=self.reason, domain=ERROR_DOMAIN, metadata=self._metadata | depth)
        return (info, *super().details)


class QuotaExceeded(ResourceExhausted):
    """The tenant has used up one of its quotas.

    quota  its name in the tenants file
    limit  its value there, or this host's part of it
    why    how the request exceeds it

    Without `retry_after_s`, waiting does not help.
    """

    def __init__(self, quota: str, limit: int, why: str, retry_after_s: float | None = None) -> None:
        message = f"the tenant's quota {quota} is {limit}: {why}"
        super().__init__(message, retry_after_s=retry_after_s, reason="QUOTA_EXCEEDED", quota=quota, limit=str(limit))


class Unauthenticated(PagodaError):
    """The call carries no valid token."""

    code = grpc.StatusCode.UNAUTHENTICATED

    def __init__(self) -> None:
        super().__init__("authorization: a valid bearer token is required")


class PermissionDenied(PagodaError):
    """The caller's token lacks a right.

    what   what needs the right, such as "this call"
    right  its name in the tenants file
    """

    code = grpc.StatusCode.PERMISSION_DENIED

    def __init__(self, what: str, right: str) -> None:
        info = error_details_pb2.ErrorInfo(reason="RIGHT_MISSING", domain=ERROR_DOMAIN, metadata={"right": right})
        super().__init__(f"{what} needs the right {right}, which the token does not have", info)
        self.reason = info.reason


class DeadlineExceeded(PagodaError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Unavailable(PagodaError):
    """The server is draining, or the engine is loading, dead or restarting."""

    code = grpc.StatusCode.UNAVAILABLE


class EngineLost(Unavailable):
    """The engine was lost while the request ran.

    engine   what it reported of itself
    has_left it had said that it would end, so no request is to blame
    """

    def __init__(self, engine: control_pb2.EngineInfo | None, *, has_left: bool = False) -> None:
        super().__init__("the engine was lost while the request ran")
        self.engine = engine
        self.has_left = has_left


class EnginesLost(PagodaError):
    """The request has lost one engine after another, perhaps by its own fault: a retry might end another engine."""

    code = grpc.StatusCode.ABORTED

    def __init__(self, count: int) -> None:
        info = error_details_pb2.ErrorInfo(reason="ENGINES_LOST", domain=ERROR_DOMAIN)
        super().__init__(f"{count} engines were lost while they computed the request; no other one will try it", info)
        self.reason = info.reason


class Internal(PagodaError):
    """A bug. The log gets the story; the client gets a fixed text."""

    def __init__(self, story: str) -> None:
        super().__init__(INTERNAL_MESSAGE)
        self.story = story


class Passed(Exception):
    """The status of another router's call, passed on as it is."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        super().__init__(error.details())
        self.status = Status(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))

    @property
    def error(self) -> PagodaError:
        """An error as the one that has ended that call, for protocols other than gRPC."""
        metadata = dict(self.status.trailing_metadata)
        retry_after_ms = metadata.get("grpc-retry-pushback-ms")
        info = error_details_pb2.ErrorInfo()
        about = [
            info
            for detail in status_pb2.Status.FromString(metadata.get(STATUS_DETAILS_KEY, b"")).details
            if detail.Unpack(info)
        ]
        retry_after_s = None if retry_after_ms is None else int(retry_after_ms) / 1e3
        error = PagodaError(self.status.details, *about, retry_after_s=retry_after_s)
        error.code = self.status.code
        return error


class Status(NamedTuple):
    """The status that ends a call, as `context.abort` takes it."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


def to_status(error: Exception) -> Status:
    """Convert an exception to the status that ends its call: `context.abort(s.code, s.details, s.trailing_metadata)`.

    The metadata holds `grpc-status-details-bin` and, if the error has a retry delay, `grpc-retry-pushback-ms`, which
    stock clients honour (gRFC A6). Internal errors, and exceptions other than PagodaError, are logged in full and
    become INTERNAL with a fixed text. CancelledError is not an Exception and must not be passed here.
    """
    if isinstance(error, Passed):
        return error.status
    if isinstance(error, Internal):
        logger.error("internal error: %s", error.story, exc_info=error)
    elif not isinstance(error, PagodaError):
        logger.error("internal error", exc_info=error)
        error = PagodaError(INTERNAL_MESSAGE)
    code, details = error.code, [_packed(detail) for detail in error.details]
    status = status_pb2.Status(code=code.value[0], message=error.message, details=details)
    metadata: list[tuple[str, str | bytes]] = [(STATUS_DETAILS_KEY, status.SerializeToString())]
    if error.retry_after_s is not None:
        metadata.append(("grpc-retry-pushback-ms", str(math.ceil(1e3 * error.retry_after_s))))
    return Status(code, error.message, tuple(metadata))


def _retry_info(retry_after_s: float | None) -> tuple[error_details_pb2.RetryInfo, ...]:
    if retry_after_s is None:
        return ()
    delay = duration_pb2.Duration()
    delay.FromNanoseconds(round(retry_after_s * 1e9))
    return (error_details_pb2.RetryInfo(retry_delay=delay),)


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed

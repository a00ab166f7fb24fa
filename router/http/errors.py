"""Errors of calls as answers of HTTP, in the form of the OpenAI API, which its clients turn into exceptions."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import grpc
from google.rpc import error_details_pb2
from starlette.types import Send

from ..errors import (
    INTERNAL_MESSAGE,
    Internal,
    InvalidArgument,
    PagodaError,
    Passed,
    Unimplemented,
    to_status,
)

_RETRY_AFTER_S = 1.0  # of an unavailable server that does not know when it will be back
_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error", None),
    grpc.StatusCode.UNIMPLEMENTED: (400, "invalid_request_error", "unsupported_parameter"),
    grpc.StatusCode.UNAUTHENTICATED: (401, "authentication_error", "invalid_api_key"),
    grpc.StatusCode.PERMISSION_DENIED: (403, "permission_error", None),
    grpc.StatusCode.NOT_FOUND: (404, "invalid_request_error", "model_not_found"),
    grpc.StatusCode.ALREADY_EXISTS: (409, "conflict_error", "already_exists"),
    grpc.StatusCode.FAILED_PRECONDITION: (409, "conflict_error", "failed_precondition"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "rate_limit_exceeded"),
    grpc.StatusCode.ABORTED: (503, "server_error", "aborted"),
    grpc.StatusCode.UNAVAILABLE: (503, "server_error", "unavailable"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, "timeout_error", "deadline_exceeded"),
}
_INTERNAL = (500, "server_error", "internal_error")


class HttpError(Exception):
    """An error that only HTTP has: a path that is not there, a body that is too large, a host that is not served."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code


class BodyTooLarge(PagodaError):
    """The body has more bytes than any request needs."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, most: int) -> None:
        super().__init__(f"the body is too large: at most {most} bytes are allowed")


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error's status, headers and JSON."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


def refusal(error: Exception) -> Refusal:
    """Convert an exception; internal ones are logged in full and become a fixed text, as for gRPC."""
    if isinstance(error, Passed):
        error = error.error
    if isinstance(error, HttpError):
        return _refusal(error.status, error.message, "invalid_request_error", error.code)
    if isinstance(error, BodyTooLarge):
        return _refusal(413, error.message, "invalid_request_error", "body_too_large")
    if isinstance(error, Internal) or not isinstance(error, PagodaError) or error.code not in _STATUS:
        to_status(error)  # logs it
        status, kind, code = _INTERNAL
        return _refusal(status, INTERNAL_MESSAGE, kind, code)
    status, kind, usual_code = _STATUS[error.code]
    reason = next((detail.reason for detail in error.details if isinstance(detail, error_details_pb2.ErrorInfo)), "")
    if reason == "SENDER_STALLED":
        status = 408
    if reason == "ENGINES_LOST":
        status = 422  # clients repeat a request after a 5xx: this one might end another engine
    param = error.field if isinstance(error, InvalidArgument | Unimplemented) else None
    if error.code is grpc.StatusCode.NOT_FOUND:
        param = "model"
    retry_after_s = error.retry_after_s
    if retry_after_s is None and error.code is grpc.StatusCode.UNAVAILABLE:
        retry_after_s = _RETRY_AFTER_S
    return _refusal(status, error.message, kind, reason.lower() or usual_code, param, retry_after_s)


def _refusal(
    status: int,
    message: str,
    kind: str,
    code: str | None,
    param: str | None = None,
    retry_after_s: float | None = None,
) -> Refusal:
    body = json.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(retry_after_s))).encode()))
        headers.append((b"retry-after-ms", str(math.ceil(1e3 * retry_after_s)).encode()))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return Refusal(status, headers, body)


async def send_refusal(refused: Refusal, send: Send, *headers: tuple[bytes, bytes]) -> None:
    """Answer with an error."""
    await send({"type": "http.response.start", "status": refused.status, "headers": [*refused.headers, *headers]})
    await send({"type": "http.response.body", "body": refused.body})

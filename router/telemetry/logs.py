"""A line of log for each request at its end, and one a second that counts the refused ones."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc

from pagoda.v1 import inference_pb2

from ..errors import (
    Aborted,
    DeadlineExceeded,
    InvalidArgument,
    PagodaError,
    Passed,
    Unavailable,
    Unimplemented,
)
from ..request.record import Record

INTERVAL_S = 1.0  # between lines that count refused calls
MOST_KINDS = 16  # of refusals that one such line distinguishes
# https://www.w3.org/TR/trace-context: version, trace, parent, flags, and what later versions may add
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_FIELD = re.compile(r"[\w.\[\]-]{1,80}")

log = logging.getLogger("pagoda.requests")


class RequestLog:
    """An observer of calls that logs each request at its end: its names, tokens, times and status, never its content.

    Calls that failed before they reached an engine cost little, and a client may send thousands a second. The first of
    them is logged like a request. Those of the following second are counted in one line, by status and reason.
    """

    def __init__(self) -> None:
        self._refused: Counter[str] = Counter()  # by status and reason, since the last line
        self._single: dict[str, Any] = {}  # what is known of it, if there is one alone
        self._timer: asyncio.TimerHandle | None = None  # set during the second after a line

    def ended(self, record: Record) -> None:
        if record.answer is None and record.code is not grpc.StatusCode.OK:
            self._refuse(record.code.name, reason_of(record.error), lambda: fields_of(record))
        elif log.isEnabledFor(logging.INFO):
            _log("request", fields_of(record))

    def refused(self, method: str, error: PagodaError) -> None:
        """Count a call that was refused before a handler took it up."""
        code, reason = error.code.name, reason_of(error)
        self._refuse(code, reason, lambda: {"method": method.lstrip("/")[:100], "code": code, "reason": reason})

    def close(self) -> None:
        """Log what has been counted."""
        if self._timer is not None:
            self._timer.cancel()
            self._log_refusals()

    def _refuse(self, code: str, reason: str, fields: Callable[[], dict[str, Any]]) -> None:
        if not self._refused:
            self._single = fields()
        kind = f"{code} {reason}".rstrip()
        self._refused[kind if kind in self._refused or len(self._refused) < MOST_KINDS else "others"] += 1
        if self._timer is None:
            self._end_second()

    def _end_second(self) -> None:
        self._timer = None
        if self._refused:
            self._log_refusals()
            self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._end_second)

    def _log_refusals(self) -> None:
        total = self._refused.total()
        if total == 1:
            _log("request", self._single)
        elif total:
            _log("requests refused", {"count": total, "refused": dict(self._refused.most_common())})
        self._refused.clear()


def fields_of(record: Record) -> dict[str, Any]:
    """What the log says of a call that has ended. Its content, and what may quote it, is not among that."""
    fields: dict[str, Any] = {
        "method": record.route,
        "model": record.model,
        "adapter": record.adapter,
        "request_id": record.request_id,
        "trace_id": record.trace_id or trace_id_of(record.metadata),
        "tenant": record.tenant,
        "code": record.code.name,
        "reason": reason_of(record.error),
        "prompt_tokens": record.prompt_len or "",
    }
    if (answer := record.answer) is not None:
        usage, timing, reasons = answer.usage(), answer.timing(), answer.reasons
        fields |= {"cached_tokens": usage.cached_tokens, "output_tokens": usage.completion_tokens}
        fields |= {"engine": record.engine, "failovers": record.num_failovers} if record.num_failovers else {}
        if reasons:  # before the first end, the times in the engine are not known
            fields |= {
                "finish_reasons": finish_reasons(reasons),
                "queue_s": round(timing.queue_s, 6),
                "prefill_s": round(timing.prefill_s, 6),
                "decode_s": round(timing.decode_s, 6),
                "preempted_s": round(timing.preempted_s, 6),
                "preemptions": timing.preemptions,
            }
        if answer.first_written is not None and record.method == "Generate":  # Resume goes on after it
            fields["ttft_s"] = round(timing.time_to_first_token_s, 6)
    fields["total_s"] = round(record.duration_s, 6)
    return fields


def finish_reasons(reasons: Iterable[inference_pb2.FinishReason]) -> list[str]:
    return [inference_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_") for reason in reasons]


def reason_of(error: Exception | None) -> str:
    """Why a call failed, in words of the server's own: errors' messages may quote values of the request."""
    match error:
        case InvalidArgument() | Unimplemented():
            field = re.sub(r"\[\d+\]", "[]", error.field)  # which entry it is may be a token's id
            return field if _FIELD.fullmatch(field) else "a field"
        case Unavailable() | DeadlineExceeded() | Aborted():
            return error.message
        case PagodaError():
            return error.reason
        case None | Passed():
            return ""
        case _:
            return type(error).__name__


def trace_id_of(metadata: Sequence[tuple[str, str | bytes]]) -> str:
    """The trace that the client says its call belongs to; "" if it names none in a valid way."""
    parents = [value for name, value in metadata if name == "traceparent"]
    if len(parents) != 1 or not isinstance(parents[0], str):
        return ""
    match = _TRACEPARENT.fullmatch(parents[0])
    return match[1] if match and (match[2] is None or not parents[0].startswith("00")) else ""


def _log(message: str, fields: dict[str, Any]) -> None:
    log.info(message, extra={"fields": {name: value for name, value in fields.items() if value != ""}})

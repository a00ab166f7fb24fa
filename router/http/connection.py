"""A client's HTTP connection: parsed in pieces, within bounds of time and size."""

from __future__ import annotations

import asyncio
import resource
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from .acceptor import Pace, SenderClock
from .errors import HttpError, refusal

if TYPE_CHECKING:
    from collections.abc import Callable

# Seconds that a client has. They differ, because a change from one to another starts a time.
HEADERS_S = 10.0  # to send a request's headers in, once the connection is open or the first byte has come
IDLE_S = 75  # to send the next request in; longer than a load balancer's minute, which would otherwise lose the race
# To send the rest of a body whose request has been answered. The time starts again up to MAX_LINGERS times, if
# LINGER_BYTES have come in it: a client that reads nothing before it has sent all would miss the answer.
LINGER_S, LINGER_BYTES, MAX_LINGERS = 5.0, 64 << 10, 12
MAX_HEADER_BYTES = 32 << 10  # of a request's line and headers together
PIECE_BYTES = 8 << 10  # parsed at once: a body of one byte a chunk takes 1 ms then
BODY_PIECE_BYTES = 64 << 10  # the same of a body whose length is known: it is copied, and not parsed
WRITE_BUFFER_BYTES = 16 << 10  # beyond it, a handler waits until the client has read
# gRPC and the engine keep half of the files that this process may open.
MAX_CONNECTIONS = min(8192, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)

_MALFORMED = HttpError(400, "the request is not valid HTTP/1.1", "malformed_request")
_LONG_HEADERS = HttpError(431, f"the headers are too large: at most {MAX_HEADER_BYTES} bytes", "headers_too_large")
_UPGRADE = HttpError(400, "upgrade: no other protocol is spoken here; send the body without it", "upgrade_with_body")


class _Flow(FlowControl):
    """Reads nothing more from the client while too many bytes wait to be parsed.

    is_held  too many do
    is_due   some do, and the next piece of them will be
    """

    is_held = is_due = False

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self.clock = SenderClock()

    def set_clock(self) -> None:
        if self.read_paused or self.is_due:
            self.clock.stand()
        else:
            self.clock.run()

    def pause_reading(self) -> None:
        super().pause_reading()
        self.set_clock()

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()
            self.set_clock()


class _Closing:
    """The transport as an answer sees it: one that closes the connection leaves the client time to send its body."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self.close = close

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(HttpToolsProtocol):
    """A client's connection. It is closed when the client takes too long to send, or to read what waits for it.

    What the client sends is parsed piece by piece, in turn with the pieces of other connections, and one request at a
    time: requests that follow an unanswered one wait unparsed.

    stall_s  how long the client may read nothing
    pace     of all connections
    """

    flow: _Flow

    def __init__(self, *arguments: Any, stall_s: float, pace: Pace, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._stall_s = stall_s
        self._pace = pace
        self._limit_s = 0.0  # for what the client has to do now; 0: it is the handler's turn
        self._timer: asyncio.TimerHandle | None = None
        self._unparsed = bytearray()
        self._is_in_headers = self._is_in_body = self._closes_behind_body = False
        self._served: RequestResponseCycle | None = None  # the request that the handler has; `cycle` is the last one
        self._num_header_bytes = 0  # of this request, that are parsed
        self._num_unfinished = 0  # bytes of headers as they came, or of what is not a body inside one
        self._has_body_grown = False  # in this piece
        self._num_body_left = 0  # bytes of a body whose length is known
        self._num_dropped = self._num_lingers = 0  # bytes of its rest, in this time of LINGER_S; such times before it
        self._refusal = _MALFORMED

    @property
    def is_idle(self) -> bool:
        """Whether it has answered everything that has come."""
        is_answered = self.cycle is None or self.cycle.response_complete
        return is_answered and not self._unparsed and not self._is_in_headers

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport)
        self._closing = _Closing(transport, self.close_behind_body)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self._expect(HEADERS_S)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unparsed += data
        if len(self._unparsed) > PIECE_BYTES:
            self._hold()
        if not self.pipeline:
            self._await_turn()

    def _await_turn(self) -> None:
        if not self.flow.is_due:
            self.flow.is_due = True
            self.flow.set_clock()
            self._pace.post(self._parse_next)

    def _parse_next(self) -> None:
        self.flow.is_due = False
        if self.transport.is_closing():
            return
        num_bytes = max(PIECE_BYTES, min(self._num_body_left, BODY_PIECE_BYTES))
        piece = bytes(self._unparsed[:num_bytes])
        del self._unparsed[:num_bytes]
        if piece:
            self._parse(piece)
        if self.transport.is_closing() or self.pipeline:
            return
        if self._unparsed:
            self._await_turn()
        elif self.flow.is_held:
            self.flow.is_held = False
            is_answered = self.cycle is None or self.cycle.response_complete  # the rest of its body is dropped
            if is_answered or len(self.cycle.body) <= HIGH_WATER_LIMIT:
                self.flow.resume_reading()
        self.flow.set_clock()

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        was_in_headers, was_in_body, self._has_body_grown = self._is_in_headers, self._is_in_body, False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # no other protocol is spoken here: the answer is HTTP's, and the last one
            self.cycle.keep_alive = False
        except httptools.HttpParserError:
            self._refuse()
            return
        if self._has_body_grown:
            self._num_unfinished = 0
        elif (was_in_headers and self._is_in_headers) or (was_in_body and self._is_in_body):
            self._num_unfinished += len(data)  # the parser keeps a header that does not end
            if self._num_unfinished > MAX_HEADER_BYTES:
                self._refusal = _LONG_HEADERS
                self._refuse()
                return
        if self.pipeline:
            self.flow.resume_reading()  # some more may wait unparsed, and the end of the connection is noticed
        self._watch()

    def _hold(self) -> None:
        self.flow.pause_reading()
        self.flow.is_held = True

    def _refuse(self) -> None:
        """Answer what is no request, unless another answer is under way, and close the connection."""
        cycle = self.cycle
        for each in (cycle, self._served):
            if each is not None and not each.response_complete:
                each.disconnected = True
                each.message_event.set()
        is_answered = cycle is None or cycle.response_complete  # then the rest of its body gets no answer of its own
        if not self._is_in_body if is_answered else not (cycle.response_started or self.pipeline):
            refused = refusal(self._refusal)
            headers = [*self.server_state.default_headers, *refused.headers, (b"connection", b"close")]
            lines = [b"%s: %s\r\n" % header for header in headers]
            self.transport.write(b"".join([STATUS_LINE[refused.status], *lines, b"\r\n", refused.body]))
        self.transport.close()
        self._watch()

    # -- the parser's callbacks --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[SenderClock.KEY] = self.flow.clock.time  # type: ignore[literal-required]
        self._is_in_headers, self._num_header_bytes, self._num_unfinished = True, 0, 0
        self._num_dropped = self._num_lingers = 0

    def on_url(self, url: bytes) -> None:
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_headers:  # those behind a body are dropped: what reads the headers has read them
            self._count_header(len(name) + len(value) + 4)
            super().on_header(name, value)

    def _count_header(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self._refusal = _LONG_HEADERS

    def on_headers_complete(self) -> None:
        names = {name for name, _ in self.headers}
        if self.parser.should_upgrade() and names & {b"content-length", b"transfer-encoding"}:  # the parser skips it
            self._refusal = _UPGRADE
        if self._refusal is not _MALFORMED:
            raise ValueError("the request is refused")
        self._is_in_headers, self._num_unfinished = False, 0
        self._num_body_left = int(dict(self.headers).get(b"content-length", b"0"))
        waits = self.cycle is not None and not self.cycle.response_complete
        super().on_headers_complete()
        self._is_in_body = True
        if not waits:
            self._served = self.cycle
        self.cycle.transport = self._closing  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        self._num_body_left -= len(body)
        self._has_body_grown = True
        if self.cycle.response_complete:
            self._num_dropped += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_body = False
        super().on_message_complete()
        if self._closes_behind_body:
            self.transport.close()

    def close_behind_body(self) -> None:
        """Close the connection once the client has sent the body of what is answered, or LINGER_S has passed.

        A close while bytes are unread would reset it, and a client that is still sending would lose the answer.
        """
        if self._is_in_body and self.cycle.response_complete:
            self._closes_behind_body = True
        else:
            self.transport.close()

    # -- times -------------------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._served = self.pipeline[-1][0]
        super().on_response_complete()
        if (self.flow.is_held or self._unparsed) and not self.pipeline:
            self._await_turn()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(0)
        self._unparsed.clear()
        if self._served is not None:
            self._served.disconnected = True
            self._served.message_event.set()
            self._served = None
        self._closing.close = self.transport.close  # answers would hold this connection otherwise, and it holds them
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Give the client its time for what it has to do now."""
        is_answered = self.cycle is None or self.cycle.response_complete
        if (self.flow.write_paused or is_answered) and (waiting := self.transport.get_write_buffer_size()):
            if self._limit_s != self._stall_s:
                self._expect(self._stall_s, waiting)
        elif self.transport.is_closing() or (is_answered and self._is_in_body):
            self._expect(LINGER_S)
        elif is_answered:
            self._expect(HEADERS_S if self._is_in_headers or self.cycle is None else IDLE_S)
        else:
            self._expect(0)

    def _expect(self, limit_s: float, waiting: int = 0) -> None:
        """Close the connection when this time has passed. A time that runs already goes on.

        waiting  bytes that the client has not read; it has the time again if it reads some
        """
        if limit_s == self._limit_s:
            return
        self._limit_s = limit_s
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(limit_s, self._expire, waiting) if limit_s else None

    def _expire(self, waiting: int) -> None:
        goes_on = waiting and self.transport.get_write_buffer_size() != waiting
        if self._is_in_body and self._num_dropped >= LINGER_BYTES and self._num_lingers < MAX_LINGERS:
            goes_on, self._num_dropped, self._num_lingers = True, 0, self._num_lingers + 1
        if goes_on:
            self._limit_s = 0
            self._watch()
        else:
            self.transport.abort()

"""A minimal HTTP/2 client (RFC 9113) that reads many gRPC response streams at a few microseconds per message.

A load generator that costs as much as the server would measure itself. This one writes its header block once, does not
read response headers, and opens the flow-control windows fully at the start. The server does the same work as for any
other client.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

OnMessage = Callable[[bytes], None]
OnEnd = Callable[[], None]

_HEADER = struct.Struct(">BHBBI")  # length (8 + 16 bits), type, flags, stream
_PREFIX = struct.Struct(">BI")  # compressed flag and length, before every gRPC message
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_MAX_WINDOW = (1 << 31) - 1
_CANCEL = 8


class LeanConnection:
    """One connection. Call `receive` when it is readable."""

    def __init__(self, address: str, method: str, window: int = _MAX_WINDOW) -> None:
        """
        address  HOST:PORT, without TLS
        method   full name, /package.Service/Method
        window   bytes that the server may send for a call; the default never ends
        """
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._headers = _header_block(method, address)
        self._next_stream = 1
        self._streams: dict[int, tuple[OnMessage, OnEnd]] = {}
        self._parts: dict[int, bytes] = {}  # incomplete messages, by stream
        self._received = b""
        settings = struct.pack(">HIHI", 2, 0, 4, window)  # no server push; the window of each stream
        whole = struct.pack(">I", _MAX_WINDOW - 65535)
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        self._socket.sendall(preface + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, whole))

    def call(self, request: bytes, on_message: OnMessage, on_end: OnEnd) -> int:
        """Start a unary-stream call with a serialized request; return its number, for `cancel`."""
        number, self._next_stream = self._next_stream, self._next_stream + 2
        self._streams[number] = (on_message, on_end)
        message = _PREFIX.pack(0, len(request)) + request
        self._socket.sendall(
            _frame(_HEADERS, _END_HEADERS, number, self._headers) + _frame(_DATA, _END_STREAM, number, message)
        )
        return number

    def cancel(self, number: int) -> None:
        if self._streams.pop(number, None):
            self._socket.sendall(_frame(_RST_STREAM, 0, number, struct.pack(">I", _CANCEL)))

    def close(self) -> None:
        self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> None:
        """Read what has arrived. Raise ConnectionError if the server is gone."""
        if not (read := self._socket.recv(1 << 20)):
            raise ConnectionError("the server closed the connection")
        received = self._received + read
        at, end = 0, len(received)
        while end - at >= 9:
            high, low, kind, flags, number = _HEADER.unpack_from(received, at)
            after = at + 9 + (high << 16 | low)
            if after > end:
                break
            self._take(kind, flags, number, received[at + 9 : after])
            at = after
        self._received = received[at:]

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == _DATA:
            self._take_messages(number, self._parts.pop(number, b"") + payload)
        elif kind == _RST_STREAM or (kind == _HEADERS and flags & _END_STREAM):
            if stream := self._streams.pop(number, None):
                stream[1]()
        elif kind == _SETTINGS and not flags & _ACK:
            self._socket.sendall(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self._socket.sendall(_frame(_PING, _ACK, 0, payload))
        elif kind == _GOAWAY:
            raise ConnectionError("the server is going away")

    def _take_messages(self, number: int, data: bytes) -> None:
        at = 0
        while len(data) - at >= 5:
            _, length = _PREFIX.unpack_from(data, at)
            after = at + 5 + length
            if after > len(data):
                break
            if stream := self._streams.get(number):
                stream[0](data[at + 5 : after])
            at = after
        if at < len(data):
            self._parts[number] = data[at:]


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return _HEADER.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


def _header_block(method: str, authority: str) -> bytes:
    """Encode headers in HPACK (RFC 7541): names from the static table if there, literal values, no dynamic table."""

    def text(value: str) -> bytes:
        assert len(value) < 127
        return bytes([len(value)]) + value.encode()

    post, http = b"\x83", b"\x86"
    path, host, content_type = b"\x04" + text(method), b"\x01" + text(authority), b"\x0f\x10" + text("application/grpc")
    return post + http + path + host + b"\x00" + text("te") + text("trailers") + content_type

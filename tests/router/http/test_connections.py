"""Connections of the HTTP port: what clients get that send or read too slowly, or are too many."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trustme
import uvloop
from starlette.types import Receive, Scope, Send

from pagoda_server.router.errors import ConfigError
from pagoda_server.router.http import acceptor, connection
from pagoda_server.router.http.server import HttpPort
from pagoda_server.router.process.public_port import tls_context

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
LIMIT_S, STALL_S, LINGER_S, IDLE_S = 0.5, 0.5, 0.5, 600.0
SOON_S = 60.0  # after a limit, however busy the machine is, and long before the connection counts as idle


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADERS_S", LIMIT_S)
    monkeypatch.setattr(connection, "IDLE_S", IDLE_S)
    monkeypatch.setattr(connection, "LINGER_S", LINGER_S)


class App:
    """Answers at once with a body of `size` bytes, in parts."""

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self.written = 0
        self.ended = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for at in range(0, self.size, 1000):
            part = b"x" * min(1000, self.size - at)
            await send({"type": "http.response.body", "body": part, "more_body": True})
            self.written += len(part)
        await send({"type": "http.response.body"})
        self.ended.set()


class Reader(App):
    """Reads the whole body, answers if there is one, and waits for the client to go if there is none.

    names  of the headers, once the body has been read
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: set[bytes] = set()
        self.left = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        self.names = {name for name, _ in scope["headers"]}
        if body:
            await super().__call__(scope, receive, send)
        elif (await receive())["type"] == "http.disconnect":
            self.left.set()


def run(
    app: App,
    client: Callable[[HttpPort], Awaitable[Any]],
    tls: ssl.SSLContext | None = None,
    stall_s: float = STALL_S,
) -> Any:
    async def main() -> Any:
        port = HttpPort("127.0.0.1:0", app, shares_port=False, tls=tls, stall_s=stall_s)
        running = asyncio.create_task(port.run())
        try:
            return await asyncio.wait_for(client(port), 300)
        finally:
            await port.stop(0)
            await asyncio.wait_for(running, SOON_S)

    return uvloop.run(main())


async def opened(port: HttpPort, *parts: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, number = port.address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(number))
    for part in parts:
        writer.write(part)
        await asyncio.sleep(0.01)
    return reader, writer


async def time_until_closed(reader: asyncio.StreamReader) -> float:
    began = time.monotonic()
    try:
        while await reader.read(1 << 16):
            pass
    except ConnectionError:
        pass
    return time.monotonic() - began


@pytest.mark.parametrize("parts", [(), (b"G",), (REQUEST[:-2],), (REQUEST, REQUEST[:5])])
def test_half_a_request_is_given_up(parts: tuple[bytes, ...]) -> None:
    async def client(port: HttpPort) -> None:
        reader, _ = await opened(port, *parts)
        assert await time_until_closed(reader) < SOON_S

    run(App(), client)


def test_headers_that_come_byte_by_byte_get_no_more_time() -> None:
    async def client(port: HttpPort) -> None:
        reader, writer = await opened(port)
        closing = asyncio.create_task(time_until_closed(reader))
        while not closing.done():
            writer.write(b"G")
            await asyncio.sleep(0.02)
        assert closing.result() < SOON_S

    run(App(), client)


def test_headers_without_end_are_refused() -> None:
    async def client(port: HttpPort) -> bytes:
        reader, _ = await opened(port, REQUEST[:-2], b"a: " + b"x" * 40_000)
        return await reader.read()

    assert run(App(), client).startswith(b"HTTP/1.1 431 ")


@pytest.mark.thorough
def test_an_idle_connection_is_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADERS_S", 1.0)

    async def client(port: HttpPort) -> None:
        reader, writer = await opened(port)
        for at in range(3):
            await asyncio.sleep(1.5 if at else 0)
            if at == 2:
                monkeypatch.setattr(connection, "IDLE_S", LIMIT_S)
            writer.write(REQUEST)
            assert await reader.readuntil(b"xx\r\n0\r\n\r\n")
        assert await time_until_closed(reader) < SOON_S

    run(App(), client)


def test_a_body_whose_request_is_answered_already_gets_little_time() -> None:
    async def client(port: HttpPort) -> None:
        reader, writer = await opened(port, POST)
        assert await reader.readuntil(b"xx\r\n0\r\n\r\n")
        closing = asyncio.create_task(time_until_closed(reader))
        while not closing.done():
            writer.write(b"x")
            await asyncio.sleep(0.02)
        assert closing.result() < SOON_S

    run(App(), client)


@pytest.mark.thorough
def test_a_connection_serves_on_after_a_body_that_was_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADERS_S", IDLE_S)
    monkeypatch.setattr(connection, "LINGER_S", 2.0)

    async def client(port: HttpPort) -> None:
        reader, writer = await opened(port, POST)
        assert await reader.readuntil(b"xx\r\n0\r\n\r\n")
        writer.write(b"x" * 1_000_000)
        await asyncio.sleep(3.0)
        writer.write(REQUEST)
        assert await reader.readuntil(b"xx\r\n0\r\n\r\n")

    run(App(), client)


@pytest.mark.thorough
def test_a_slow_body_that_is_too_large_does_not_cost_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is there until the client has sent all, though that takes longer than its time."""
    monkeypatch.setattr(connection, "LINGER_S", 2.0)

    async def client(port: HttpPort) -> None:
        reader, writer = await opened(port, POST)
        for _ in range(5):
            writer.write(b"x" * 200_000)
            await asyncio.sleep(0.7)
        writer.write(REQUEST)
        for _ in range(2):
            assert await reader.readuntil(b"xx\r\n0\r\n\r\n")

    run(App(), client)


@pytest.mark.thorough
@pytest.mark.parametrize(("size", "is_encrypted"), [(60_000_000, False), (300_000, False), (60_000_000, True)])
def test_a_client_that_stops_reading_is_given_up(size: int, is_encrypted: bool, tmp_path: Path) -> None:
    app, authority = App(size), trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(str(tmp_path / "key"))
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "cert"))

    async def client(port: HttpPort) -> None:
        host, _, number = port.address.partition(":")
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)

        def connect() -> socket.socket:
            raw.connect((host, int(number)))
            if not is_encrypted:
                return raw
            context = ssl.create_default_context()
            authority.configure_trust(context)
            return context.wrap_socket(raw, server_hostname=host)

        reader = await asyncio.to_thread(connect)
        with reader:
            await asyncio.to_thread(reader.sendall, REQUEST)
            await asyncio.wait_for(app.ended.wait(), SOON_S)  # waits no longer for a client whose connection is closed
            if size > 1_000_000:
                assert app.written == size
            await asyncio.sleep(3 * STALL_S)
            received = 0
            with contextlib.suppress(OSError):
                while part := await asyncio.to_thread(reader.recv, 1 << 20):
                    received += len(part)
            assert received < size

    tls = tls_context(str(tmp_path / "cert"), str(tmp_path / "key")) if is_encrypted else None
    run(app, client, tls)


@pytest.mark.thorough
def test_a_client_that_reads_slowly_gets_all() -> None:
    app = App(500_000)

    async def client(port: HttpPort) -> int:
        reader, _ = await opened(port, REQUEST[:-2] + b"Connection: close\r\n\r\n")
        received = 0
        while part := await reader.read(50_000):
            received += len(part)
            await asyncio.sleep(0.4)  # in all for longer than it may read nothing
        return received

    assert run(app, client, stall_s=2.0) > 500_000


def test_too_many_connections_are_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(connection, "HEADERS_S", IDLE_S)

    async def client(port: HttpPort) -> None:
        kept = [await opened(port) for _ in range(3)]
        reader, _ = await opened(port)
        assert await time_until_closed(reader) < SOON_S
        kept[0][1].write(REQUEST)
        assert await kept[0][0].readuntil(b"xx\r\n0\r\n\r\n")

    run(App(), client)


def test_half_a_handshake_is_given_up_and_many_are_too_many(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(acceptor, "MAX_HANDSHAKES", 3)
    monkeypatch.setattr(acceptor, "HANDSHAKE_S", 2.0)
    certificate = trustme.CA().issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(str(tmp_path / "key"))
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "cert"))

    async def client(port: HttpPort) -> list[float]:
        clients = [await opened(port, b"\x16\x03\x01\x02") for _ in range(4)]
        return await asyncio.gather(*(time_until_closed(reader) for reader, _ in clients))

    *given_up, refused = run(App(), client, tls_context(str(tmp_path / "cert"), str(tmp_path / "key")))
    assert refused < 1.0 < min(given_up)
    assert max(given_up) < SOON_S / 2


def test_the_server_stops_in_spite_of_an_answer_without_end(caplog: pytest.LogCaptureFixture) -> None:
    class Endless(App):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await asyncio.Event().wait()

    async def client(port: HttpPort) -> None:
        await opened(port, REQUEST)

    began = time.monotonic()
    run(Endless(), client)
    assert time.monotonic() - began < SOON_S
    assert not caplog.records


def test_a_port_that_is_taken_is_a_wrong_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"--http: cannot bind {address}: Address already in use"):
            HttpPort(address, App(), shares_port=False, tls=None, stall_s=1)


# -- hostile bytes ----------------------------------------------------------------------------------------------------


class Reading(App):
    """Reads each body whole, then answers with its length and the path."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        length, is_open = 0, True
        while is_open:
            event = await receive()
            if event["type"] == "http.disconnect":
                return
            length, is_open = length + len(event["body"]), event["more_body"]
        told = str(length).encode()
        headers = [(b"content-length", str(len(told)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": told})


async def longest_gap_s(work: Awaitable[Any]) -> float:
    """The longest time for which this event loop did nothing but the work."""
    task, longest, last = asyncio.ensure_future(work), 0.0, time.monotonic()
    while not task.done():
        await asyncio.sleep(0.001)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    await task
    return longest


def exchanged(port: HttpPort, sent: bytes, silence_s: float = 1.0) -> bytes:
    """Send bytes, and return all that comes back until the server closes the connection or is silent for so long."""
    host, _, number = port.address.partition(":")
    with socket.create_connection((host, int(number)), timeout=10) as client:

        def send() -> None:
            with contextlib.suppress(OSError):
                client.sendall(sent)

        sender = threading.Thread(target=send)
        sender.start()
        found = b""
        client.settimeout(silence_s)
        with contextlib.suppress(OSError):
            while part := client.recv(1 << 16):
                found += part
        sender.join()
    return found


SHORT = b"POST /a HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\n"
CHUNKED = b"POST /a HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_a_body_of_one_byte_a_chunk_holds_up_nobody() -> None:
    async def client(port: HttpPort) -> None:
        sent = CHUNKED[:-2] + b"Connection: close\r\n\r\n" + b"1\r\nx\r\n" * 300_000 + b"0\r\n\r\n"
        found: list[bytes] = []

        async def attack() -> None:
            found.append(await asyncio.to_thread(exchanged, port, sent, 60.0))

        assert await longest_gap_s(attack()) < 0.2  # h11 took more than a second
        assert found[0].endswith(b"300000")

    run(Reading(), client, stall_s=60.0)


@pytest.mark.thorough
def test_a_flood_of_requests_on_one_connection_is_answered_in_turn() -> None:
    app = Reading()

    async def client(port: HttpPort) -> None:
        found: list[bytes] = []

        async def attack() -> None:
            found.append(await asyncio.to_thread(exchanged, port, REQUEST * 20_000))

        assert await longest_gap_s(attack()) < 0.5
        assert found[0].count(b"HTTP/1.1 200") == len(app.paths) == 20_000

    run(app, client, stall_s=60.0)


SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        b"Transfer-Encoding: gzip, chunked\r\nContent-Length: 5\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: +5\r\n",
        b"Content-Length : 5\r\n",
        b"Transfer-Encoding: xchunked\r\n",
    ],
)
def test_a_body_with_two_lengths_or_an_odd_one_ends_the_connection(headers: bytes) -> None:
    app = Reading()

    async def client(port: HttpPort) -> None:
        sent = b"POST / HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n0\r\n\r\n" + SMUGGLED
        found = await asyncio.to_thread(exchanged, port, sent)
        assert found.startswith(b"HTTP/1.1 400 ")
        assert b"connection: close" in found
        assert found.count(b"date: ") == 1

    run(app, client)
    assert "/smuggled" not in app.paths


@pytest.mark.parametrize(
    "headers",
    [
        b"X: " + b"x" * 33_000 + b"\r\n",
        b"X: " + b"x" * 100_000 + b"\r\n",
        b"X: y\r\n" * 6_000,
        b"X" * 40_000 + b": y\r\n",
    ],
)
@pytest.mark.parametrize("parts", [1, 7])
def test_headers_above_their_limit_are_refused(headers: bytes, parts: int) -> None:
    app = Reading()

    async def client(port: HttpPort) -> None:
        sent = b"GET / HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n"
        reader, writer = await opened(port)
        for at in range(parts):
            with contextlib.suppress(ConnectionError, RuntimeError):  # the server has closed it
                writer.write(sent[at * len(sent) // parts : (at + 1) * len(sent) // parts])
            await asyncio.sleep(0.01)
        with contextlib.suppress(ConnectionError):
            assert (await reader.read(100)).startswith(b"HTTP/1.1 431 ")

    run(app, client)
    assert not app.paths


@pytest.mark.parametrize(
    "endless", [b"0\r\n" + b"x: 1\r\n" * 10_000, b"0\r\nx: " + b"a" * 60_000, b"1;" + b"a" * 60_000]
)
def test_what_follows_a_body_or_stands_between_its_chunks_is_bounded(endless: bytes) -> None:
    async def client(port: HttpPort) -> bytes:
        reader, _ = await opened(port, CHUNKED + b"1\r\nx\r\n", endless)
        return await reader.read()

    assert run(Reader(), client).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    ("first", "wrong", "status"), [(CHUNKED, b"no size\r\n", b""), (REQUEST, b"GET /\xff HTTP/1.1\r\n\r\n", b"400 ")]
)
def test_what_is_wrong_behind_an_answer_is_answered_if_it_is_a_request(
    first: bytes, wrong: bytes, status: bytes
) -> None:
    async def client(port: HttpPort) -> bytes:
        reader, writer = await opened(port, first)
        assert await reader.readuntil(b"xx\r\n0\r\n\r\n")
        writer.write(wrong)
        return await reader.read()

    assert run(App(), client).removeprefix(b"HTTP/1.1 ")[:4] == status


def test_fields_behind_a_body_are_none_of_the_headers() -> None:
    app = Reader()

    async def client(port: HttpPort) -> bytes:
        reader, _ = await opened(port, CHUNKED + b"1\r\nx\r\n0\r\nauthorization: Bearer x\r\n\r\n")
        return await reader.readuntil(b"0\r\n\r\n")

    assert run(app, client).startswith(b"HTTP/1.1 200 ")
    assert app.names == {b"host", b"transfer-encoding"}


@pytest.mark.parametrize("parts", [(REQUEST, REQUEST), (REQUEST, REQUEST + b"\0"), (SHORT, b"x" + 2 * REQUEST)])
def test_a_request_that_another_one_follows_learns_that_its_client_has_gone(parts: tuple[bytes, ...]) -> None:
    app = Reader()

    async def client(port: HttpPort) -> None:
        _, writer = await opened(port, *parts)
        writer.close()
        await asyncio.wait_for(app.left.wait(), SOON_S)

    run(app, client)


def test_headers_up_to_their_limit_are_taken() -> None:
    async def client(port: HttpPort) -> None:
        sent = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 32_000 + b"\r\n\r\n"
        assert (await asyncio.to_thread(exchanged, port, sent)).startswith(b"HTTP/1.1 200 ")

    run(Reading(), client)


UPGRADE = b" / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"GET" + UPGRADE + b"\r\n", b"200"), (b"POST" + UPGRADE + b"Content-Length: 2\r\n\r\nhi", b"400")],
)
def test_no_other_protocol_is_taken_up(sent: bytes, status: bytes) -> None:
    async def client(port: HttpPort) -> None:
        found = await asyncio.to_thread(exchanged, port, sent)
        assert found.startswith(b"HTTP/1.1 " + status)
        assert b"connection: close" in found

    run(Reading(), client)

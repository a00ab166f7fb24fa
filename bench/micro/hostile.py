"""`python -m bench.micro.hostile`: how fast a busy router refuses, and what hostile messages do to its streams.

A synthetic engine with steps of 20 ms gives 64 streams their tokens through one router. A client in a process of its
own reads them, and its gaps between tokens show how long the router was held up. Another process attacks. One server
has 64 places, so that it refuses every further call; another one has room, so that it reads what it gets.

Refusals are timed from the call's last byte sent to its status, for calls one after another, at a fixed rate, and in
bursts on one connection. docs/operations.md says what is promised. A server of grpc.aio alone, which has no streams and
refuses every call, is timed in the same way: it shows the least that a refusal takes on this machine.

Messages are those which cost the most to parse, or ask for the most in few bytes. Each is sent by several calls at
once, over gRPC or as the bytes of HTTP requests.

A crowd is many chats that arrive at once, each on a connection of its own, over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import multiprocessing.connection
import re
import resource
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Annotated, Any

import grpc
import numpy as np
import psutil
import typer
import uvloop
from rich.console import Console
from rich.table import Table

from bench import BenchError
from bench.micro.lean_client import LeanConnection
from bench.micro.router_clients import GENERATE, Arrivals, read_streams, run_client
from bench.processes import high_water_bytes
from bench.systems import Server, served
from pagoda_server.router.process.public_port import SERVER_OPTIONS

STREAMS = 64
STEP_MS = 20.0
SETTLE_S = 1.5
MAX_TOKENS = 30_000  # ten minutes of steps
TOKENIZE = "/pagoda.v1.Inference/Tokenize"
DIGITS = b"###"  # as long as the digits, because the fields around them tell their lengths
HTTP = "HTTP"
PROMPT = b"\x1a\x05hello"  # GenerateRequest.prompt


# -- refusals --------------------------------------------------------------------------------------------------------


class Refusals:
    """Calls on one connection that the server refuses. delays_s: from a call's start to its status."""

    def __init__(self, address: str) -> None:
        self.delays_s: list[float] = []
        self._connection = LeanConnection(address, GENERATE)
        self._running = 0

    def start(self) -> None:
        began = time.perf_counter()

        def on_end() -> None:
            self.delays_s.append(time.perf_counter() - began)
            self._running -= 1

        self._running += 1
        self._connection.call(PROMPT, _refuse_message, on_end)

    def receive_all(self) -> None:
        while self._running:
            self._connection.receive()

    def receive_until(self, due: float) -> None:
        while (left := due - time.perf_counter()) > 0:
            if multiprocessing.connection.wait([self._connection.fileno()], left):
                self._connection.receive()


def one_after_another(address: str, seconds: float) -> list[float]:
    refusals = Refusals(address)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        refusals.start()
        refusals.receive_all()
    return refusals.delays_s


def at_a_rate(address: str, seconds: float, rate: float) -> list[float]:
    refusals = Refusals(address)
    began = time.perf_counter()
    for at in range(int(seconds * rate)):
        refusals.receive_until(began + at / rate)
        refusals.start()
    refusals.receive_all()
    return refusals.delays_s


def at_once(address: str, count: int) -> list[float]:
    refusals = Refusals(address)
    for _ in range(count):
        refusals.start()
    refusals.receive_all()
    return refusals.delays_s


def _refuse_message(message: bytes) -> None:
    raise BenchError("a call was not refused")


# -- messages --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attack:
    """One message, sent by `calls` calls at once. Each has its own three digits where DIGITS stand.

    method  of gRPC; HTTP: the message is the bytes of requests, whose last one closes the connection
    """

    name: str
    message: bytes
    calls: int
    method: str = GENERATE
    is_compressed: bool = False


def attacks() -> list[Attack]:
    prompt = b"\x1a\x01x"
    fits = 1_500_000  # bytes that a server with the default limits accepts
    deep = json.dumps({"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(7_000)}}).encode()
    one = _field(8, b"\x08\x01")  # stopping.max_tokens, so that what is read is measured, not what is generated
    tool = _field(3, _field(1, b"f") + _field(3, deep))
    user = _field(1, b"\x08\x02\x12\x02Hi")
    small = _field(10, _field(2, b"a{4294900" + DIGITS + b"}"))  # guided.regex
    allowed = _field(10, _field(2, b"a{15" + DIGITS + b"}[a-z]"))
    many = _field(5, b"".join(_field(1, b"\x08\x02\x12\xf0\x01" + b"word " * 48) for _ in range(4000)))
    return [
        Attack("16 MB of empty messages in a chat", _field(5, b"\x0a\x00" * 8_000_000), 8),
        Attack("1.5 MB of empty messages in a chat", _field(5, b"\x0a\x00" * (fits // 2)), 40),
        Attack("16 MB of stop strings", prompt + _field(8, b"\x1a\x00" * 8_000_000), 8),
        Attack("1.5 MB of stop strings", prompt + _field(8, b"\x1a\x00" * (fits // 2)), 40),
        Attack("15 MB of token ids", _field(6, _field(1, b"\x01" * 15_000_000)), 8),
        Attack("1.5 MB of token ids", _field(6, _field(1, b"\x01" * fits)), 40),
        Attack("10 MB of logit_bias", prompt + _field(7, _biases(1_000_000)), 8),
        Attack("1.3 MB of logit_bias", prompt + _field(7, _biases(120_000)), 40),
        Attack("15 MB of unknown fields", prompt + b"\xf8\x07\x00" * 5_000_000, 8),
        Attack("1.5 MB of unknown fields", prompt + b"\xf8\x07\x00" * (fits // 3), 40),
        Attack("60,000 unknown fields", prompt + one + b"\xf8\x07\x00" * 60_000, 40),
        Attack("gzip: 1 MB that unpacks to 1 GB", b"\x1a" + b"\x00" * (1 << 30), 4, GENERATE, True),
        Attack("gzip: 2 kB that unpack to 1.5 MB", _field(6, _field(1, b"\x01" * fits)), 40, GENERATE, True),
        Attack("1 MB of chat in 4000 messages", many, 40),
        Attack("expressions of 13 bytes that repeat a lot", prompt + one + small, 100),
        Attack("the longest repetition that is allowed", prompt + one + allowed, 100),
        Attack("64 prompts of 30,000 equal ids", _field(6, _field(1, b"\x01" * 30_000)) + one, 64),
        Attack("250 kB of JSON", _field(5, user + tool) + one, 64),
        Attack("Tokenize 1 MiB", _field(2, b"hello world, " * 80_000), 24, TOKENIZE),
        Attack("Tokenize 1 MiB of digits", _field(2, b"0123456789" * 100_000), 24, TOKENIZE),
        Attack("Detokenize 1 M ids", _field(2, b"\x41" * 1_000_000), 24, "/pagoda.v1.Inference/Detokenize"),
        Attack("HTTP: n of a billion", _post({"n": 1_000_000_000}), 40, HTTP),
        Attack("HTTP: n and log-probabilities of a billion, streamed", _post(
            {"n": 1_000_000_000, "logprobs": True, "top_logprobs": 1_000_000_000, "stream": True}
        ), 40, HTTP),
        Attack("HTTP: 1.5 MB of messages", _post({"messages": [{}] * 400_000}), 40, HTTP),
        Attack("HTTP: 200,000 chunks of one byte", _head("Transfer-Encoding: chunked") + b"1\r\n \r\n" * 200_000
               + b"0\r\n\r\n", 8, HTTP),
        Attack("HTTP: 1 MB of headers", b"GET /healthz HTTP/1.1\r\n" + b"a: b\r\n" * 170_000 + b"\r\n", 8, HTTP),
        Attack("HTTP: 20,000 requests on a connection", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 19_999
               + b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 8, HTTP),
        Attack("HTTP: a request smuggled behind two lengths", _head("Transfer-Encoding: chunked", "Content-Length: 5")
               + b"0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", 40, HTTP),
    ]  # fmt: skip


def _post(body: dict[str, Any]) -> bytes:
    content = json.dumps({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 1} | body).encode()
    return _head(f"Content-Length: {len(content)}") + content


def _head(*headers: str) -> bytes:
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: localhost", "Connection: close", *headers]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()


def attack(address: str, http: str, number: int) -> Counter[str]:
    """Send an attack; returns how often each status came back."""
    chosen = attacks()[number]
    if chosen.method == HTTP:
        with ThreadPoolExecutor(chosen.calls) as threads:
            return sum(threads.map(partial(_statuses, http), [chosen.message] * chosen.calls), Counter())
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    compression = grpc.Compression.Gzip if chosen.is_compressed else grpc.Compression.NoCompression

    def call(at: int) -> str:
        with grpc.insecure_channel(address, [*options, ("own", at)], compression=compression) as channel:
            try:
                message = chosen.message.replace(DIGITS, b"%03d" % at)
                if chosen.method == GENERATE:
                    list(channel.unary_stream(chosen.method)(message, timeout=120))
                else:
                    channel.unary_unary(chosen.method)(message, timeout=120)
            except grpc.RpcError as error:
                return str(error.code().name)
            return "OK"

    with ThreadPoolExecutor(chosen.calls) as threads:
        return Counter(threads.map(call, range(chosen.calls)))


def _statuses(address: str, message: bytes) -> Counter[str]:
    """Send bytes on a connection of their own; count the statuses that come until the server closes it."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    answer = bytearray()
    with socket.create_connection((host, int(port)), timeout=120) as connection, ThreadPoolExecutor(1) as sender:
        sent = sender.submit(connection.sendall, message)
        with contextlib.suppress(ConnectionError):  # the server need not read what it has refused
            while part := connection.recv(1 << 16):
                answer += part
            sent.result()
    return Counter(status.decode() for status in re.findall(rb"HTTP/1\.1 (\d{3})", answer))


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def _biases(count: int) -> bytes:
    return b"".join(_field(9, b"\x08" + _varint(id) + b"\x15\x00\x00\x80\x3f") for id in range(count))


# -- a crowd over HTTP ------------------------------------------------------------------------------------------------


def crowd(address: str, count: int) -> tuple[Counter[str], list[float]]:
    """Ask for so many streamed chats at once. Returns the statuses, and seconds until each came."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    chat = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 5, "stream": True}
    return uvloop.run(_crowd(address, json.dumps(chat).encode(), count))


async def _crowd(address: str, body: bytes, count: int) -> tuple[Counter[str], list[float]]:
    host, _, port = address.removeprefix("http://").rpartition(":")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    statuses: Counter[str] = Counter()
    delays_s: list[float] = []

    async def call() -> None:
        began = time.perf_counter()
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + body)
        status = (await reader.readline()).split()[1].decode()
        delays_s.append(time.perf_counter() - began)
        statuses[status] += 1
        await reader.readuntil(b"[DONE]" if status == "200" else b"}}")
        writer.close()

    await asyncio.gather(*(call() for _ in range(count)))
    return statuses, delays_s


def _crowds(count: int) -> Table:
    table = Table("crowd", "places", "answers", "status p50 / last ms", "ITL p99 / max ms", box=None)
    for places in (STREAMS, 1024):
        with (
            _server(places, with_http=True) as server,
            _streams(server.address) as arrivals,
            multiprocessing.get_context("spawn").Pool(1) as pool,
        ):
            pool.apply(time.time)
            (answers, delays), start, end = _measured(pool.apply, crowd, (server.url, count))
        gaps, delays_ms = _gaps_ms(arrivals, start - 0.1, end + 0.1), 1e3 * np.array(delays)
        told = ", ".join(f"{number} {status}" for status, number in answers.items())
        times = f"{np.median(delays_ms):.0f} / {delays_ms.max():.0f}"
        table.add_row(f"{count} chats", str(places), told, times, f"{np.percentile(gaps, 99):.1f} / {gaps.max():.1f}")
    return table


# -- servers and streams ---------------------------------------------------------------------------------------------


def _server(max_requests: int, with_http: bool = False) -> AbstractContextManager[Server]:
    return served(
        [
            *("--model", "synthetic", "--step-ms", f"{STEP_MS:g}", "--kv-cache-gb", "0.1"),
            *("--max-requests", str(max_requests), "--max-num-seqs", "256", "--max-queued-tokens", str(1 << 40)),
            *("--log-level", "error", *(("--http", "127.0.0.1:0") if with_http else ())),
        ]
    )


def _refuse_all(parent: Connection) -> None:
    """Serve with grpc.aio alone, and refuse every call with a status of the router's size; send the address."""

    async def refuse(_: object, context: Any) -> None:
        details = "the queue is full: 64 requests are admitted, the limit is 64"
        metadata = (("grpc-status-details-bin", bytes(200)), ("grpc-retry-pushback-ms", "1000"))
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, details, metadata)

    async def serve() -> None:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        service, _, method = GENERATE.removeprefix("/").partition("/")
        handlers = {method: grpc.stream_stream_rpc_method_handler(refuse)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        parent.send(f"127.0.0.1:{port}")
        await server.wait_for_termination()

    uvloop.run(serve())


@contextlib.contextmanager
def _bare_server() -> Iterator[str]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_refuse_all, args=(theirs,), daemon=True)
    process.start()
    yield ours.recv()
    process.kill()
    process.join()


@contextlib.contextmanager
def _streams(address: str) -> Iterator[Arrivals]:
    """Read the streams meanwhile; what arrived is there after the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=run_client, args=(theirs, partial(read_streams, max_tokens=MAX_TOKENS), address, STREAMS)
    )
    process.daemon = True
    process.start()
    theirs.close()
    ours.recv()
    time.sleep(SETTLE_S)
    arrivals = Arrivals()
    yield arrivals
    ours.send("stop")
    arrivals.times = ours.recv().times
    process.join()


def _gaps_ms(arrivals: Arrivals, start: float, end: float) -> np.ndarray:
    all_times = map(np.array, arrivals.times)
    return np.concatenate([1e3 * np.diff(times[(times >= start) & (times < end)]) for times in all_times])


def _measured(work: Any, *arguments: Any) -> tuple[Any, float, float]:
    """Run the work and return its result and the times between which it ran."""
    start = time.monotonic()
    result = work(*arguments)
    return result, start, time.monotonic()


def main(
    seconds: Annotated[float, typer.Option(help="Length of each measurement of refusals.")] = 5.0,
    rate: Annotated[float, typer.Option(help="Refusals a second at the fixed rate.")] = 500.0,
    bursts: Annotated[list[int], typer.Option(help="Calls in a burst; may be repeated.")] = [200, 1000, 5000],  # noqa: B006
    chats: Annotated[int, typer.Option(help="Chats of the crowd over HTTP.")] = 2000,
    only: Annotated[str, typer.Option(help="Send only the messages whose names contain this.")] = "",
) -> None:
    console = Console(width=160)
    refusals = Table(
        "refusals", "p50 ms", "p99 ms", "last ms", "promised", "grpc.aio alone", "ITL p99 / max ms", box=None
    )
    ways: list[tuple[str, str, Any, tuple[Any, ...]]] = [
        ("one after another", "p99 10", one_after_another, (seconds,)),
        (f"{rate:g} a second", "p99 10", at_a_rate, (seconds, rate)),
        *((f"{count} at once", f"last {10 + 0.2 * count:g}", at_once, (count,)) for count in bursts),
    ]
    with _server(STREAMS) as server, _bare_server() as bare:
        address = server.address
        for name, promised, way, arguments in ways:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                of_bare_ms = 1e3 * np.array(pool.apply(_timed, (way, bare, *arguments)))
            with _streams(address) as arrivals, multiprocessing.get_context("spawn").Pool(1) as pool:
                pool.apply(time.time)
                delays, start, end = _measured(pool.apply, _timed, (way, address, *arguments))
            delays_ms, gaps = 1e3 * np.array(delays), _gaps_ms(arrivals, start - 0.1, end + 0.1)
            refusals.add_row(
                name, *(f"{value:.1f}" for value in (*np.percentile(delays_ms, (50, 99)), delays_ms.max())), promised,
                f"p99 {np.percentile(of_bare_ms, 99):.1f}, last {of_bare_ms.max():.1f}",
                f"{np.percentile(gaps, 99):.1f} / {gaps.max():.1f}",
            )  # fmt: skip
            time.sleep(0.5)
    console.print(refusals)
    console.print(_crowds(chats))
    console.print(_attacked(only))


def _timed(way: Any, *arguments: Any) -> list[float]:
    delays: list[float] = way(*arguments)
    return delays


def _attacked(only: str) -> Table:
    table = Table("attack", "calls", "longest gap ms", "router's memory MB", "answers", box=None)
    for number, each in enumerate(attacks()):
        if only not in each.name:
            continue
        with (
            _server(1024, with_http=True) as server,
            _streams(server.address) as arrivals,
            multiprocessing.get_context("spawn").Pool(1) as pool,
        ):
            pool.apply(time.time)
            before = psutil.Process(server.pid).memory_info().rss
            answers, start, end = _measured(pool.apply, attack, (server.address, server.url, number))
            peak = high_water_bytes(server.pid)
        gaps = _gaps_ms(arrivals, start - 0.1, end + 0.1)
        told = ", ".join(f"{count} {status}" for status, count in answers.items())
        table.add_row(each.name, str(each.calls), f"{gaps.max():.0f}", f"{before / 1e6:.0f} → {peak / 1e6:.0f}", told)
    return table


if __name__ == "__main__":
    typer.run(main)

"""`pagoda kv-events`: what a server's engines have cached, as the events that vLLM publishes over ZeroMQ.

llm-d's precise prefix scoring and Dynamo's router read them. A message has three frames: a topic `kv@POD@MODEL`, the
batch's number in eight bytes, and msgpack: `[time, [["BlockStored", …], …]]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagoda_server.cli.terminal import (
    DEFAULT_ADDRESS,
    Address,
    Tls,
    TlsCa,
    Token,
    connect,
    errors_reported,
    print_error,
)

if TYPE_CHECKING:
    from pagoda_server.router.adapters.protocols import smg_common_pb2 as smg

METHOD = "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents"
PAUSE_S = 1.0  # before everything is sent again: to those who subscribe together, or once the server is back
MEDIUM = "GPU"  # what the protocol calls the first place of a block, on whichever device the engine runs
SUBSCRIBES = b"\x01"  # how ZeroMQ reports a new subscriber


def kv_events(
    bind: Annotated[
        str | None, typer.Option(metavar="ENDPOINT", help="Endpoint to listen at, such as tcp://*:5557.")
    ] = None,
    connect_to: Annotated[
        str | None, typer.Option("--connect", metavar="ENDPOINT", help="Endpoint of a subscriber that listens.")
    ] = None,
    pod: Annotated[
        str | None, typer.Option(help="What subscribers know the server by.", show_default="--address")
    ] = None,
    address: Address = DEFAULT_ADDRESS,
    token: Token = None,
    tls: Tls = False,
    tls_ca: TlsCa = None,
) -> None:
    """Publish what a running server has cached over ZeroMQ, as vLLM does, for llm-d and others.

    For each new subscriber, everything that is cached is published again, to all of them.
    """
    try:
        import msgspec  # noqa: F401
        import zmq
    except ImportError:
        print_error("this command needs pyzmq and msgspec: pip install 'pagoda-server[kv-events]'")
        raise typer.Exit(1) from None
    endpoint = bind or connect_to
    if endpoint is None or (bind and connect_to):
        raise typer.BadParameter("give one of --bind and --connect")
    with errors_reported(address), zmq.Context() as context, context.socket(zmq.XPUB) as socket:
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            (socket.bind if bind else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            print_error(f"{endpoint}: {error}")
            raise typer.Exit(1) from None
        asyncio.run(_publish(socket, endpoint, pod or address, address, token, tls, tls_ca))


async def _publish(
    socket: Any, endpoint: str, pod: str, address: str, token: str | None, tls: bool, tls_ca: Path | None
) -> None:
    """Relay events until SIGTERM."""
    async with connect(address, token, tls, tls_ca) as client:
        model = (await client.models())[0].name
    relay = _Relay(socket, f"kv@{pod}@{model}", address, token, tls_ca or tls)
    print(f"publishing what {address} has cached at {endpoint} as kv@{pod}@{model}", flush=True)
    running = asyncio.create_task(relay.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await running


class _Relay:
    """Follows one server.

    socket  an XPUB socket: it receives a message for each new subscriber
    """

    def __init__(self, socket: Any, topic: str, address: str, token: str | None, tls: bool | Path) -> None:
        self._socket = socket
        self._topic = topic.encode()
        self._address = address
        self._token = token
        self._tls = tls
        self._number = 0  # of the last batch
        self._is_asked = asyncio.Event()  # a subscriber has come, and knows nothing yet
        self._is_away = False  # the server

    async def run(self) -> None:
        """Raises PagodaError for what waiting does not heal."""
        import zmq

        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket.getsockopt(zmq.FD), self._receive)
        self._receive()
        try:
            while True:
                await self._is_asked.wait()  # without subscribers, engines need not report
                self._is_asked.clear()
                await self._follow_until_asked()
                await asyncio.sleep(PAUSE_S)
        finally:
            loop.remove_reader(self._socket.getsockopt(zmq.FD))

    def _receive(self) -> None:
        """Read all messages that are there: the file descriptor becomes readable once, for any number of them."""
        import zmq

        with contextlib.suppress(zmq.Again):
            while message := self._socket.recv(zmq.NOBLOCK):
                if message.startswith(SUBSCRIBES):
                    self._is_asked.set()

    async def _follow_until_asked(self) -> None:
        """Publish what the server reports until there is another subscriber, or until the server is away."""
        from pagoda.errors import Cancelled, DeadlineExceeded, Overloaded, Unavailable

        following = asyncio.create_task(self._follow())
        asked = asyncio.create_task(self._is_asked.wait())
        try:
            await asyncio.wait((following, asked), return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
        except (Unavailable, Overloaded, Cancelled, DeadlineExceeded) as error:
            if not self._is_away:
                self._is_away = True
                print(f"{self._address} is away: {error}", file=sys.stderr, flush=True)
                self._send([["AllBlocksCleared"]], time.time())
            self._is_asked.set()
        finally:
            following.cancel()
            asked.cancel()
            await asyncio.gather(following, asked, return_exceptions=True)

    async def _follow(self) -> None:
        """Publish everything that is cached, then what changes. Raises PagodaError."""
        import grpc

        from pagoda.connection import CHANNEL_OPTIONS, call_metadata, credentials
        from pagoda.errors import Unavailable, error_from
        from pagoda_server.router.adapters.protocols import smg_common_pb2 as smg

        secret = credentials(self._tls)
        async with (
            grpc.aio.secure_channel(self._address, secret, CHANNEL_OPTIONS)
            if secret
            else grpc.aio.insecure_channel(self._address, CHANNEL_OPTIONS)
        ) as channel:
            subscribe = channel.unary_stream(
                METHOD, smg.SubscribeKvEventsRequest.SerializeToString, smg.KvEventBatch.FromString
            )
            try:
                async for batch in subscribe(
                    smg.SubscribeKvEventsRequest(), metadata=call_metadata(self._token, tenant=None)
                ):
                    self._is_away = False
                    self._send([each for event in batch.events for each in as_vllm(event)], batch.timestamp)
            except grpc.RpcError as error:
                raise error_from(error) from None
        raise Unavailable("it ended the stream of events", grpc.StatusCode.UNAVAILABLE)

    def _send(self, events: list[list[Any]], timestamp: float) -> None:
        """Hand a batch to all subscribers. One that is far behind misses some, and sees it by the number."""
        import msgspec

        self._number += 1
        self._socket.send_multipart(
            (self._topic, self._number.to_bytes(8, "big"), msgspec.msgpack.encode([timestamp, events]))
        )
        self._receive()  # sending uses up what the file descriptor would report


def as_vllm(event: smg.KvCacheEvent) -> Iterator[list[Any]]:
    """Yield an event as vLLM's, which are arrays. A stored one has blocks of one size."""
    if event.HasField("cleared"):
        yield ["AllBlocksCleared"]
    elif event.HasField("removed"):
        yield ["BlockRemoved", [_unsigned(key) for key in event.removed.block_hashes], MEDIUM]
    else:
        stored = event.stored
        parent = _unsigned(stored.parent_block_hash) if stored.HasField("parent_block_hash") else None
        for size, blocks in groupby(stored.blocks, lambda block: block.block_size):
            hashes, tokens = list[int](), list[int]()
            for block in blocks:
                hashes.append(_unsigned(block.block_hash))
                tokens.extend(block.token_ids)
            yield ["BlockStored", hashes, parent, tokens, size, None, MEDIUM]
            parent = hashes[-1]


def _unsigned(key: int) -> int:
    return key % (1 << 64)

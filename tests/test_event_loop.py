"""The event loop learns of everything that grpc.aio has done, however much it is."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import grpc

from pagoda_server.runtime import event_loop

CALLS = 1000  # more than the poller's socket holds bytes, which is about 280
TURN_S = 0.001


def test_events_that_come_at_once_are_handled_in_a_few_turns() -> None:
    async def main() -> None:
        goes_on, are_all_here = asyncio.Event(), asyncio.Event()
        turns, waiting = 0, 0
        written: list[int] = []

        async def answer(request: bytes, context: Any) -> None:
            nonlocal waiting
            waiting += 1
            if waiting == CALLS:
                are_all_here.set()
            await goes_on.wait()
            began = turns
            await context.write(b"")
            written.append(turns - began)

        server = grpc.aio.server()
        handler = grpc.unary_stream_rpc_method_handler(answer)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", {"Stream": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            calls = [channel.unary_stream("/test.Test/Stream")(b"", timeout=120) for _ in range(CALLS)]
            await asyncio.wait_for(are_all_here.wait(), 120)
            goes_on.set()
            while len(written) < CALLS:
                turns += 1
                time.sleep(TURN_S)  # noqa: ASYNC251 (a turn of a busy loop, in which the poller fills its socket)
                await asyncio.sleep(0)
            await asyncio.gather(*(asyncio.to_thread(list, call) for call in calls))
        await server.stop(None)
        assert max(written) < 100  # with a byte a turn: hundreds

    event_loop.run(main())


def test_other_readers_get_every_byte() -> None:
    async def main() -> bytes:
        reads, writes = socket.socketpair()
        loop, got = asyncio.get_running_loop(), bytearray()
        reads.setblocking(False)
        loop.add_reader(reads, lambda: got.extend(reads.recv(1)))
        writes.sendall(b"abc")
        while len(got) < 3:  # noqa: ASYNC110 (each turn may read a byte)
            await asyncio.sleep(0)
        loop.remove_reader(reads)
        reads.close()
        writes.close()
        return bytes(got)

    assert event_loop.run(main()) == b"abc"

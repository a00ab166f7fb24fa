"""What a request of HTTP leaves behind after its end."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from typing import Any

import pytest
import uvloop

from pagoda_server.router.errors import InvalidArgument, ResourceExhausted
from pagoda_server.router.http.guards import Guard
from pagoda_server.router.http.http_call import Api, Endpoint
from pagoda_server.router.http.server import HttpPort
from pagoda_server.router.request.receiving import Messages
from pagoda_server.router.tenants.identity import Identities

REQUEST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"


class Prompt:
    """Stands for a megabyte."""


class Refusing(Api):
    def __init__(self, prompts: list[weakref.ref[Prompt]]) -> None:
        self._prompts = prompts

    def request(self, raw: bytes, limits: Any, call: Any) -> Any:
        prompt = Prompt()
        self._prompts.append(weakref.ref(prompt))
        raise InvalidArgument("prompt", "is too long")

    def answer(self) -> Any:
        raise NotImplementedError

    def own_name(self, field: str) -> str:
        return "input"


class Inference:
    """Reads and parses as the service does, and nothing more."""

    def __init__(self) -> None:
        self.is_full = False
        self._messages = Messages(1 << 20, 10.0)

    def refusal(self, tenant: str) -> ResourceExhausted | None:
        return ResourceExhausted("the queue is full", retry_after_s=1.0) if self.is_full else None

    def refused(self, call: Any, why: Exception, route: str, method: str) -> None:
        pass

    async def generate(self, call: Any, parse: Any, route: str) -> None:
        with await self._messages.read(call) as message:
            await message.parsed(lambda raw: parse(raw, None))


async def status_of(port: HttpPort, body: bytes, size: int | None = None) -> bytes:
    """The status of a request.

    size  of the body, of which this is the beginning; None: this is all of it
    """
    host, _, number = port.address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(number))
    writer.write(REQUEST % (len(body) if size is None else size) + body)
    line = await reader.readline()
    writer.close()
    return line.split()[1]


@pytest.mark.parametrize("size", [10, 200_000])
def test_a_refused_request_leaves_nothing_to_the_garbage_collector(size: int) -> None:
    prompts: list[weakref.ref[Prompt]] = []

    async def main() -> None:
        inference = Inference()
        endpoint = Endpoint(inference, "Generate", inference.generate, lambda: Refusing(prompts), 1 << 20)  # type: ignore[arg-type]
        guard = Guard(endpoint, Identities(), [], checks_host=True, allowed_hosts=[], allowed_origins=[])
        port = HttpPort("127.0.0.1:0", guard, shares_port=False, tls=None, stall_s=10)
        running = asyncio.create_task(port.run())
        await status_of(port, b"x" * size)
        prompts.clear()
        gc.collect()
        gc.disable()
        try:
            for _ in range(20):
                assert await status_of(port, b"x" * size) == b"400"
                inference.is_full = True
                assert await status_of(port, b"") == b"429"
                inference.is_full = False
            deadline = time.monotonic() + 20
            while any(each() for each in prompts) and time.monotonic() < deadline:  # noqa: ASYNC110 (a call may end late)
                await asyncio.sleep(0.01)
            assert len(prompts) == 20
            assert [each for each in prompts if each() is not None] == []
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            assert not [each for each in gc.garbage if isinstance(each, InvalidArgument | ResourceExhausted)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        await port.stop(1)
        await running

    uvloop.run(main())


def test_a_field_is_renamed_unless_the_client_has_named_it() -> None:
    """A body's own `prompt` is no field of the protocol, whatever the protocol's is called here."""

    class Api(Refusing):
        def request(self, raw: bytes, limits: Any, call: Any) -> Any:
            return super().request(raw, limits, call) if raw else None

    async def main() -> None:
        async def generate(call: Any, parse: Any, route: str) -> None:
            parse(await call.read(), None)
            raise InvalidArgument("prompt", "is too long")

        endpoint = Endpoint(Inference(), "Generate", generate, lambda: Api([]), 1 << 20)  # type: ignore[arg-type]
        guard = Guard(endpoint, Identities(), [], checks_host=True, allowed_hosts=[], allowed_origins=[])
        port = HttpPort("127.0.0.1:0", guard, shares_port=False, tls=None, stall_s=10)
        running = asyncio.create_task(port.run())
        for body, name in ((b"x", "prompt"), (b"", "input")):
            host, _, number = port.address.partition(":")
            reader, writer = await asyncio.open_connection(host, int(number))
            writer.write(REQUEST % len(body) + body)
            assert (await reader.readuntil(b"}")).endswith(f'"param": "{name}", "code": null}}'.encode())
            writer.close()
        await port.stop(1)
        await running

    uvloop.run(main())


def test_a_client_that_sends_at_once_is_not_blamed_for_a_busy_server() -> None:
    async def stay_busy() -> None:
        while True:
            time.sleep(0.05)  # noqa: ASYNC251 (it holds up the loop on purpose)
            await asyncio.sleep(0)

    async def main() -> None:
        inference = Inference()
        inference._messages = Messages(1 << 20, 0.5)
        endpoint = Endpoint(inference, "Generate", inference.generate, lambda: Refusing([]), 1 << 20)  # type: ignore[arg-type]
        guard = Guard(endpoint, Identities(), [], checks_host=True, allowed_hosts=[], allowed_origins=[])
        late = HttpPort("127.0.0.1:0", guard, shares_port=False, tls=None, stall_s=10, are_streams_late=lambda: True)
        running, busy = asyncio.create_task(late.run()), asyncio.create_task(stay_busy())
        began = time.monotonic()
        assert await status_of(late, b"x" * 1_000_000) == b"400"
        assert time.monotonic() - began > 0.5, "it takes longer than a client has"
        assert await status_of(late, b"x" * 100_000, size=1_000_000) == b"408"
        busy.cancel()
        await late.stop(1)
        await running

    uvloop.run(main())

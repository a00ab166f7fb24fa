"""One interface to both clients, so that each behaviour is tested once and holds for both."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from pagoda import AsyncClient, Chunk, Client
from tests.clients.fake_server import FakeServer, running


class Blocking:
    def __init__(self, address: str) -> None:
        self.address = address

    def collect(self, method: str, *arguments: Any, connection: dict[str, Any] | None = None, **options: Any) -> list:
        """All that a streaming call yields."""
        with Client(self.address, **connection or {}) as client:
            return list(getattr(client, method)(*arguments, **options))

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        with Client(self.address) as client:
            return getattr(client, method)(*arguments, **options)

    def take_two_then_leave(self, method: str, *arguments: Any) -> list[Chunk]:
        """Leaves the loop after two chunks; the connection stays open for a while."""
        client, taken = Client(self.address), []
        for chunk in getattr(client, method)(*arguments):
            taken.append(chunk)
            if len(taken) == 2:
                break
        self.client = client
        return taken


class Asyncio(Blocking):
    def collect(self, method: str, *arguments: Any, connection: dict[str, Any] | None = None, **options: Any) -> list:
        async def collect() -> list:
            async with AsyncClient(self.address, **connection or {}) as client:
                return [chunk async for chunk in getattr(client, method)(*arguments, **options)]

        return asyncio.run(collect())

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        async def call() -> Any:
            async with AsyncClient(self.address) as client:
                return await getattr(client, method)(*arguments, **options)

        return asyncio.run(call())

    def take_two_then_leave(self, method: str, *arguments: Any) -> list[Chunk]:
        async def take() -> list[Chunk]:
            async with AsyncClient(self.address) as client:
                taken = []
                async for chunk in getattr(client, method)(*arguments):
                    taken.append(chunk)
                    if len(taken) == 2:
                        break
                await asyncio.sleep(0.2)  # not the closing channel but the left loop is to end the call
                return taken

        return asyncio.run(take())


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running(FakeServer()) as fake:
        yield fake


@pytest.fixture(params=[Blocking, Asyncio], ids=["blocking", "asyncio"])
def client(request: pytest.FixtureRequest, server: FakeServer) -> Blocking:
    return request.param(server.address)

"""The requests that are live in this router, by the id that their client knows."""

from __future__ import annotations

import asyncio

from pagoda_server.router.engines.engine_stream import EngineStream
from pagoda_server.router.errors import AlreadyExists, NotFound
from pagoda_server.router.request.beam_search import BeamSearchStream


class LiveRequest:
    def __init__(self) -> None:
        self.stream: EngineStream | BeamSearchStream | None = None  # none while the prompt is still being tokenized
        self.is_aborted = False


class LiveRequests:
    def __init__(self) -> None:
        self._requests: dict[str, LiveRequest] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request_id: str) -> LiveRequest:
        """Raises AlreadyExists."""
        if request_id in self._requests:
            raise AlreadyExists("request_id: a live request has this id")
        self._idle.clear()
        live = self._requests[request_id] = LiveRequest()
        return live

    def remove(self, request_id: str) -> None:
        del self._requests[request_id]
        if not self._requests:
            self._idle.set()

    def abort(self, request_id: str) -> None:
        """Its stream ends with CANCELLED. Raises NotFound."""
        if (live := self._requests.get(request_id)) is None:
            raise NotFound("request_id: no live request has this id")
        live.is_aborted = True
        if live.stream:
            live.stream.abort()

    def abort_all(self) -> None:
        for request_id in list(self._requests):
            self.abort(request_id)

    async def wait_idle(self) -> None:
        await self._idle.wait()

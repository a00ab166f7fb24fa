"""Several chat completions on one connection: browsers open at most six to a server.

    POST /together    {"requests": [a body of /v1/chat/completions with "stream": true, …]}

The answer is a stream of events. Each carries an event of one of the answers, or its refusal:

    data: {"index": 3, "status": 200, "body": {…}}
    data: {"index": 5, "status": 429, "retry_after": "2", "body": {"error": {…}}}

Each request goes through the application as if it had come alone, so that everything holds that holds for it there.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Scope

from ..errors import INTERNAL_MESSAGE, InvalidArgument
from .errors import BodyTooLarge

log = logging.getLogger("pagoda.router")

COMPLETIONS = "/v1/chat/completions"
MAX_REQUESTS = 16
MAX_BYTES = 1 << 16
_AHEAD = 64  # events that the client has not read
_KEPT = ("type", "asgi", "http_version", "scheme", "server", "client", "root_path")
_OF_THE_BODY = (b"content-length", b"content-type", b"transfer-encoding", b"content-encoding", b"expect")


def routes() -> list[BaseRoute]:
    return [Route("/together", _together, methods=["POST"])]


async def _together(request: Request) -> Response:
    bodies = _bodies(await _read(request))
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_events(request, bodies), headers=headers, media_type="text/event-stream")


async def _read(request: Request) -> bytes:
    """Raises BodyTooLarge."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BYTES:
            raise BodyTooLarge(MAX_BYTES)
    return bytes(body)


def _bodies(raw: bytes) -> list[dict[str, Any]]:
    """Raises InvalidArgument."""
    try:
        given = json.loads(raw)
    except (ValueError, RecursionError):
        raise InvalidArgument("body", "is not JSON") from None
    requests = given.get("requests") if isinstance(given, dict) else None
    if not isinstance(requests, list) or not 1 <= len(requests) <= MAX_REQUESTS:
        raise InvalidArgument("requests", f"must be a list of 1 to {MAX_REQUESTS} requests")
    for at, each in enumerate(requests):
        if not isinstance(each, dict) or each.get("stream") is not True:
            raise InvalidArgument(f"requests[{at}]", 'must be an object with "stream": true')
    return requests


async def _events(request: Request, bodies: list[dict[str, Any]]) -> AsyncIterator[str]:
    events: asyncio.Queue[str | None] = asyncio.Queue(_AHEAD)  # None: an answer has ended
    calls = [_Call(request, index, body, events) for index, body in enumerate(bodies)]
    tasks = [asyncio.create_task(call.run()) for call in calls]
    try:
        running = len(calls)
        while running:
            event = await events.get()
            if event is None:
                running -= 1
            else:
                yield f"data: {event}\n\n"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Call:
    """One of the requests, in the application that has taken all of them."""

    def __init__(self, request: Request, index: int, body: dict[str, Any], events: asyncio.Queue[str | None]) -> None:
        self._app = request.app
        self._index = index
        self._events = events
        self._body = json.dumps(body).encode()
        kept = [(name, value) for name, value in request.scope["headers"] if name not in _OF_THE_BODY]
        of_the_body = [(b"content-length", str(len(self._body)).encode()), (b"content-type", b"application/json")]
        self._scope: Scope = {
            **{key: request.scope[key] for key in _KEPT if key in request.scope},
            "method": "POST",
            "path": COMPLETIONS,
            "raw_path": COMPLETIONS.encode(),
            "query_string": b"",
            "headers": [*kept, *of_the_body],
        }
        self._is_read = False
        self._status = 0
        self._retry_after: str | None = None
        self._rest = b""

    async def run(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
        except Exception:
            log.exception("a call of /together failed")
            self._status = 500
            await self._tell(json.dumps({"error": {"message": INTERNAL_MESSAGE}}))
        finally:
            await self._events.put(None)

    async def _receive(self) -> Message:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await asyncio.get_running_loop().create_future()  # it goes when this task is cancelled
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = dict(message.get("headers", ()))
            self._retry_after = headers[b"retry-after"].decode() if b"retry-after" in headers else None
        elif message["type"] == "http.response.body":
            self._rest += message.get("body", b"")
            if self._status == 200:
                *events, self._rest = self._rest.split(b"\n\n")
                for event in events:
                    data = event.removeprefix(b"data: ")
                    if data.startswith(b"{"):
                        await self._tell(data.decode())
            elif not message.get("more_body", False):
                await self._tell(self._rest.decode() or "null")

    async def _tell(self, body: str) -> None:
        delay = "" if self._retry_after is None else f'"retry_after":{json.dumps(self._retry_after)},'
        await self._events.put(f'{{"index":{self._index},"status":{self._status},{delay}"body":{body}}}')

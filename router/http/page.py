"""The page at `/`: a chat, and the engine at work beside it. Its files are public; what they show needs a token."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from ..tenants.caller import Caller, Right, caller
from .live import LiveFeed

ASSETS = Path(__file__).parent / "assets"
_FILES = [path for path in sorted(ASSETS.iterdir()) if path.suffix != ".html"]
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # the next version of the server has other files under the same names
}


PUBLIC_PATHS = ("/", *(f"/assets/{path.name}" for path in _FILES))


def routes(feed: LiveFeed, about: dict[str, object]) -> list[BaseRoute]:
    """The page, its files, and the feed that it watches.

    about  what the page says of the server
    """

    async def live(request: Request) -> Response:
        return _Live(feed, caller(), about)

    return [
        Route("/", _File(ASSETS / "index.html").serve),
        Route("/live", live, methods=["GET"]),
        *(Route(f"/assets/{path.name}", _File(path).serve) for path in _FILES),
    ]


class _File:
    """A file of the page, held in memory."""

    def __init__(self, path: Path) -> None:
        self._content = path.read_bytes()
        self._type = f"{_TYPES[path.suffix]}; charset=utf-8"
        self._headers = _HEADERS | {"ETag": f'"{hashlib.sha256(self._content).hexdigest()[:16]}"'}

    async def serve(self, request: Request) -> Response:
        if request.headers.get("if-none-match") == self._headers["ETag"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, headers={**self._headers, "Content-Type": self._type})


class _Live(Response):
    """Server-sent events: `hello` once, then a message for each of the feed's."""

    def __init__(self, feed: LiveFeed, caller: Caller, about: dict[str, object]) -> None:
        self._feed = feed
        self._caller = caller
        self._hello = {**about, "tenant": caller.tenant, "observes": caller.may(Right.OBSERVE)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ResourceExhausted before anything is sent."""
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        with self._feed.place:
            response = StreamingResponse(self._events(), headers=headers, media_type="text/event-stream")
            await response(scope, receive, send)

    async def _events(self) -> AsyncIterator[str]:
        yield f"event: hello\ndata: {json.dumps(self._hello)}\n\n"
        async for message in self._feed.watch(self._caller):
            yield f"data: {message}\n\n"

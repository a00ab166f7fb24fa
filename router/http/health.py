"""Health for probes that know no gRPC."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

PUBLIC_PATHS = ("/healthz",)


def routes(is_serving: Callable[[], bool]) -> list[BaseRoute]:
    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok" if is_serving() else "not serving", 200 if is_serving() else 503)

    return [Route("/healthz", healthz)]

"""The page of metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..tenants.caller import Right, caller


def routes(page: Callable[[str], Awaitable[tuple[bytes, str]]]) -> list[BaseRoute]:
    """
    page  makes the page and its content type for an Accept header
    """

    async def metrics(request: Request) -> Response:
        caller().require(Right.OBSERVE)
        content, content_type = await page(request.headers.get("accept", ""))
        return Response(content, media_type=content_type)

    return [Route("/metrics", metrics)]

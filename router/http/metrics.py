"""The page of metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from pagoda_server.router.errors import PagodaError, Unauthenticated
from pagoda_server.router.tenants.caller import Right
from pagoda_server.router.tenants.identity import Identities


def routes(page: Callable[[str], Awaitable[tuple[bytes, str]]], identities: Identities) -> list[BaseRoute]:
    """
    page  makes the page and its content type for an Accept header; raises TimeoutError
    """

    async def metrics(request: Request) -> Response:
        try:
            identities.caller_of(request.headers.items()).require(Right.OBSERVE)
            content, content_type = await page(request.headers.get("accept", ""))
        except PagodaError as error:
            return PlainTextResponse(error.message, 401 if isinstance(error, Unauthenticated) else 403)
        except TimeoutError:  # figures without a router's part would look as if counts had started over
            return PlainTextResponse("a router does not answer", 503)
        return Response(content, media_type=content_type)

    return [Route("/metrics", metrics)]

"""The HTTP port as the settings ask for it: its routes, and the guard before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.routing import BaseRoute
from starlette.routing import Router as Routes

from ...channel.address import host_of, is_local
from ...settings import RouterSettings
from ...settings.router import names_in
from ..errors import PagodaError
from ..http import health, page
from ..http.guards import Guard
from ..http.server import HttpPort
from ..tenants.identity import Identities
from .public_port import tls_context


def http_port(
    listen: str,
    settings: RouterSettings,
    routes: Sequence[BaseRoute],
    identities: Identities,
    *,
    on_refusal: Callable[[str, PagodaError], None],
    shares_port: bool,
    are_streams_late: Callable[[], bool],
) -> HttpPort:
    """The port of these routes, which serves once it runs. Raises ConfigError.

    Where TLS or tokens guard an address that others can reach, they call the server by names that it does not know, and
    no other page can use it: it has no certificate of that name, or no token.

    on_refusal        called for each request whose caller is unknown or lacks a right
    shares_port       other routers serve on it too
    are_streams_late  see HttpPort
    """
    is_guarded = settings.tls_cert is not None or identities.tokens is not None
    guard = Guard(
        Routes(routes, redirect_slashes=False),
        identities,
        public_paths=(*health.PUBLIC_PATHS, *page.PUBLIC_PATHS),
        checks_host=is_local(listen) or not is_guarded or settings.http_allowed_hosts is not None,
        allowed_hosts=[host_of(listen), *names_in(settings.http_allowed_hosts)],
        allowed_origins=names_in(settings.http_allowed_origins),
        on_refusal=on_refusal,
    )
    tls = tls_context(settings.tls_cert, settings.tls_key) if settings.tls_cert and settings.tls_key else None
    return HttpPort(
        listen,
        guard,
        shares_port=shares_port,
        tls=tls,
        stall_s=settings.stall_timeout_s,
        are_streams_late=are_streams_late,
    )

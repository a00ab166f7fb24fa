"""What every request of HTTP passes before its handler: its host, its origin, its caller.

A browser sends requests to this port for any page that it shows, and an attacker's host name may resolve to a loopback
address (DNS rebinding). A page of another host can therefore neither post here, because its requests name their origin,
nor read, because they name its host.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...channel.address import host_of
from ..errors import PagodaError
from ..tenants.caller import set_caller
from ..tenants.identity import Identities
from .errors import HttpError, refusal, send_refusal

ANY_ORIGIN = "*"
_EXPOSED = b"x-request-id, retry-after, retry-after-ms"  # headers that a page of another origin may read
_PREFLIGHT_S = b"600"


class Guard:
    """An application that guards another one.

    identities       whose the requests are
    public_paths     paths whose answers are anyone's, because they reveal nothing
    checks_host      whether a foreign host is refused
    allowed_hosts    names that requests may call this server by, besides its address, localhost and IP addresses
    allowed_origins  origins of other hosts' pages that may send requests
    on_refusal       called for each request whose caller is unknown or lacks a right
    """

    def __init__(
        self,
        app: ASGIApp,
        identities: Identities,
        public_paths: Collection[str],
        checks_host: bool,
        allowed_hosts: Collection[str],
        allowed_origins: Collection[str],
        on_refusal: Callable[[str, PagodaError], None] = lambda route, error: None,
    ) -> None:
        self._app = app
        self._on_refusal = on_refusal
        self._identities = identities
        self._public_paths = frozenset(public_paths)
        self._checks_host = checks_host
        self._allowed_hosts = frozenset(host.lower() for host in allowed_hosts) | {"localhost"}
        self._allowed_origins = frozenset(allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers: list[tuple[bytes, bytes]] = scope["headers"]
            host, origin = _header(headers, b"host"), _header(headers, b"origin")
            if self._checks_host and not self._is_own(host):
                raise HttpError(403, "host: is not this server's; --http-allowed-hosts can add it", "host_not_allowed")
            if origin and origin.partition("://")[2] != host:
                if not self._allowed_origins & {origin, ANY_ORIGIN}:
                    why = "origin: is that of another host's page; --http-allowed-origins can add it"
                    raise HttpError(403, why, "origin_not_allowed")
                send = _to_origin(send, origin)
                if scope["method"] == "OPTIONS" and _header(headers, b"access-control-request-method"):
                    await _answer_preflight(send)
                    return
            if scope["path"] not in self._public_paths:
                metadata = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
                try:
                    set_caller(self._identities.caller_of(metadata))
                except PagodaError as error:
                    self._on_refusal(f"{scope['method']} {scope['path']}", error)
                    raise
            await self._app({**scope, "app": self}, receive, send)
        except HTTPException as error:
            where = f"{scope['method']} {ascii(scope['path'])[1:-1]}"
            renamed = HttpError(error.status_code, f"{where}: {error.detail}", "unknown_url")
            await _refuse(
                renamed,
                send,
                *((name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()),
            )
        except Exception as error:
            await _refuse(error, send)

    def _is_own(self, host: str) -> bool:
        """Whether a host is this server's: an IP address is, because no other name leads a browser to it."""
        name = host_of(host) if host.rpartition(":")[2].isdecimal() else host.strip("[]")
        if name.lower() in self._allowed_hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _header(headers: list[tuple[bytes, bytes]], name: bytes) -> str:
    """A header's value, or "". Raises HttpError if it is given more than once."""
    values = [value for key, value in headers if key == name]
    if len(values) > 1:
        raise HttpError(400, f"{name.decode()}: is given {len(values)} times", "repeated_header")
    return values[0].decode("latin-1") if values else ""


def _to_origin(send: Send, origin: str) -> Send:
    """Tell the browser that a page of this origin may read the answer."""

    async def send_to_origin(message: Message) -> None:
        if message["type"] == "http.response.start":
            allowed = [
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"access-control-expose-headers", _EXPOSED),
                (b"vary", b"origin"),
            ]
            message = {**message, "headers": [*message.get("headers", ()), *allowed]}
        await send(message)

    return send_to_origin


async def _answer_preflight(send: Send) -> None:
    headers = [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-allow-headers", b"authorization, *"),  # * stands for all others
        (b"access-control-max-age", _PREFLIGHT_S),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body"})


async def _refuse(error: Exception, send: Send, *headers: tuple[bytes, bytes]) -> None:
    try:
        await send_refusal(refusal(error), send, *headers)
    except RuntimeError:  # the answer has begun: only the end of the connection can show that it failed
        raise error from None

"""Whose requests of HTTP reach a handler, and what the others are told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, Router

from pagoda_server.router.errors import EnginesLost, Internal, InvalidArgument, QuotaExceeded, Unavailable
from pagoda_server.router.http.errors import refusal
from pagoda_server.router.http.guards import Guard
from pagoda_server.router.tenants.caller import ANYONE, Caller, caller
from pagoda_server.router.tenants.identity import Identities, digest

TOKENS = Identities({digest("t"): Caller("a", frozenset(), is_proven=True), digest("all"): ANYONE})


async def tenant(request: Request) -> Response:
    return PlainTextResponse(caller().tenant)


async def health(request: Request) -> Response:
    return PlainTextResponse("ok")


async def broken(request: Request) -> Response:
    raise ValueError("secret")


ROUTES = Router([Route("/", tenant), Route("/healthz", health), Route("/broken", broken)])


class Answer:
    def __init__(self, events: list[dict[str, Any]]) -> None:
        start, *bodies = events
        self.status: int = start["status"]
        self.headers = {name.decode(): value.decode() for name, value in start["headers"]}
        self.body = b"".join(body.get("body", b"") for body in bodies)

    @property
    def error(self) -> Any:
        return json.loads(self.body)["error"]


async def ask(
    path: str = "/", method: str = "GET", *, identities: Identities | None = None, checks_host: bool = True,
    hosts: str = "", origins: str = "", host: str = "localhost:8000", repeated: tuple[str, str] | None = None,
    **headers: str,
) -> Answer:  # fmt: skip
    guard = Guard(
        ROUTES, identities or Identities(), ["/healthz"], checks_host, ["192.168.0.1", *hosts.split()], origins.split()
    )
    given = [("host", host), *((name.replace("_", "-"), value) for name, value in headers.items())]
    scope = {
        "type": "http", "method": method, "path": path, "root_path": "", "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in [*given, *([repeated] if repeated else [])]],
    }  # fmt: skip
    sent: list[dict[str, Any]] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(event: Any) -> None:
        sent.append(event)

    await guard(scope, receive, send)
    return Answer(sent)


@pytest.mark.parametrize(
    ("host", "hosts", "status"),
    [
        ("localhost:8000", "", 200),
        ("LOCALHOST", "", 200),
        ("127.0.0.1:9999", "", 200),
        ("[::1]:8000", "", 200),
        ("[::1]", "", 200),
        ("10.1.2.3", "", 200),
        ("192.168.0.1:80", "", 200),
        ("chat.example.org:443", "chat.example.org", 200),
        ("CHAT.example.org", "chat.Example.org", 200),
        ("evil.example.org:8000", "chat.example.org", 403),
        ("localhost.evil.example.org", "", 403),
        ("127.0.0.1.evil.example.org", "", 403),
        ("127.0.0.1:x", "", 403),
        ("", "", 403),
    ],
)
async def test_a_host_that_is_not_this_server_is_refused(host: str, hosts: str, status: int) -> None:
    answer = await ask(host=host, hosts=hosts)
    assert answer.status == status
    if status == 403:
        assert answer.error["code"] == "host_not_allowed"
        assert (await ask("/healthz", host=host, hosts=hosts)).status == 403
        assert (await ask(host=host, hosts=hosts, checks_host=False)).status == 200


@pytest.mark.parametrize(
    ("origin", "origins", "status"),
    [
        ("http://localhost:8000", "", 200),
        ("https://localhost:8000", "", 200),  # a proxy in front of this server may speak TLS
        ("http://localhost:8001", "", 403),
        ("http://localhost", "", 403),
        ("null", "", 403),
        ("null", "*", 200),
        ("https://chat.example.org", "https://other.example.org https://chat.example.org", 200),
        ("http://chat.example.org", "https://chat.example.org", 403),
        ("https://chat.example.org.evil.org", "https://chat.example.org", 403),
    ],
)
async def test_a_page_of_another_origin_is_refused(origin: str, origins: str, status: int) -> None:
    answer = await ask(origin=origin, origins=origins)
    assert answer.status == status
    is_other = bool(origins) and status == 200
    assert answer.headers.get("access-control-allow-origin") == (origin if is_other else None)
    if status == 403:
        assert answer.error["code"] == "origin_not_allowed"


async def test_a_browser_is_told_what_an_allowed_page_may_send() -> None:
    origin = "https://chat.example.org"
    asked = {"method": "OPTIONS", "origin": origin, "access_control_request_method": "POST", "identities": TOKENS}
    answer = await ask(origins=origin, **asked)  # type: ignore[arg-type]
    assert (answer.status, answer.body) == (204, b"")
    assert answer.headers["access-control-allow-origin"] == origin
    assert answer.headers["access-control-allow-headers"] == "authorization, *"
    assert answer.headers["access-control-allow-methods"] == "GET, POST"
    assert answer.headers["vary"] == "origin"
    assert (await ask(**asked)).status == 403  # type: ignore[arg-type]


async def test_an_allowed_page_may_read_errors_too() -> None:
    answer = await ask("/nothing", origin="https://a.org", origins="https://a.org")
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (404, "https://a.org")


@pytest.mark.parametrize(
    ("headers", "status", "body"),
    [
        ({"authorization": "Bearer t"}, 200, b"a"),
        ({"authorization": "Bearer all", "x_pagoda_tenant": "b"}, 200, b"b"),
        ({"authorization": "Bearer t", "x_pagoda_tenant": "b"}, 403, None),
        ({"authorization": "Bearer x"}, 401, None),
        ({"authorization": "t"}, 401, None),
        ({}, 401, None),
    ],
)
async def test_a_token_says_whose_a_request_is(headers: dict[str, str], status: int, body: bytes | None) -> None:
    answer = await ask(identities=TOKENS, **headers)  # type: ignore[arg-type]
    assert answer.status == status
    if body is not None:
        assert answer.body == body
    if status == 401:
        assert answer.headers["www-authenticate"] == "Bearer"
        assert (await ask("/nothing", identities=TOKENS, **headers)).status == 401  # type: ignore[arg-type]


async def test_health_needs_no_token() -> None:
    assert (await ask("/healthz", identities=TOKENS)).body == b"ok"


@pytest.mark.parametrize("name", ["host", "origin"])
async def test_a_header_that_guards_is_given_once(name: str) -> None:
    answer = await ask(origin="http://localhost:8000", repeated=(name, "localhost:8000"))
    assert (answer.status, answer.error["code"]) == (400, "repeated_header")


async def test_errors_have_the_form_of_the_api() -> None:
    answer = await ask("/nothing\n")
    assert answer.status == 404
    assert answer.error == {
        "message": "GET /nothing\\n: Not Found", "type": "invalid_request_error", "param": None, "code": "unknown_url",
    }  # fmt: skip
    answer = await ask(method="DELETE")
    assert (answer.status, set(answer.headers["allow"].split(", "))) == (405, {"GET", "HEAD"})


async def test_a_fault_is_told_to_the_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    answer = await ask("/broken")
    assert answer.status == 500
    assert b"secret" not in answer.body
    assert "ValueError: secret" in caplog.text


@pytest.mark.parametrize(
    ("error", "status", "headers", "told"),
    [
        (InvalidArgument("n", "is 0"), 400, {}, {"param": "n", "type": "invalid_request_error"}),
        (Unavailable("draining"), 503, {"retry-after": "1"}, {"code": "unavailable"}),
        (Unavailable("x", retry_after_s=3.2), 503, {"retry-after": "4", "retry-after-ms": "3200"}, {}),
        (QuotaExceeded("requests", 5, "x", 0.25), 429, {"retry-after": "1"}, {"code": "quota_exceeded"}),
        (QuotaExceeded("requests", 5, "x"), 429, {}, {"code": "quota_exceeded"}),
        (EnginesLost(2), 422, {}, {"code": "engines_lost"}),
        (Internal("story"), 500, {}, {"message": "internal error; the server's log has the details"}),
    ],
)
def test_what_a_status_becomes(error: Exception, status: int, headers: dict[str, str], told: dict[str, str]) -> None:
    refused = refusal(error)
    given = {name.decode(): value.decode() for name, value in refused.headers}
    assert refused.status == status
    assert ("retry-after" in given) == ("retry-after" in headers)
    assert headers.items() <= given.items()
    assert told.items() <= json.loads(refused.body)["error"].items()

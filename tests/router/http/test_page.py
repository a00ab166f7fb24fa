"""The page over a real port: its files, what they may load, what it shows to whom, and answers on one connection."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import re
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pagoda import Client
from pagoda.v1 import control_pb2
from pagoda_server.router.http.page import ASSETS
from tests.servers import ROOT, Server, running_server

TENANTS = {"acme": [], "brown": [], "small": [], "operators": ["observe"]}
FILES = sorted(path.name for path in ASSETS.iterdir())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    path.write_text(
        "[tenant.small]\nmax_requests = 1\n"
        + "".join(
            f'[[token]]\nsha256 = "{hashlib.sha256(f"token of {name}".encode()).hexdigest()}"\n'
            f'tenant = "{name}"\nrights = {rights}\n'
            for name, rights in TENANTS.items()
        )
    )
    arguments = ("--model", "synthetic", "--step-ms", "2", "--tenants-file", str(path))
    with running_server(*arguments, "--http", "127.0.0.1:0") as server:
        yield server


@contextlib.contextmanager
def requested(
    server: Server, path: str, tenant: str | None = None, body: object = None, **headers: str
) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(server.http.removeprefix("http://"), timeout=60)
    if tenant is not None:
        headers["Authorization"] = f"Bearer token of {tenant}"
    method = "GET" if body is None else "POST"
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        yield connection.getresponse()
    finally:
        connection.close()


def events(response: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    """Names and content of server-sent events."""
    name = "message"
    for line in response:
        if line.startswith(b"event: "):
            name = line[7:].decode().strip()
        elif line.startswith(b"data: "):
            yield name, json.loads(line[6:])
            name = "message"


def ticks(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for name, content in events(response):
        if name == "message":
            yield from content


def chat(text: str, max_tokens: int, **more: object) -> dict[str, object]:
    body = {"model": "synthetic", "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
    return {**body, "stream": True, "ignore_eos": True, "temperature": 0, **more}


@contextlib.contextmanager
def asking(server: Server, tenant: str, max_tokens: int = 20_000) -> Iterator[None]:
    """A stream of a tenant's that has begun, and is cancelled when the block ends."""
    with requested(server, "/v1/chat/completions", tenant, chat(f"of {tenant}", max_tokens)) as response:
        assert response.status == 200
        response.readline()
        yield


def wait_for(what: str, is_so: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


def load_of(server: Server) -> control_pb2.Load:
    with Client(server.address, token="token of operators") as client:
        return client.load()


# -- the files ---------------------------------------------------------------------------------------------------------


def test_the_page_may_load_only_what_this_server_has(server: Server) -> None:
    with requested(server, "/") as response:
        assert response.status == 200
        policy = response.headers["Content-Security-Policy"]
        html = response.read().decode()
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert {rules[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", html)
    named = set(re.findall(r'(?:src|href)="/([^"]+)"', html))
    assert named <= {f"assets/{name}" for name in FILES}


@pytest.mark.parametrize("name", [name for name in FILES if name != "index.html"])
def test_each_file_is_public_and_has_its_type(server: Server, name: str) -> None:
    with requested(server, f"/assets/{name}") as response:
        assert response.status == 200
        kind = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}[name.rpartition(".")[2]]
        assert response.headers["Content-Type"] == f"{kind}; charset=utf-8"
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        tag = response.headers["ETag"]
        assert response.read() == (ASSETS / name).read_bytes()
    with requested(server, f"/assets/{name}", **{"If-None-Match": tag}) as response:
        assert response.status == 304


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_another_server(name: str) -> None:
    text = (ASSETS / name).read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|[\"'(]//|@import|url\(", text)


def test_a_file_that_is_not_there_leaves_the_folder_unread(server: Server) -> None:
    for path in ("/assets/../page.py", "/assets/%2e%2e/page.py", "/assets/index.html", "/assets/"):
        with requested(server, path, "operators") as response:
            assert response.status == 404


def test_the_wheel_takes_every_file_along() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packed = {path for pattern in patterns["pagoda_server.router.http"] for path in ASSETS.parent.glob(pattern)}
    assert packed == set(ASSETS.iterdir())


# -- the feed ----------------------------------------------------------------------------------------------------------


def test_the_feed_needs_the_token_that_calls_need(server: Server) -> None:
    for tenant in (None, "a stranger"):
        with requested(server, "/live", tenant) as response:
            assert response.status == 401
            assert "token" in json.load(response)["error"]["message"]


def test_the_feed_shows_sequences_steps_blocks_and_times(server: Server) -> None:
    with requested(server, "/live", "operators") as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        name, hello = next(events(response))
        assert (name, hello["models"], hello["tenant"], hello["observes"]) == (
            "hello",
            ["synthetic"],
            "operators",
            True,
        )
        rows: dict[int, list[Any]] = {}
        rates = []
        with asking(server, "acme", 400), asking(server, "brown"):
            for tick in ticks(response):
                [engine] = tick["engines"]
                for row in engine.get("rows", ()):
                    rows.setdefault(row[0], ["", ""])
                    rows[row[0]] = [rows[row[0]][0] + row[-1], *row[1:]]
                rates += tick["rates"]
                if any(row[1] == "finished" for row in rows.values()):
                    break
            total, free, evictable = engine["blocks"]
            assert total > free + evictable
            assert tick["requests"] >= 1
            assert {"acme", "brown"} <= {name for name, *_ in tick["tenants"]}
    [finished] = [row for row in rows.values() if row[1] == "finished"]
    assert finished[0].strip(".") == "p" + 399 * "d"
    assert finished[3] - finished[2] == 400
    assert finished[5] == "acme"
    assert sum(tokens for _, tokens, *_ in rates) > 400
    assert sum(prompt for _, _, prompt, *_ in rates) == sum(row[2] for row in rows.values())
    assert sum(len(ttft) for *_, ttft in rates) == 2
    gaps = sorted(ms for *_, itl, _ in rates for ms, times in itl for _ in range(times))
    assert 2 <= gaps[len(gaps) // 2] < 50


def test_a_tenant_sees_its_own_sequences_and_nothing_of_others_sizes(server: Server) -> None:
    with asking(server, "brown"), asking(server, "acme"), requested(server, "/live", "acme") as response:
        told = [next(ticks(response)) for _ in range(3)]
    assert "brown" not in json.dumps(told)
    rows = [row for tick in told for engine in tick["engines"] for row in engine.get("rows", ())]
    assert {row[5] for row in rows} == {"acme"}
    assert [[name for name, *_ in tick["tenants"]] for tick in told] == [["acme"]] * 3
    for tick in told:
        assert tick["num_tenants"] >= 2
        [engine] = tick["engines"]
        assert engine["running"] == 2
        assert "blocks" not in engine
        assert "preemptions" not in engine


def test_a_watcher_gets_about_four_messages_a_second(server: Server) -> None:
    started = time.monotonic()
    with asking(server, "acme"), requested(server, "/live", "operators") as response:
        messages = (content for name, content in events(response) if name == "message")
        for _ in range(5):
            next(messages)
        assert 0.8 < time.monotonic() - started < 60


@pytest.mark.slow
def test_each_of_several_routers_shows_the_requests_of_all() -> None:
    arguments = ("--model", "synthetic", "--step-ms", "5", "--workers", "2", "--http", "127.0.0.1:0")
    with running_server(*arguments) as server, contextlib.ExitStack() as stack:
        streams = 0
        deadline = time.monotonic() + 60
        while streams < 6:
            assert time.monotonic() < deadline
            response = stack.enter_context(requested(server, "/v1/chat/completions", None, chat("hello", 20_000)))
            streams += response.status == 200  # a router that does not have the engine yet refuses
        for _ in range(6):  # the kernel spreads connections over the routers
            with requested(server, "/live") as response:
                for tick in ticks(response):
                    rows = [row for engine in tick.get("engines", ()) for row in engine.get("rows", ())]
                    if tick.get("requests") == len(rows) == 6:
                        break


def read_all(response: http.client.HTTPResponse) -> None:
    with contextlib.suppress(http.client.HTTPException, OSError):
        response.read()


@pytest.mark.thorough
def test_a_watching_page_does_not_hold_up_the_end() -> None:
    arguments = ("--model", "synthetic", "--http", "127.0.0.1:0", "--grace-s", "300")
    with running_server(*arguments) as server, requested(server, "/live") as page:
        next(events(page))
        reader = threading.Thread(target=read_all, args=[page], daemon=True)
        reader.start()
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < 60
        reader.join(60)
        assert not reader.is_alive()

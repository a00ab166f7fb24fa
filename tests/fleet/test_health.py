"""A router's health, asked by its host: silence is told from every kind of answer, with TLS and without."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagoda_server.fleet import health
from pagoda_server.fleet.health import Health


class Router(health_pb2_grpc.HealthServicer):
    """Answers that it does not serve, or, while `goes_on` is not set, nothing."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.fails = False
        self.num_asked = 0

    def Check(self, request: Any, context: grpc.ServicerContext) -> health_pb2.HealthCheckResponse:
        self.num_asked += 1
        self.goes_on.wait(30)
        if self.fails:
            context.abort(grpc.StatusCode.INTERNAL, "it fails")
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)


@contextlib.contextmanager
def listening(router: Router, names: tuple[str, ...] = ()) -> Iterator[str]:
    """The address of a router, which has a certificate with these names if there are any."""
    server = grpc.server(ThreadPoolExecutor(8))
    health_pb2_grpc.add_HealthServicer_to_server(router, server)
    if names:
        made = trustme.CA().issue_cert(*names)
        pair = (made.private_key_pem.bytes(), b"".join(each.bytes() for each in made.cert_chain_pems))
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        router.goes_on.set()
        server.stop(None).wait()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "ANSWER_S", 1.0)
    monkeypatch.setattr(health, "PAUSE_S", 0.05)


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("names", [(), ("router.example.org",), ("*.example.org",), ("127.0.0.1",)])
def test_a_router_that_does_not_answer_is_silent_until_it_does(names: tuple[str, ...]) -> None:
    router = Router()
    with listening(router, names) as address, contextlib.closing(Health(address, has_tls=bool(names))) as asked:
        until(lambda: router.num_asked > 2)
        assert not asked.silent_s, "that it has no engine is an answer"
        router.fails = True
        asked_before = router.num_asked
        until(lambda: router.num_asked > asked_before + 2)
        assert not asked.silent_s, "so is an error"
        router.goes_on.clear()
        until(lambda: asked.silent_s > 1.5)
        router.goes_on.set()
        until(lambda: not asked.silent_s)


def test_a_process_that_has_ended_is_not_silent() -> None:
    router = Router()
    with listening(router) as address, contextlib.closing(Health(address, has_tls=False)) as asked:
        until(lambda: router.num_asked > 0)
    time.sleep(1.5)
    assert not asked.silent_s, "its host knows the exit code, and starts another one"

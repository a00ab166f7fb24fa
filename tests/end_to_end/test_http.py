"""The OpenAI API over a real socket: the same requests, limits and ends as over gRPC."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import psutil
import pytest
import trustme

from pagoda.v1 import admin_pb2, control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from pagoda.v1.admin_pb2_grpc import AdminStub
from pagoda_server.engine.runners.synthetic import expected_tokens
from tests.end_to_end.asking import ask, engine_load, request
from tests.servers import Server, running_server

STEP_S = 0.01
MAX_REQUESTS = 4
SYNTHETIC = ("--model", "synthetic", "--step-ms", str(1e3 * STEP_S), "--http", "127.0.0.1:0")
LONG = {"prompt": "long", "max_tokens": 20_000, "ignore_eos": True, "stream": True}
COMPLETIONS, CHATS, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(*SYNTHETIC, "--max-requests", str(MAX_REQUESTS), "--stall-timeout-s", "4") as server:
        yield server


@pytest.fixture
def control(server: Server) -> Iterator[control_pb2_grpc.ControlStub]:
    with grpc.insecure_channel(server.address) as channel:
        yield control_pb2_grpc.ControlStub(channel)


class Posted:
    """A request that was sent, and its answer."""

    def __init__(
        self, server: Server, path: str, body: Any = None, method: str = "", context: Any = None, **headers: str
    ) -> None:
        address = urlsplit(server.http)
        assert address.hostname
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        extra = {"context": context} if context else {}
        self.connection = kinds[address.scheme](address.hostname, address.port, timeout=60, **extra)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        self.connection.request(method or ("GET" if body is None else "POST"), path, data, named)
        self.response = self.connection.getresponse()
        self.status = self.response.status

    def json(self) -> Any:
        return json.loads(self.response.read())

    def error(self) -> Any:
        return self.json()["error"]

    def events(self) -> Iterator[str]:
        """What follows `data: ` in each event."""
        for line in self.response:
            if line != b"\n":
                yield line.decode().removeprefix("data: ").removesuffix("\n")

    def text(self) -> str:
        """The text of the rest of a stream, which must end well."""
        *events, last = self.events()
        assert last == "[DONE]"
        return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


def wait_idle(control: control_pb2_grpc.ControlStub) -> control_pb2.EngineLoad:
    deadline = time.monotonic() + 60
    while True:
        load = control.GetLoad(control_pb2.GetLoadRequest())
        (engine,) = load.engines
        if not (load.requests or engine.blocks_referenced or engine.running or engine.waiting):
            return engine
        assert time.monotonic() < deadline, f"{engine.blocks_referenced} blocks are still held"
        time.sleep(0.005)


def test_answers_are_those_of_grpc(server: Server) -> None:
    body = {"prompt": "the same", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    with grpc.insecure_channel(server.address) as channel:
        expected = ask(inference_pb2_grpc.InferenceStub(channel), request("the same", max_tokens=40))
    assert expected.ids() == expected_tokens(b"the same", 40, 258)
    whole = Posted(server, COMPLETIONS, body).json()
    assert whole["choices"][0]["text"] == expected.text()
    assert whole["usage"]["completion_tokens"] == 40
    assert Posted(server, COMPLETIONS, body | {"stream": True}).text() == expected.text()


def test_an_echo_without_an_answer_reports_no_completion_token(server: Server) -> None:
    body = {"prompt": "the same", "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = Posted(server, COMPLETIONS, body).json()
    assert answer["choices"][0]["text"] == "the same"
    usage = answer["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (0, usage["prompt_tokens"])
    *_, last, done = Posted(
        server, COMPLETIONS, body | {"stream": True, "stream_options": {"include_usage": True}}
    ).events()
    assert (done, json.loads(last)["usage"]["completion_tokens"]) == ("[DONE]", 0)


def test_timings_are_there_for_who_asks(server: Server) -> None:
    body = {"prompt": "the same", "max_tokens": 20}
    timings = Posted(server, COMPLETIONS, body | {"timings": True}).json()["timings"]
    assert (timings["prompt_n"] + timings["cache_n"], timings["predicted_n"]) == (len("the same"), 20)
    assert timings["total_ms"] >= timings["time_to_first_token_ms"] > 0
    *_, last, done = Posted(server, COMPLETIONS, body | {"timings": True, "stream": True}).events()
    assert (done, json.loads(last)["timings"]["predicted_n"]) == ("[DONE]", 20)
    assert "timings" not in Posted(server, COMPLETIONS, body).json()
    refused = Posted(server, COMPLETIONS, {"prompt": ["a", "b"], "timings": True})
    assert (refused.status, refused.error()["param"]) == (400, "timings")


def test_embeddings_are_those_of_grpc(server: Server, control: control_pb2_grpc.ControlStub) -> None:
    texts = ["one", "another one " * 50]
    inputs = [inference_pb2.EmbedInput(text=text) for text in texts]
    with grpc.insecure_channel(server.address) as channel:
        inference = inference_pb2_grpc.InferenceStub(channel)
        expected = inference.Embed(inference_pb2.EmbedRequest(inputs=inputs, dimensions=3))
    answer = Posted(server, EMBEDDINGS, {"model": "synthetic", "input": texts, "dimensions": 3}).json()
    assert [each["embedding"] for each in answer["data"]] == [list(each.values) for each in expected.embeddings]
    assert answer["usage"]["prompt_tokens"] == expected.usage.prompt_tokens == sum(map(len, texts))
    refused = Posted(server, EMBEDDINGS, {"input": ["fits", "x" * 40_000]})
    assert (refused.status, refused.error()["param"]) == (400, "input[1]")
    refused = Posted(server, EMBEDDINGS, {"model": "another", "input": "x"})
    assert (refused.status, refused.error()["code"]) == (404, "model_not_found")
    wait_idle(control)


def test_a_chat_of_several_answers_is_the_same_again(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "seed": -5, "n": 2}
    first, again = (Posted(server, CHATS, body).json()["choices"] for _ in range(2))
    assert first == again


def test_an_id_is_taken_over_and_told(server: Server) -> None:
    answer = Posted(server, COMPLETIONS, {"prompt": "x"}, x_request_id="my-id")
    assert (answer.response.headers["x-request-id"], answer.json()["id"]) == ("my-id", "cmpl-my-id")
    refused = Posted(server, COMPLETIONS, {"prompt": "x"}, x_request_id="i" * 129)
    assert (refused.status, refused.error()["param"]) == (400, "x-request-id")


def test_an_id_cannot_be_live_twice(server: Server, control: control_pb2_grpc.ControlStub) -> None:
    with contextlib.closing(Posted(server, COMPLETIONS, LONG, x_request_id="twice").connection):
        refused = Posted(server, COMPLETIONS, LONG, x_request_id="twice")
        assert (refused.status, refused.error()["code"]) == (409, "already_exists")
    wait_idle(control)


def test_models_are_listed(server: Server) -> None:
    (model,) = Posted(server, "/v1/models").json()["data"]
    assert (model["id"], model["object"]) == ("synthetic", "model")
    assert Posted(server, "/v1/models/synthetic").json() == model
    refused = Posted(server, "/v1/models/org/other")
    assert (refused.status, refused.error()["code"]) == (404, "model_not_found")


def sent(server: Server, path: str, body: dict[str, Any]) -> socket.socket:
    """A connection over which a request has been sent."""
    address, data = urlsplit(server.http), json.dumps(body).encode()
    connection = socket.create_connection((address.hostname, address.port))  # type: ignore[arg-type]
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(data))
    connection.sendall(head + data)
    return connection


def test_a_closed_connection_frees_its_blocks_within_two_steps(
    server: Server, control: control_pb2_grpc.ControlStub
) -> None:
    for body in (LONG, LONG | {"stream": False}):
        began = wait_idle(control).steps
        with sent(server, COMPLETIONS, body):
            while engine_load(control).steps < began + 5:
                time.sleep(STEP_S / 4)
            server.engine().suspend()
            time.sleep(0.1)  # what it has told arrives
            before = engine_load(control).steps
        while control.GetLoad(control_pb2.GetLoadRequest()).requests:
            time.sleep(STEP_S)
        server.engine().resume()
        assert wait_idle(control).steps - before <= 2 + 1  # one may have ended since it was asked


def test_a_closed_connection_ends_embeddings(server: Server, control: control_pb2_grpc.ControlStub) -> None:
    wait_idle(control)
    inputs = [f"{at:09}" * 3000 for at in range(50)]
    with sent(server, EMBEDDINGS, {"input": inputs}) as connection:
        connection.setblocking(False)
        while not engine_load(control).running:
            with pytest.raises(BlockingIOError):  # it is not answered
                connection.recv(1)
            time.sleep(STEP_S)
    load = wait_idle(control)
    assert load.prompt_tokens < len("".join(inputs)) / 2, "the rest is not computed"
    assert load.blocks_free + load.blocks_evictable == load.blocks_total
    assert "Traceback" not in server.log.read_text()


@pytest.mark.thorough
def test_a_client_that_stops_reading_loses_its_place(server: Server, control: control_pb2_grpc.ControlStub) -> None:
    address = urlsplit(server.http)
    body = json.dumps(LONG | {"n": 32, "logprobs": 20}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((address.hostname, address.port))
        connection.sendall(
            b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (COMPLETIONS.encode(), len(body))
        )
        connection.sendall(body)
        while not engine_load(control).running:
            time.sleep(STEP_S)
        wait_idle(control)


def test_a_full_server_tells_when_to_come_back_before_it_has_read_the_body(
    server: Server, control: control_pb2_grpc.ControlStub
) -> None:
    address = urlsplit(server.http)
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_REQUESTS):
            stack.callback(Posted(server, COMPLETIONS, LONG).connection.close)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        connection.putrequest("POST", COMPLETIONS)
        connection.putheader("content-length", "1000")
        connection.endheaders()
        refused = connection.getresponse()
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert int(refused.headers["retry-after-ms"]) > 0
        assert json.loads(refused.read())["error"]["code"] == "queue_full"
    wait_idle(control)


def test_a_stream_that_is_aborted_ends_with_an_error_event(server: Server) -> None:
    posted = Posted(server, COMPLETIONS, LONG, x_request_id="aborted")
    events = posted.events()
    next(events)
    with grpc.insecure_channel(server.address) as channel:
        AdminStub(channel).Abort(admin_pb2.AbortRequest(request_id="aborted"))
    last = list(events)[-1]
    assert json.loads(last)["error"]["code"] == "aborted"


# -- bodies -----------------------------------------------------------------------------------------------------------


def largest(control: control_pb2_grpc.ControlStub) -> int:
    return control.GetServerInfo(control_pb2.GetServerInfoRequest()).limits.max_message_bytes


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_may_be_as_large_as_a_message(
    server: Server, control: control_pb2_grpc.ControlStub, is_chunked: bool
) -> None:
    most = largest(control)
    address = urlsplit(server.http)
    for size, status in ((most, 400), (most + 1, 413), (6 * most, 413)):  # the last one is read to its end
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        body = b'{"prompt": "x", "top_k": "' + b"y" * (size - 28) + b'"}'
        assert len(body) == size
        parts = iter([body[at : at + 10_000] for at in range(0, size, 10_000)]) if is_chunked else body
        connection.request("POST", COMPLETIONS, parts, encode_chunked=is_chunked, headers=(
            {"transfer-encoding": "chunked"} if is_chunked else {}
        ))  # fmt: skip
        response = connection.getresponse()
        error = json.loads(response.read())["error"]
        assert (response.status, error["param"]) == (status, "top_k" if status == 400 else None)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("path", [COMPLETIONS, "/nothing"])
def test_a_client_that_sends_all_before_it_reads_gets_its_answer_though_the_connection_closes(
    server: Server, control: control_pb2_grpc.ControlStub, version: str, path: str
) -> None:
    address, size = urlsplit(server.http), 6 * largest(control)
    head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n"
    for _ in range(3):
        with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
            connection.sendall(head.encode() + bytes(size))
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        assert answer.split(b" ", 2)[1] == (b"413" if path == COMPLETIONS else b"404")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "body: is not JSON"),
        (b"[" * 1_000_000, "body: is nested too deep"),
        (b'{"messages": [' + b"{}," * 500_000 + b"{}]}", "body: has too many values"),
        (b'{"prompt": "\xff"}', "body: is not UTF-8"),
        (b'{"temperature": NaN, "prompt": "x"}', "body: is not JSON"),
        (b'{"prompt": "x", "prompt": "x"}', "prompt: is given twice"),
    ],
)
def test_a_hostile_body_stops_no_stream(server: Server, body: bytes, message: str) -> None:
    stream = Posted(server, COMPLETIONS, LONG)
    with contextlib.closing(stream.connection):
        events = stream.events()
        next(events)
        for _ in range(3):
            refused = Posted(server, COMPLETIONS, body)
            assert (refused.status, refused.error()["message"]) == (400, message)
        next(events)


def test_a_compressed_body_is_refused_by_name(server: Server) -> None:
    refused = Posted(server, COMPLETIONS, b"x", content_encoding="gzip")
    assert (refused.status, refused.error()["param"]) == (400, "content-encoding")


@pytest.mark.thorough
def test_a_client_that_sends_half_a_body_loses_its_place(server: Server) -> None:
    address = urlsplit(server.http)
    with socket.create_connection((address.hostname, address.port), 60) as connection:  # type: ignore[arg-type]
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
        answer = connection.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 408 ")


# -- exposure, several routers, the end ------------------------------------------------------------------------------


def test_tls_and_tokens_guard_http_as_they_do_grpc(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    (tmp_path / "token").write_text("s3cret\n")
    arguments = ("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    token = ("--auth-token-file", str(tmp_path / "token"))
    with running_server(*SYNTHETIC, *arguments, *token, ready=False) as server:
        assert server.http.startswith("https://")
        context = http.client.ssl.create_default_context()  # type: ignore[attr-defined]
        authority.configure_trust(context)
        deadline = time.monotonic() + 60
        while Posted(server, "/healthz", context=context).status != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        refused = Posted(server, "/v1/models", context=context)
        assert (refused.status, refused.error()["code"]) == (401, "invalid_api_key")
        bearer = {"authorization": "Bearer s3cret"}
        assert Posted(server, COMPLETIONS, {"prompt": "x"}, context=context, **bearer).status == 200


@pytest.mark.thorough
def test_sigterm_lets_streams_finish_and_refuses_others() -> None:
    with running_server(*SYNTHETIC, "--grace-s", "100") as server:
        stream = Posted(server, COMPLETIONS, LONG | {"max_tokens": 120})
        stream.response.readline()
        engine = server.engine()
        engine.suspend()  # the stream does not end before the rest has been seen
        server.process.send_signal(signal.SIGTERM)
        while Posted(server, "/healthz").status != 503:
            time.sleep(STEP_S)
        refused = Posted(server, COMPLETIONS, {"prompt": "x"})
        assert (refused.status, refused.error()["message"]) == (503, "the server is draining")
        assert "retry-after" in refused.response.headers
        engine.resume()
        stream.response.readline()
        assert stream.text()
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.tail()


def test_a_stream_that_outlives_the_grace_period_ends_with_an_error_event() -> None:
    with running_server(*SYNTHETIC, "--grace-s", "0") as server:
        stream = Posted(server, COMPLETIONS, LONG)
        events = stream.events()
        next(events)
        server.process.send_signal(signal.SIGTERM)
        assert json.loads(list(events)[-1])["error"]["code"] == "aborted"
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.tail()


@pytest.mark.thorough
def test_several_routers_share_the_port() -> None:
    with running_server(*SYNTHETIC, "--workers", "2") as server:
        served = set()
        routers = [child for child in psutil.Process(server.process.pid).children() if "router" in str(child.cmdline())]
        deadline = time.monotonic() + 60
        while len(served) < 2:
            assert time.monotonic() < deadline
            stream = Posted(server, COMPLETIONS, LONG)
            if stream.status == 503:  # a router that does not have the engine yet
                continue
            (mine,) = (each for each in psutil.net_connections("tcp") if is_end_of(each, stream.connection.sock))
            served.add(mine.pid)
        assert served <= {router.pid for router in routers}


def is_end_of(found: Any, client: socket.socket) -> bool:
    """Whether this is the server's end of a client's connection."""
    return bool(found.raddr) and tuple(found.raddr) == client.getsockname() and found.status == "ESTABLISHED"


def test_a_port_that_is_taken_is_told_in_one_line(server: Server) -> None:
    taken = urlsplit(server.http).netloc
    for workers in ("1", "2"):
        with (
            pytest.raises(AssertionError, match=f"error: --http: cannot bind {taken}: Address already in use"),
            running_server(*SYNTHETIC[:-1], taken, "--workers", workers),
        ):
            pass


def test_a_public_address_needs_a_guard() -> None:
    with (
        pytest.raises(
            AssertionError, match=r"error: --http 0\.0\.0\.0:0 is reachable from other hosts: give --tls-cert"
        ),
        running_server("--model", "synthetic", "--http", "0.0.0.0:0"),
    ):
        pass

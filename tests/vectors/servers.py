"""The servers that the vectors are for: two real ones, and two places that break calls on their way to the first."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import trustme
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagoda.v1 import inference_pb2
from tests.clients.fake_server import fail, retry_after
from tests.servers import START_TIMEOUT_S, Server, running_server

VECTORS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "calls.json").read_text())["vectors"]

MODEL = ("--model", "synthetic", "--step-ms", "2")
TOKEN = "a-token-of-the-vectors"
CUT_AFTER = 4000  # bytes
STREAMS = {
    "/pagoda.v1.Inference/Generate": inference_pb2.GenerateRequest,
    "/pagoda.v1.Inference/Resume": inference_pb2.ResumeRequest,
}


@contextlib.contextmanager
def running() -> Iterator[dict[str, dict[str, str]]]:
    """Start them all. Yields how to connect to each: `address`, and for `guarded` also `token` and `ca`, a PEM file."""
    with (
        running_server(*MODEL, ready=False) as plain,  # it loads while the next one starts
        _guarded() as guarded,
        _faulty(plain.address) as faulty,
        _cut(plain.address) as cut,
    ):
        plain.wait_ready()
        yield {"plain": {"address": plain.address}, "guarded": guarded, "faulty": faulty, "cut": cut}


@contextlib.contextmanager
def _guarded() -> Iterator[dict[str, str]]:
    """A server with TLS and a token that admits one request at a time, and keeps no streams."""
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        authority.cert_pem.write_to_path(folder / "ca.pem")
        certificate.private_key_pem.write_to_path(folder / "key.pem")
        certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
        (folder / "token").write_text(TOKEN)
        arguments = {"auth-token-file": "token", "tls-cert": "cert.pem", "tls-key": "key.pem"}
        flags = [f"--{flag}={folder / file}" for flag, file in arguments.items()]
        with running_server(*MODEL, "--max-requests", "1", "--resume-s", "0", *flags, ready=False) as server:
            _wait_ready(server, authority.cert_pem.bytes())
            yield {"address": server.address, "token": TOKEN, "ca": str(folder / "ca.pem")}


def _wait_ready(server: Server, ca: bytes) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    with grpc.secure_channel(server.address, grpc.ssl_channel_credentials(ca)) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while health.Check(health_pb2.HealthCheckRequest(), timeout=60, wait_for_ready=True).status != 1:
            assert time.monotonic() < deadline, server.tail()
            time.sleep(0.05)


class _Faulty(grpc.GenericRpcHandler):
    """Passes streams on, but ends the first calls of a request id as the `faults` of its vector say."""

    def __init__(self, upstream: grpc.Channel) -> None:
        self._upstream = upstream
        self._faults = {vector["request"]["request_id"]: vector["faults"] for vector in VECTORS if "faults" in vector}
        self._rest: dict[str, Iterator[dict[str, Any]]] = {}  # by request id

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if (kind := STREAMS.get(details.method)) is None:
            return None
        return grpc.unary_stream_rpc_method_handler(partial(self._stream, details.method), kind.FromString)

    def _stream(self, method: str, request: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
        name, _, _ = request.request_id.partition("/")
        fault = next(self._rest.setdefault(request.request_id, iter(self._faults.get(name, ()))), None)
        if fault is None or "after" in fault:
            call = self._upstream.unary_stream(method, _to_bytes)(request)
            context.add_callback(call.cancel)
            try:
                yield from itertools.islice(call, fault["after"] if fault else None)
            except grpc.RpcError as error:
                context.set_trailing_metadata(error.trailing_metadata())
                context.abort(error.code(), error.details())
            call.cancel()
        if fault is not None:
            yield from fail(grpc.StatusCode[fault["code"]], "told to fail", *_details(fault))(request, context)


def _to_bytes(message: Message) -> bytes:
    return message.SerializeToString()


def _details(fault: dict[str, Any]) -> Iterator[Message]:
    if "reason" in fault:
        metadata = {"queue_depth": str(fault["queue_depth"])} if "queue_depth" in fault else {}
        yield error_details_pb2.ErrorInfo(reason=fault["reason"], domain="pagoda", metadata=metadata)
    if "retry_after_s" in fault:
        yield retry_after(fault["retry_after_s"])


@contextlib.contextmanager
def _faulty(target: str) -> Iterator[dict[str, str]]:
    with grpc.insecure_channel(target) as upstream:
        server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((_Faulty(upstream),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield {"address": f"127.0.0.1:{port}"}
        finally:
            server.stop(grace=None).wait()


@contextlib.contextmanager
def _cut(target: str) -> Iterator[dict[str, str]]:
    """A wire to the server that is cut whenever it has carried CUT_AFTER bytes to the client; it can be laid again."""
    host, _, port = target.rpartition(":")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    server = socket.create_connection((host, int(port)))
                    threading.Thread(target=_forward, args=(client, server, None), daemon=True).start()
                    threading.Thread(target=_forward, args=(server, client, CUT_AFTER), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield {"address": f"127.0.0.1:{listener.getsockname()[1]}"}


def _forward(source: socket.socket, target: socket.socket, most: int | None) -> None:
    carried = 0
    with contextlib.suppress(OSError):
        while (most is None or carried < most) and (data := source.recv(1 << 10)):
            target.sendall(data)
            carried += len(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)

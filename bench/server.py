"""A Pagoda server for the length of a block."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.errors import BenchError
from bench.processes import spawned

START_TIMEOUT_S = 180.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Server:
    address: str
    pid: int


def serve_command(arguments: list[str]) -> list[str]:
    return [
        sys.executable,
        "-m",
        "pagoda_server.cli",
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--log-level",
        "warning",
        *arguments,
    ]


@contextlib.contextmanager
def served(arguments: list[str], environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """`pagoda serve` on a free port, ready. Raises BenchError with the end of its log if it does not become so.

    environment   variables beside this process's own
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with spawned(serve_command(arguments), log, environment=environment) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("listening on ") or not becomes_ready(line.split()[-1], process):
                raise BenchError(f"the server did not become ready:\n{log.read_text()[-2000:]}")
            yield Server(line.split()[-1], process.pid)


def becomes_ready(address: str, process: subprocess.Popen[str]) -> bool:
    deadline = time.monotonic() + START_TIMEOUT_S
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(grpc.RpcError):
                if stub.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING:
                    return True
            time.sleep(POLL_S)
    return False

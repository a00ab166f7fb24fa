"""Real servers for the tests: `pagoda serve` and `python -m pagoda_server.engine` as their own processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

ROOT = Path(__file__).parent.parent
START_TIMEOUT_S = 300.0
CHECKS_OF_WORKERS = 12  # a connection reaches any of the routers: one that is not ready is hardly missed


def free_address() -> str:
    """An address that stays free until it is bound: no other test takes ports of this process's own host."""
    pid = os.getpid()
    host = f"127.{64 + (pid >> 16) % 64}.{(pid >> 8) % 256}.{pid % 256}"
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"


@dataclass
class Server:
    process: subprocess.Popen[str]
    address: str
    log: Path
    http: str = ""  # the URL of its HTTP port

    def engine(self) -> psutil.Process:
        """The engine that this router has spawned."""
        engines = self.engines()
        assert len(engines) == 1, f"{len(engines)} engines"
        return engines[0]

    def engines(self) -> list[psutil.Process]:
        """The engines that this router has spawned and that live. Its other children render chats."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # a zombie has no command line
                if "pagoda_server.engine" in child.cmdline():
                    found.append(child)
        return found

    def health(self, service: str = "") -> health_pb2.HealthCheckResponse.ServingStatus:
        with grpc.insecure_channel(self.address) as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            return health_pb2_grpc.HealthStub(channel).Check(request, timeout=60).status

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S, checks: int = 1) -> None:
        """Wait until so many checks in a row, each on a connection of its own, find the server ready."""
        deadline = time.monotonic() + timeout_s
        num_ready = 0
        while True:
            try:
                num_ready = num_ready + 1 if self.health() == health_pb2.HealthCheckResponse.SERVING else 0
                if num_ready == checks:
                    return
                if num_ready:
                    continue
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            assert self.process.poll() is None, f"the server exited with {self.process.returncode}:\n{self.tail()}"
            assert time.monotonic() < deadline, f"the server was not ready within {timeout_s} s:\n{self.tail()}"
            time.sleep(0.05)

    def stop(self, timeout_s: float = 60.0) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def tail(self) -> str:
        return self.log.read_text()[-4000:]


@contextlib.contextmanager
def running_server(*arguments: str, ready: bool = True, inside: Sequence[str] = ()) -> Iterator[Server]:
    """`pagoda serve` with these arguments on a free port; killed, with its engine, when the block ends.

    inside  a command that runs it elsewhere, such as in a network namespace
    """
    listen = () if "--listen" in arguments else ("--listen", "127.0.0.1:0")
    with (
        tempfile.TemporaryDirectory() as folder,
        _spawned(Path(folder) / "log", "-m", "pagoda_server.cli", "serve", *listen, *arguments, inside=inside) as (
            process,
            log,
        ),
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "starting on " in line, f"{line!r}\n{log.read_text()[-4000:]}"
        message = json.loads(line)["message"] if line.startswith("{") else line
        http, _, address = message.strip().removeprefix("starting on ").rpartition(" and ")
        server = Server(process, address, log, http)
        if ready:
            server.wait_ready(checks=CHECKS_OF_WORKERS if "--workers" in arguments else 1)
        yield server


@contextlib.contextmanager
def running_engine(
    listen: str, *arguments: str, inside: Sequence[str] = (), log: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """`python -m pagoda_server.engine` with these arguments. `inside` is as in `running_server`.

    log  the file that it writes its log to; None: one that is not kept
    """
    with tempfile.TemporaryDirectory() as folder:
        command = ("-m", "pagoda_server.engine", "--listen", listen, *arguments)
        with _spawned(log or Path(folder) / "log", *command, inside=inside) as (process, _):
            yield process


@contextlib.contextmanager
def _spawned(log: Path, *command: str, inside: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*inside, sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    try:
        yield process, log
    finally:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.kill()
        process.wait()

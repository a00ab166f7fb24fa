"""A server for as long as a command runs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from types import TracebackType
from typing import IO

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console
from rich.text import Text

from pagoda_server.settings import ServeConfig
from pagoda_server.settings.sources import environment_without_settings

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.1
LOG_LINES = 15


class ServerError(Exception):
    """The server did not start or stop as it should."""


class ServerProcess:
    """`pagoda serve` in a process group of its own; leaving the block kills it and its engine."""

    def __init__(self, arguments: list[str]) -> None:
        self.address = ""
        self.log: deque[str] = deque(maxlen=LOG_LINES)
        self._arguments = arguments

    def __enter__(self) -> ServerProcess:
        environment = environment_without_settings(os.environ, ServeConfig) | {"PYTHONUNBUFFERED": "1"}
        environment.pop("PAGODA_AUTH_TOKEN", None)  # this server is called without a token
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pagoda_server.cli", "serve", "--listen", "127.0.0.1:0", *self._arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._readers = [
            threading.Thread(target=self._read_address, args=[self._process.stdout], daemon=True),
            threading.Thread(target=self._read_log, args=[self._process.stderr], daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for reader in self._readers:
            reader.join(timeout=1.0)

    def wait_ready(self, on_wait: Callable[[], None]) -> None:
        """Wait until health is SERVING, calling `on_wait` ten times a second. Raises ServerError."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_serving():
            if (code := self._process.poll()) is not None:
                raise ServerError(f"the server ended with exit code {code} before it was ready")
            if time.monotonic() > deadline:
                raise ServerError(f"the server was not ready within {START_TIMEOUT_S:.0f} s")
            on_wait()
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Send SIGTERM. Raises ServerError unless the server then ends with exit code 0."""
        self._process.terminate()
        try:
            code = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ServerError(f"the server did not end within {STOP_TIMEOUT_S:.0f} s of SIGTERM") from None
        if code != 0:
            raise ServerError(f"the server ended with exit code {code} on SIGTERM")

    def _is_serving(self) -> bool:
        if not self.address:
            return False
        with grpc.insecure_channel(self.address) as channel:
            try:
                health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2.0)
            except grpc.RpcError:
                return False
        return bool(health.status == health_pb2.HealthCheckResponse.SERVING)

    def _read_address(self, stdout: IO[str]) -> None:
        for line in stdout:
            if line.startswith("starting on "):
                self.address = line.split()[-1]

    def _read_log(self, stderr: IO[str]) -> None:
        for line in stderr:
            if line.strip():
                self.log.append(line.rstrip())


def wait_shown(server: ServerProcess, model: str, console: Console) -> float:
    """Wait until the server is ready; a terminal shows its last line of log. Returns seconds. Raises ServerError."""
    start = time.monotonic()
    with console.status("") if console.is_terminal else nullcontext() as spinner:

        def show() -> None:
            if spinner is not None:
                elapsed_s = time.monotonic() - start
                last_line = Text(server.log[-1] if server.log else "", style="dim")
                text = Text.assemble(f"starting the server on {model}, {elapsed_s:.0f} s  ", last_line)
                text.truncate(console.width - 4, overflow="ellipsis")
                spinner.update(text)

        server.wait_ready(show)
    return time.monotonic() - start

"""The systems that a workload can run on: Pagoda servers, a server that already runs, and peers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench import BenchError, driver
from bench.measure import Run
from bench.peers.peer import PeerSettings
from bench.peers.process import peer_process
from bench.peers.registry import PEERS
from bench.processes import listener, peak_memory_bytes, spawned
from bench.workloads import Workload

OnTokens = Callable[[int], None]
START_TIMEOUT_S = 180.0
POLL_S = 0.05
_VARIABLE = re.compile(r"[A-Za-z_]\w*=")  # an assignment before a command, as in a shell


class Started(Protocol):
    """A system that is loaded and warmed up."""

    @property
    def versions(self) -> dict[str, str]: ...

    def run(self, workload: Workload, on_tokens: OnTokens) -> Run: ...


@dataclass(frozen=True, slots=True)
class System:
    """A system that can be started. `start` runs it for one `with` block, so that it uses nothing in others' turns."""

    name: str
    command: str
    start: Callable[[], AbstractContextManager[Started]]
    is_peer: bool = False


@dataclass(frozen=True, slots=True)
class _Pagoda:
    address: str
    pid: int | None
    versions: dict[str, str]

    def run(self, workload: Workload, on_tokens: OnTokens) -> Run:
        run = driver.run(self.address, workload, on_tokens)
        return dataclasses.replace(run, peak_memory_bytes=peak_memory_bytes(self.pid) if self.pid else None)


def pagoda_server(
    name: str, arguments: list[str], environment: Mapping[str, str] | None = None, log: Path | None = None
) -> System:
    """A `pagoda serve` of our own with these arguments, and these environment variables added.

    log   file that keeps what it prints
    """
    environment = environment or {}

    @contextlib.contextmanager
    def start() -> Iterator[Started]:
        with served(arguments, environment, log) as server:
            yield _Pagoda(server.address, server.pid, driver.versions(server.address))

    variables = "".join(f"{variable}={shlex.quote(value)} " for variable, value in environment.items())
    return System(name, f"{variables}pagoda serve {shlex.join(arguments)}", start)


def running_server(address: str) -> System:
    """A server that is already running."""

    @contextlib.contextmanager
    def start() -> Iterator[Started]:
        yield _Pagoda(address, listener(address), driver.versions(address))

    return System(address, f"a server at {address}", start)


def peer(name: str, settings: PeerSettings) -> System:
    """A peer by name. Raise BenchError if it is not installed."""
    python = PEERS[name].interpreter()
    if python is None:
        raise BenchError(f"{name} is not installed: docs/benchmark.md says how to install it")
    return System(
        name,
        f"{PEERS[name].module} in its own process",
        functools.partial(_start_peer, name, python, settings),
        is_peer=True,
    )


def _start_peer(name: str, python: str, settings: PeerSettings) -> AbstractContextManager[Started]:
    return peer_process(name, python, settings)


def parse_system(text: str, common: list[str]) -> System:
    """Parse "NAME:VARIABLE=VALUE … ARGUMENTS of pagoda serve"; these arguments override the common ones."""
    name, _, rest = text.partition(":")
    words = shlex.split(rest)
    variables = list(itertools.takewhile(_VARIABLE.match, words))
    environment = dict(variable.split("=", 1) for variable in variables)
    return pagoda_server(name, common + words[len(variables) :], environment)


# -- a server's process ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Server:
    """
    url   of its HTTP port; empty: it has none
    """

    address: str
    pid: int
    url: str = ""


@contextlib.contextmanager
def served(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None, log: Path | None = None
) -> Iterator[Server]:
    """Run `pagoda serve` on a free port until it is ready, or raise BenchError with the end of its log.

    environment   variables added to this process's own
    log           file that keeps what it prints; by default none does
    """
    command = [sys.executable, "-m", "pagoda_server.cli", "serve", "--listen", "127.0.0.1:0", "--log-level", "warning"]
    with tempfile.TemporaryDirectory() as folder:
        log = log or Path(folder) / "log"
        with spawned([*command, *arguments], log, environment=environment) as process:
            assert process.stdout is not None
            # "starting on ADDRESS", or "starting on URL and ADDRESS"
            url, _, address = process.stdout.readline().strip().removeprefix("starting on ").rpartition(" and ")
            if not address or not becomes_ready(address, process):
                raise BenchError(f"the server did not become ready:\n{log.read_text()[-2000:]}")
            yield Server(address, process.pid, url)


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

"""Several router processes on one port: their parent starts them and the engine, and serves no requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from ...settings import ServeConfig
from ...settings.setting import flag
from ..errors import ConfigError
from .announce import Announcer
from .public_port import reserved_port
from .supervisor import Supervisor, spawned_engine

# -- the parent --------------------------------------------------------------------------------------------------------


log = logging.getLogger("pagoda.router")

STOP_MARGIN_S = 5.0  # beyond the grace period: requests that it cuts off still have to end


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """A worker's configuration, sent as one line to its standard input.

    serve    settings, with the shared address and this worker's share of the limits
    folders  those of the models, by name; the first one's is --model's
    index    this worker's number, from 0
    sockets  addresses of all workers' private services, this one's first
    spawned  address of the engine that the parent has spawned; None if `serve` says where engines run
    """

    serve: ServeConfig
    folders: dict[str, str]
    index: int
    sockets: list[str]
    spawned: str | None

    def to_line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> WorkerConfig:
        given = json.loads(line)
        return cls(**(given | {"serve": ServeConfig(**given["serve"])}))


class Workers:
    """The workers and their engine, and the order in which they start and stop."""

    def __init__(self, config: ServeConfig, folders: Mapping[str, Path]) -> None:
        self._config = config
        self._folders = folders
        self._engine: Supervisor | None = None
        self._routers: list[Supervisor] = []
        self._listening: set[int] = set()
        self._announcer = Announcer(config)
        self._is_announced = False
        self._ready: set[int] = set()  # routers that have an engine
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Run until a signal. Raises ConfigError, ChildFailedError."""
        for limit in ("max_requests", "max_queued_tokens"):
            whole = getattr(self._config, limit)
            if whole is not None and whole < self._config.workers:
                raise ConfigError(f"{flag(limit)} {whole} leaves nothing for some of the workers")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        with contextlib.ExitStack() as stack:
            config = replace(self._config, listen=stack.enter_context(reserved_port(self._config.listen)))
            if config.http:
                config = replace(config, http=stack.enter_context(reserved_port(config.http, "--http")))
            private = stack.enter_context(tempfile.TemporaryDirectory(prefix="pagoda-"))
            if config.tenants_file and not config.quotas_file:
                config = replace(config, quotas_file=f"{private}/quotas")
            engine = stack.enter_context(spawned_engine(self._config, next(iter(self._folders.values()))))
            self._engine = engine.supervisor if engine else None
            address = engine.address if engine else None
            self._routers = [self._router(index, config, address, private) for index in range(self._config.workers)]
            await self._run_until_stopped()

    async def _run_until_stopped(self) -> None:
        """Run every process until a signal or a failure. Routers end before the engine, which their requests need."""
        routers = [asyncio.create_task(router.run()) for router in self._routers]
        engine = [asyncio.create_task(self._engine.run())] if self._engine else []
        stop = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait({stop, *routers, *engine}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stop}:
                task.result()  # raises: these tasks end only by failing
        finally:
            stop.cancel()
            for tasks in (routers, engine):
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _router(self, index: int, config: ServeConfig, spawned: str | None, private: str) -> Supervisor:
        count = config.workers
        sockets = [f"unix:{private}/router-{(index + at) % count}.sock" for at in range(count)]
        part = replace(
            config,
            max_requests=_part(config.max_requests, index, count),
            max_queued_tokens=config.max_queued_tokens and _part(config.max_queued_tokens, index, count),
        )
        folders = {name: str(folder) for name, folder in self._folders.items()}
        return Supervisor(
            f"router {index}",
            [sys.executable, "-m", "pagoda_server.router.process.main"],
            first_line=WorkerConfig(part, folders, index, sockets, spawned).to_line(),
            on_line=partial(self._on_line, index),
            stop_timeout_s=config.grace_s + STOP_MARGIN_S,
        )

    def _on_line(self, index: int, line: str) -> None:
        log.debug("router %d: %s", index, line)
        if line == ENGINE_READY and self._engine:
            self._engine.mark_ready()
            self._send_restarts()
        elif line == ENGINE_HANGS and self._engine:
            self._engine.kill()
        elif line == SERVES:
            self._ready.add(index)
        elif line.startswith(STARTS):
            self._routers[index].mark_ready()
            self._send_restarts()
            self._listening.add(index)
            if not self._is_announced and len(self._listening) == len(self._routers):
                self._is_announced = True
                address, _, url = line.removeprefix(STARTS).partition(" ")
                self._announcer.starts(address, url)
        if len(self._ready) == len(self._routers):
            self._announcer.is_ready()

    def _send_restarts(self) -> None:
        for router in self._routers:
            router.send(str(self._engine.restarts if self._engine else 0))

    def _on_signal(self) -> None:
        """Stop on the first signal; a second one goes on to the routers and ends their grace period."""
        if self._stop.is_set():
            for router in self._routers:
                router.terminate()
        self._stop.set()


def _part(whole: int, index: int, count: int) -> int:
    return whole * (index + 1) // count - whole * index // count


# -- a worker's end of its pipes ---------------------------------------------------------------------------------------


# Lines that a worker prints for its parent. The addresses of gRPC and, if there is one, of HTTP follow the first.
STARTS = "starts "
SERVES = "serves"
ENGINE_READY = "engine ready"
ENGINE_HANGS = "engine hangs"


class ParentLink:
    """Stands in for the engine's supervisor and for the announcer, which are the parent's.

    The parent sends the number of restarts.

    Standard input ends when the parent dies. This process then exits, because an orphan would hold the port.
    """

    def __init__(self) -> None:
        self.restarts = 0
        threading.Thread(target=self._listen, name="parent-link", daemon=True).start()

    def starts(self, address: str, url: str = "") -> None:
        print(f"{STARTS}{address} {url}".rstrip(), flush=True)

    def is_ready(self) -> None:
        print(SERVES, flush=True)

    def mark_ready(self) -> None:
        print(ENGINE_READY, flush=True)

    def kill(self) -> None:
        print(ENGINE_HANGS, flush=True)

    def _listen(self) -> None:
        for line in sys.stdin:
            self.restarts = int(line)
        os._exit(1)

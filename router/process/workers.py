"""Several router processes on one port: their parent starts them and the engine, and serves no requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
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

UPGRADE_S = 120.0  # in which routers that replace others have to serve
AGE_JITTER = 1.1  # gRPC lengthens a connection's age by a tenth at most
LAST_CALLS_S = 3.0  # in which calls arrive that clients start before they learn that their connection is too old
STOP_MARGIN_S = 5.0  # beyond the grace period: requests that it cuts off still have to end


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """A worker's configuration, sent as one line to its standard input.

    serve    settings, with the shared address and this worker's share of the limits
    folders  those of the models, by name; the first one's is --model's
    index    this worker's number, from 0
    socket   path of this worker's private services, beside those of all workers
    replaces whether others serve the port until it can
    spawned  address of the engine that the parent has spawned; None if `serve` says where engines run
    """

    serve: ServeConfig
    folders: dict[str, str]
    index: int
    socket: str
    spawned: str | None
    replaces: bool

    def to_line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> WorkerConfig:
        given = json.loads(line)
        return cls(**(given | {"serve": ServeConfig(**given["serve"])}))


class Generation:
    """The router processes that were started together: those that serve, their successors, or their predecessors."""

    def __init__(self) -> None:
        self.routers: list[Supervisor] = []
        self.listening: set[int] = set()
        self.ready: set[int] = set()  # routers that have an engine
        self.is_serving = asyncio.Event()  # all are both
        self.tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self.tasks = [asyncio.create_task(router.run()) for router in self.routers]

    def check(self) -> None:
        if len(self.listening & self.ready) == len(self.routers):
            self.is_serving.set()

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class Workers:
    """The workers and their engine, and the order in which they start, are replaced, and stop."""

    def __init__(self, config: ServeConfig, folders: Mapping[str, Path]) -> None:
        self._config = config
        self._folders = folders
        self._engine: Supervisor | None = None
        self._serving: Generation | None = None
        self._generations: list[Generation] = []  # that one, and those that come or go
        self._count = itertools.count()
        self._announcer = Announcer(config)
        self._is_announced = False
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        self._upgrade = asyncio.Event()
        self._leaving: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Run until a signal. Raises ConfigError, ChildFailedError."""
        for limit in ("max_requests", "max_queued_tokens"):
            whole = getattr(self._config, limit)
            if whole is not None and whole < self._config.workers:
                raise ConfigError(f"{flag(limit)} {whole} leaves nothing for some of the workers")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(signal.SIGUSR2, self._upgrade.set)
        with contextlib.ExitStack() as stack:
            config = replace(self._config, listen=stack.enter_context(reserved_port(self._config.listen)))
            if config.http:
                config = replace(config, http=stack.enter_context(reserved_port(config.http, "--http")))
            private = stack.enter_context(tempfile.TemporaryDirectory(prefix="pagoda-"))
            if config.tenants_file and not config.quotas_file:
                config = replace(config, quotas_file=f"{private}/quotas")
            engine = stack.enter_context(spawned_engine(self._config, next(iter(self._folders.values()))))
            self._engine = engine.supervisor if engine else None
            await self._run_until_stopped(partial(self._start, config, engine.address if engine else None, private))

    async def _run_until_stopped(self, start: Callable[[], Generation]) -> None:
        """Run every process until a signal or a failure. Routers end before the engine, which their requests need."""
        self._serving = start()
        others = [asyncio.create_task(self._replace_when_asked(start))]
        if self._engine:
            others.append(asyncio.create_task(self._engine.run()))
        for task in others:
            task.add_done_callback(self._on_end)
        try:
            await self._stop.wait()
        finally:
            others[0].cancel()
            await asyncio.gather(*(generation.stop() for generation in self._generations))
            for task in (*others, *self._leaving):
                task.cancel()
            await asyncio.gather(*others, *self._leaving, return_exceptions=True)
        if self._failure is not None:
            raise self._failure

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """Stop everything for what cannot go on. Tasks end by failing, or when they are cancelled."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._stop.set()

    async def _replace_when_asked(self, start: Callable[[], Generation]) -> None:
        while True:
            await self._upgrade.wait()
            self._upgrade.clear()
            await self._replace(start())

    async def _replace(self, new: Generation) -> None:
        """Let these routers take the place of those that serve once they do, or end them if they cannot."""
        log.info("starting %d routers that replace the others", len(new.routers))
        serving = asyncio.create_task(new.is_serving.wait())
        try:
            done, _ = await asyncio.wait({serving, *new.tasks}, timeout=UPGRADE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            serving.cancel()
        if not new.is_serving.is_set():
            why = next((str(task.exception()) for task in done), f"others do not serve within {UPGRADE_S:.0f} s")
            log.error("the routers are not replaced: %s", why)
            await new.stop()
            self._generations.remove(new)
            return
        old, self._serving = self._serving, new
        assert old is not None, "a generation has been started before"
        for router in old.routers:
            router.retire(RETIRE)
        leaving = asyncio.create_task(self._see_off(old))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        log.info("the routers have been replaced")

    async def _see_off(self, old: Generation) -> None:
        """Wait until retired routers have ended, and kill one that does not."""
        age_s = self._config.max_connection_age_s or 0
        await asyncio.wait(old.tasks, timeout=AGE_JITTER * age_s + LAST_CALLS_S + self._config.grace_s + STOP_MARGIN_S)
        await old.stop()
        self._generations.remove(old)

    def _start(self, config: ServeConfig, spawned: str | None, private: str) -> Generation:
        """Start a generation of routers."""
        number, generation = next(self._count), Generation()
        for index in range(config.workers):
            socket = f"{private}/router-{number}-{index}.sock"
            generation.routers.append(self._router(generation, index, config, spawned, socket, number > 0))
        self._generations.append(generation)
        generation.start()
        for task in generation.tasks:
            task.add_done_callback(lambda task: self._on_end(task) if generation is self._serving else None)
        return generation

    def _router(
        self, generation: Generation, index: int, config: ServeConfig, spawned: str | None, socket: str, is_later: bool
    ) -> Supervisor:
        count = config.workers
        part = replace(
            config,
            max_requests=_part(config.max_requests, index, count),
            max_queued_tokens=config.max_queued_tokens and _part(config.max_queued_tokens, index, count),
        )
        folders = {name: str(folder) for name, folder in self._folders.items()}
        return Supervisor(
            f"router {index}",
            [sys.executable, "-m", "pagoda_server.router.process.main"],
            first_line=WorkerConfig(part, folders, index, socket, spawned, is_later).to_line(),
            on_line=partial(self._on_line, generation, index),
            stop_timeout_s=config.grace_s + STOP_MARGIN_S,
        )

    def _on_line(self, generation: Generation, index: int, line: str) -> None:
        log.debug("router %d: %s", index, line)
        if line == ENGINE_READY and self._engine:
            self._engine.mark_ready()
            self._send_restarts()
        elif line == ENGINE_HANGS and self._engine:
            self._engine.kill()
        elif line == SERVES:
            generation.ready.add(index)
        elif line.startswith(STARTS):
            generation.routers[index].mark_ready()
            self._send_restarts()
            generation.listening.add(index)
            if not self._is_announced and len(generation.listening) == len(generation.routers):
                self._is_announced = True
                address, _, url = line.removeprefix(STARTS).partition(" ")
                self._announcer.starts(address, url)
        generation.check()
        if generation.is_serving.is_set():
            self._announcer.is_ready()

    def _send_restarts(self) -> None:
        for generation in self._generations:
            for router in generation.routers:
                router.send(str(self._engine.restarts if self._engine else 0))

    def _on_signal(self) -> None:
        """Stop on the first signal; a second one goes on to the routers and ends their grace period."""
        if self._stop.is_set():
            for generation in self._generations:
                for router in generation.routers:
                    router.terminate()
        self._stop.set()


def _part(whole: int, index: int, count: int) -> int:
    return whole * (index + 1) // count - whole * index // count


# -- a worker's end of its pipes ---------------------------------------------------------------------------------------


RETIRE = "retire"  # a line of the parent; all others are numbers

# Lines that a worker prints for its parent. The addresses of gRPC and, if there is one, of HTTP follow the first.
STARTS = "starts "
SERVES = "serves"
ENGINE_READY = "engine ready"
ENGINE_HANGS = "engine hangs"


class ParentLink:
    """Stands in for the engine's supervisor and for the announcer, which are the parent's.

    The parent sends the number of restarts, and RETIRE once others serve the port.

    Standard input ends when the parent dies. This process then exits, because an orphan would hold the port.
    """

    def __init__(self) -> None:
        self.restarts = 0
        self.retires = threading.Event()
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
            if line.strip() == RETIRE:
                self.retires.set()
            else:
                self.restarts = int(line)
        os._exit(1)

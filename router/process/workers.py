"""The routers of a server and its engine: one process starts them, replaces them, and stops them.

The first router of a server with one worker runs in this process. All others, and its successors, are child processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...channel.address import is_unix
from ...runtime import event_loop
from ...runtime.service_manager import STOPPING, notify, report_progress
from ...runtime.signals import on_stop
from ...settings import ServeConfig
from ...settings.setting import flag
from ..config_error import ConfigError
from .announce import Announcer
from .generation import Child, Generation, OwnRouter, SpawnedHere
from .parent import ADAPTERS, ENGINE_HANGS, ENGINE_READY, RETIRE, SERVES, STARTS, OwnParent, Parent
from .public_port import longest_age_s, reserved_port
from .succession import Handover, go_on, objection, unblock_signals
from .supervisor import Supervisor
from .upgrade import UpgradePort

if TYPE_CHECKING:
    from .router import Router

log = logging.getLogger("pagoda.router")

UPGRADE_S = 120.0  # in which routers that replace others have to serve
LOADING_S = 3600.0  # and in which an engine that replaces another one has to load its model
STOP_MARGIN_S = 5.0  # beyond the grace period: requests that it cuts off still have to end


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """A worker's configuration, sent as one line to its standard input.

    serve    settings, with the shared address and this worker's share of the limits
    folders  those of the models, by name; the first one's is --model's
    index    this worker's number, from 0
    socket   path of this worker's private services, beside those of all workers
    replaces whether it listens only once it has an engine, because others serve the port, or have served it
    spawned  address of the engine that the parent has spawned; None if `serve` says where engines run
    adapters those of an engine in whose place the spawned one comes, as `Adapter.to_json` describes them
    """

    serve: ServeConfig
    folders: dict[str, str]
    index: int
    socket: str
    spawned: str | None
    replaces: bool
    adapters: list[dict[str, object]] = field(default_factory=list)

    def to_line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> WorkerConfig:
        given = json.loads(line)
        return cls(**(given | {"serve": ServeConfig(**given["serve"])}))

    def router(self, parent: Parent, is_alone: bool = False) -> Router:
        from ..engines.held_adapters import Adapter  # only now: they take a while, in which a spawned engine starts
        from .router import Router

        folders = {name: Path(folder) for name, folder in self.folders.items()}
        socket = Path(self.socket)
        adapters = [Adapter.from_json(each) for each in self.adapters]
        return Router(self.serve, folders, parent, socket, self.index, self.spawned, self.replaces, is_alone, adapters)


class Workers:
    """The routers and their engine, and the order in which they start, are replaced, and stop."""

    def __init__(self, config: ServeConfig, folders: Mapping[str, Path]) -> None:
        self._config = config  # once it runs: with the actual ports
        self._folders = folders
        self._generations: list[Generation] = []  # the one that serves, and those that come or go
        self._serving: Generation | None = None
        self._last = -1  # number of the generation that was started last
        # A folder of this process. One router alone leaves none behind when it is killed: it needs one to be replaced.
        self._private = Path(tempfile.gettempdir(), f"pagoda-{secrets.token_hex(8)}")
        self._alone: Router | None = None  # the one that serves in this process, until it shall be replaced
        self._announcer = Announcer(config)
        self._is_announced = False
        self._adapters: list[dict[str, object]] = []  # that the spawned engine holds
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        self._signaled = asyncio.Event()  # to replace the routers
        self._upgrading = asyncio.Lock()
        self._port: UpgradePort | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    async def run(self, handed: Handover | None = None) -> None:
        """Run until a signal. Raises ConfigError, ChildFailedError.

        handed  what runs already, as another program in this process has left it
        """
        for limit in ("max_requests", "max_queued_tokens"):
            whole = getattr(self._config, limit)
            if whole is not None and whole < self._config.workers:
                raise ConfigError(f"{flag(limit)} {whole} leaves nothing for some of the workers")
        loop = asyncio.get_running_loop()
        on_stop(self._on_signal)
        loop.add_signal_handler(signal.SIGUSR2, self._signaled.set)
        if handed is not None:
            unblock_signals()
            self._private = Path(handed.private)
        with contextlib.ExitStack() as stack:
            config, shared = self._config, handed is not None
            if config.workers > 1 or not is_unix(config.listen):
                config = replace(config, listen=stack.enter_context(reserved_port(config.listen, is_shared=shared)))
            if config.http:
                config = replace(config, http=stack.enter_context(reserved_port(config.http, "--http", shared)))
            stack.callback(shutil.rmtree, self._private, ignore_errors=True)
            if config.workers > 1:
                self._private.mkdir(mode=0o700, exist_ok=shared)
            if config.tenants_file and not config.quotas_file:
                self._private.mkdir(mode=0o700, exist_ok=True)
                config = replace(config, quotas_file=f"{self._private}/quotas")
            self._config = config
            await self._run_until_stopped(handed)

    async def _run_until_stopped(self, handed: Handover | None) -> None:
        """Run every process until a signal or a failure. Routers end before their engine, which their requests need."""
        if handed is None:
            self._serving = self._start(self._start_engine())
        else:
            self._adopt(handed)
        self._port = UpgradePort(handed.asks if handed is not None else None)
        answering = self._port.answer(self.upgrade)
        others = [asyncio.create_task(each) for each in (self._upgrade_when_signaled(), answering)]
        for task in others:
            task.add_done_callback(self._on_end)
        watchdog = asyncio.create_task(report_progress())  # until all have ended
        try:
            await self._stop.wait()
        finally:
            notify(STOPPING)
            for task in (*others, *self._leaving):
                task.cancel()
            await asyncio.gather(*others, *self._leaving, return_exceptions=True)
            await asyncio.gather(*(self._end(generation) for generation in [*self._generations]))
            watchdog.cancel()
        if self._failure is not None:
            raise self._failure

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """Stop everything for what cannot go on. Tasks end by failing, or when they are cancelled."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._stop.set()

    # -- replacing -----------------------------------------------------------------------------------------------------

    async def _upgrade_when_signaled(self) -> None:
        while True:
            await self._signaled.wait()
            self._signaled.clear()
            await self.upgrade(with_engine=False)

    async def upgrade(self, with_engine: bool) -> str:
        """Let new routers take the place of those that serve, once they do; so does a new engine of a spawned one.

        Returns why they have not; "": they have.
        """
        async with self._upgrading:
            old = self._serving
            assert old is not None, "a generation has been started before"
            if with_engine and any(other.engine is not old.engine for other in self._generations):
                why = "an engine that was replaced before still runs streams, and there is no third one beside it"
                log.error("the routers are not replaced: %s", why)
                return why
            log.info("starting %d routers that replace the others", len(old.routers))
            if self._alone:
                self._private.mkdir(mode=0o700, exist_ok=True)
                await self._alone.join()
                self._alone = None
            new = self._start(self._start_engine() if with_engine else old.engine)
            if why := await self._why_not_serving(new, UPGRADE_S + (LOADING_S if with_engine and new.engine else 0)):
                log.error("the routers are not replaced: %s", why)
                await self._end(new)
                return why
            self._serving = new
            for router in old.routers:
                router.retire(RETIRE)
            leaving = asyncio.create_task(self._see_off(old))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
            log.info("the routers have been replaced")
            return ""

    async def _why_not_serving(self, new: Generation, timeout_s: float) -> str:
        """Wait until these routers serve. Return why they do not; "": they do."""
        serving, stopping = asyncio.create_task(new.is_serving.wait()), asyncio.create_task(self._stop.wait())
        parts = [*new.tasks, *((new.engine.task,) if new.engine else ())]
        try:
            done, _ = await asyncio.wait(
                {serving, stopping, *parts}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            serving.cancel()
            stopping.cancel()
        if self._stop.is_set():
            return "the server ends"
        if new.is_serving.is_set():
            return ""
        failed = [part for part in parts if part in done and not part.cancelled()]
        return str(failed[0].exception()) if failed else f"others do not serve within {timeout_s:.0f} s"

    async def _see_off(self, old: Generation) -> None:
        """Wait until retired routers have ended, and kill one that does not."""
        age_s = longest_age_s(self._config)
        await asyncio.wait(old.tasks, timeout=age_s + self._config.grace_s + STOP_MARGIN_S)
        await self._end(old)
        await self._go_on_in_installed_code()

    async def _go_on_in_installed_code(self) -> None:
        """Let the installed program run in this process, where nothing else of an upgrade is under way."""
        if (handover := self._handover()) is None:
            return
        if why := await asyncio.to_thread(objection, handover):
            log.warning("the first process keeps its code: %s", why)
        elif handover == self._handover():
            log.info("the first process goes on in the code that is installed now")
            go_on(handover)

    def _handover(self) -> Handover | None:
        """What this process is, if it only looks after processes of which each serves."""
        serving, port = self._serving, self._port
        is_busy = self._upgrading.locked() or self._stop.is_set() or port is None or port.num_open
        if is_busy or serving is None or self._generations != [serving]:
            return None
        routers = [router.state() for router in serving.routers if isinstance(router, Supervisor)]
        engine = serving.engine.supervisor.state() if serving.engine else None
        running = [state for state in routers if state is not None]
        if len(running) != len(serving.routers) or (serving.engine and engine is None):
            return None
        folders = {name: str(folder) for name, folder in self._folders.items()}
        address = serving.engine.address if serving.engine else None
        private, asks = str(self._private), port.descriptor if port else None
        numbers = serving.number, self._last
        return Handover(self._config, folders, private, *numbers, running, address, engine, asks, self._adapters)

    async def _end(self, generation: Generation) -> None:
        """Stop routers, and then their engine unless others use it."""
        await generation.stop()
        if generation in self._generations:
            self._generations.remove(generation)
            engine = generation.engine
            if engine and all(other.engine is not engine for other in self._generations):
                await engine.stop()

    # -- starting ------------------------------------------------------------------------------------------------------

    def _start_engine(self, handed: Handover | None = None) -> SpawnedHere | None:
        if not self._config.spawns_engine:
            return None
        engine = SpawnedHere(self._config, next(iter(self._folders.values())), handed)
        is_serving = lambda: self._serving is None or self._serving.engine is engine  # noqa: E731
        engine.task.add_done_callback(lambda task: self._on_end(task) if is_serving() else None)
        return engine

    def _start(self, engine: SpawnedHere | None) -> Generation:
        """Start a generation of routers."""
        self._last += 1
        generation = Generation(self._last, engine)
        for index in range(self._config.workers):
            generation.routers.append(self._router(generation, index))
        self._run(generation)
        return generation

    def _adopt(self, handed: Handover) -> None:
        """Look after a generation of routers that serve already, and their engine."""
        self._last, self._adapters = handed.last, handed.adapters
        self._is_announced = True
        self._serving = generation = Generation(handed.number, self._start_engine(handed))
        for index, state in enumerate(handed.routers):
            router = self._router(generation, index)
            assert isinstance(router, Supervisor), "the first router of all is the only one in this process"
            router.adopt(state)
            generation.routers.append(router)
        generation.listening, generation.ready = ({*range(len(handed.routers))} for _ in range(2))
        generation.check()
        self._run(generation)

    def _run(self, generation: Generation) -> None:
        self._generations.append(generation)
        generation.start()
        is_serving = lambda: self._serving in (None, generation)  # noqa: E731
        for task in generation.tasks:
            task.add_done_callback(lambda task: self._on_end(task) if is_serving() else None)

    def _router(self, generation: Generation, index: int) -> Child:
        count = self._config.workers
        part = replace(
            self._config,
            max_requests=_part(self._config.max_requests, index, count),
            max_queued_tokens=self._config.max_queued_tokens and _part(self._config.max_queued_tokens, index, count),
        )
        folders = {name: str(folder) for name, folder in self._folders.items()}
        socket = f"{self._private}/router-{generation.number}-{index}.sock"
        spawned = generation.engine.address if generation.engine else None
        on_line = partial(self._on_line, generation, index)

        def config() -> WorkerConfig:
            adapters = self._adapters if self._serving not in (None, generation) else []
            return WorkerConfig(part, folders, index, socket, spawned, self._is_announced, adapters)

        if generation.number == 0 and count == 1:
            parent = OwnParent(on_line, lambda: generation.restarts)
            self._alone = config().router(parent, is_alone=True)
            event_loop.prefer_streams()
            return OwnRouter(self._alone, parent)
        return Supervisor(
            f"router {index}",
            [sys.executable, "-m", "pagoda_server.router.process.main"],
            first_line=lambda: config().to_line(),
            on_line=on_line,
            stop_timeout_s=self._config.grace_s + STOP_MARGIN_S,
            ask=lambda: str(generation.restarts),
            hang_timeout_s=self._config.hang_timeout_s,
        )

    def _on_line(self, generation: Generation, index: int, line: str) -> None:
        log.debug("router %d: %s", index, line)
        if line == ENGINE_READY and generation.engine:
            generation.engine.supervisor.mark_ready()
            self._send_restarts()
        elif line == ENGINE_HANGS and generation.engine:
            generation.engine.supervisor.kill()
        elif line.startswith(ADAPTERS) and generation is self._serving:
            self._adapters = json.loads(line.removeprefix(ADAPTERS))
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
                router.send(str(generation.restarts))

    def _on_signal(self) -> None:
        """Stop on the first signal; a second one goes on to the routers and ends their grace period."""
        if self._stop.is_set():
            for generation in self._generations:
                for router in generation.routers:
                    router.terminate()
        self._stop.set()


def _part(whole: int, index: int, count: int) -> int:
    return whole * (index + 1) // count - whole * index // count

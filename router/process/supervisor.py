"""Run a child process, and restart it when it dies: the engine, or one of several routers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

from ...channel.address import HAS_SHM, SHM_PREFIX
from ...settings import EXIT_CONFIG, EngineConfig, ServeConfig
from ...settings.router import SPAWN, environment_without_secrets
from ...settings.sources import environment_without_settings
from .succession import ChildState, Inherited

log = logging.getLogger("pagoda.router")

BACKOFF_S = (0.2, 10.0)
HEALTHY_AFTER_S = 60.0  # a death after this long has a new cause: the backoff starts over
MAX_FAILED_STARTS = 5
STOP_TIMEOUT_S = 5.0
ALIVE = "alive"  # what a child prints, from its event loop, when that begins and for each line that it is sent
ENDS = "ends"  # what a child that answers prints when its event loop is about to end
ASK_EVERY_S = 1.0
SHORTEST_HANG_S = 5.0  # a pause of two seconds is none, however soon an engine shall count as dead


class ChildFailedError(Exception):
    """A child cannot be kept running; this process should exit with `exit_code`."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class EngineKeeper(Protocol):
    """What a router needs of the process that started its engine."""

    @property
    def restarts(self) -> int: ...

    def mark_ready(self) -> None:
        """Record that the engine has answered."""

    def kill(self) -> None:
        """Kill the engine, which hangs."""


class Supervisor:
    """Keeps one child process running.

    name            the child's name in the log
    command         what to run
    first_line      makes what is written to the child's standard input when it starts
    on_line         called on the event loop with each line that the child prints; None: standard output is shared
    environment     the child's; None: this process's
    stop_timeout_s  time from SIGTERM to SIGKILL
    ask             makes the line to which the child answers ALIVE; None: it answers nothing
    hang_timeout_s  time without an answer after which the child is killed; one that ENDS has stop_timeout_s, if longer

    The child's standard input is a pipe from this process. When this process ends, however it ends, the child reads
    end-of-file and exits too. The child has a process group of its own, so a terminal's Ctrl-C does not reach it.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        first_line: Callable[[], str] | None = None,
        on_line: Callable[[str], None] | None = None,
        environment: Mapping[str, str] | None = None,
        stop_timeout_s: float = STOP_TIMEOUT_S,
        ask: Callable[[], str] | None = None,
        hang_timeout_s: float = math.inf,
    ) -> None:
        self.restarts = 0
        self._name = name
        self._command = command
        self._first_line = first_line
        self._on_line = on_line
        self._environment = environment
        self._stop_timeout_s = stop_timeout_s
        self._ask = ask
        self._hang_timeout_s = hang_timeout_s
        # Others for each child, whose last lines may come late.
        self._has_answered, self._says_end = asyncio.Event(), asyncio.Event()
        self._process: subprocess.Popen[bytes] | Inherited | None = None
        self._early: subprocess.Popen[bytes] | Inherited | None = None  # started before `run`
        self._threads = ThreadPoolExecutor(2, thread_name_prefix=name)  # many children would fill the loop's own
        self._failed_starts = 0
        self._has_been_ready = False
        self._has_ever_been_ready = False
        self._is_retired = False

    def mark_ready(self) -> None:
        """Record that the child has started: a later death is not a failed start."""
        self._failed_starts = 0
        self._has_been_ready = self._has_ever_been_ready = True

    def start(self) -> None:
        """Start the child before the event loop runs; `run` then supervises it, or reports why it does not start."""
        with contextlib.suppress(OSError):
            self._process = self._early = self._start()

    def adopt(self, state: ChildState) -> None:
        """Take a child that serves already; `run` then supervises it."""
        self._process = self._early = child = Inherited(state)
        self.restarts = state.restarts
        self._has_ever_been_ready = True
        if self._on_line:
            self._listen(child, self._on_line)

    def state(self) -> ChildState | None:
        """What another program needs to adopt the child; None: there is none now."""
        process = self._process
        if process is None or process.poll() is not None or process.stdin is None:
            return None
        output = process.stdout.fileno() if process.stdout else None
        return ChildState(process.pid, process.stdin.fileno(), output, self.restarts)

    async def run(self) -> None:
        """Run the child until cancelled, which stops it, or until it ends after `retire`.

        Raises ChildFailedError when a restart cannot help.
        """
        backoff_s = BACKOFF_S[0]
        try:
            while True:
                started = time.monotonic()
                self._has_been_ready = False
                is_new = self._early is None
                try:
                    self._process, self._early = self._early or self._start(), None
                except OSError as error:
                    if not self.restarts:
                        raise ChildFailedError(f"{self._name} cannot be started: {error.strerror}", 1) from error
                    log.error("%s cannot be started: %s", self._name, error.strerror)  # there may be descriptors later
                else:
                    did = "goes on" if isinstance(self._process, Inherited) else "started"
                    log.info("%s %s, pid %d", self._name, did, self._process.pid)
                    if self._first_line and is_new:
                        self.send(self._first_line())
                    code = await self._wait_and_watch(self._process)
                    if self._is_retired:
                        log.info("%s has ended", self._name)
                        return
                    log.error("%s exited with %s", self._name, _describe(code))
                    self._judge(code)
                if time.monotonic() - started > HEALTHY_AFTER_S:
                    backoff_s = BACKOFF_S[0]
                log.info("starting %s again in %.1f s", self._name, backoff_s)
                await asyncio.sleep(backoff_s)
                if self._is_retired:
                    return
                backoff_s = min(2 * backoff_s, BACKOFF_S[1])
                self.restarts += 1
        finally:
            await self._stop()

    def kill(self) -> None:
        """Kill a child that hangs; run() starts another."""
        if self._process:
            self._process.kill()

    def retire(self, line: str) -> None:
        """Write the line that makes the child end in its time; it is not started again."""
        self._is_retired = True
        self.send(line)

    def terminate(self) -> None:
        if self._process:
            self._process.terminate()

    def send(self, line: str) -> None:
        """Write a line to the child's standard input. Ignored if the child has just died."""
        if self._process and self._process.stdin:
            try:
                self._process.stdin.write(line.encode() + b"\n")
                self._process.stdin.flush()
            except OSError:
                log.debug("%s did not receive %r", self._name, line)

    def _start(self) -> subprocess.Popen[bytes]:
        # Not the event loop's method: subprocess uses vfork, which runs no fork handlers, and gRPC's would fail here.
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if self._on_line else None,
            env=self._environment,
            process_group=0,
        )
        if self._on_line:
            self._listen(process, self._on_line)
        return process

    def _listen(self, process: subprocess.Popen[bytes] | Inherited, on_line: Callable[[str], None]) -> None:
        self._has_answered, self._says_end = asyncio.Event(), asyncio.Event()
        signs = {ALIVE: self._has_answered, ENDS: self._says_end}
        hear = lambda line: signs[line].set() if line in signs else on_line(line)  # noqa: E731
        reader = (process, asyncio.get_running_loop(), hear)
        threading.Thread(target=_read_lines, args=reader, name=f"{self._name} output", daemon=True).start()

    async def _wait_and_watch(self, process: subprocess.Popen[bytes] | Inherited) -> int:
        """Wait until the child ends, and kill it once it hangs."""
        watching = asyncio.create_task(self._kill_once_it_hangs(self._ask)) if self._ask else None
        try:
            return await self._wait(process)
        finally:
            if watching:
                watching.cancel()

    async def _kill_once_it_hangs(self, ask: Callable[[], str]) -> None:
        """Ask the child again and again once it has answered; before that it starts, or its version does not answer.

        No second question is sent before an answer: the pipe to a child that stands still would fill up. Time in which
        this process itself stood still counts as one pause.
        """
        silent_s, is_watched = 0.0, False
        self.send(ask())
        while silent_s < self._patience_s:
            began = time.monotonic()
            await asyncio.sleep(ASK_EVERY_S)
            if self._has_answered.is_set():
                self._has_answered.clear()
                silent_s, is_watched = 0.0, True
                self.send(ask())
            elif is_watched:
                silent_s += min(time.monotonic() - began, 2 * ASK_EVERY_S)
        missed = "ended" if self._says_end.is_set() else "answered"
        log.error("%s hangs: it has not %s for %.0f s", self._name, missed, silent_s)
        self.kill()

    @property
    def _patience_s(self) -> float:
        patience_s = max(self._hang_timeout_s, SHORTEST_HANG_S)
        return max(patience_s, self._stop_timeout_s) if self._says_end.is_set() else patience_s

    def _judge(self, code: int) -> None:
        # One that has served with these settings lacks something now, such as descriptors, that may soon be back.
        if code == EXIT_CONFIG and not self._has_ever_been_ready:
            raise ChildFailedError(f"{self._name} cannot serve this model with these settings", EXIT_CONFIG)
        if self._has_been_ready:
            return
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise ChildFailedError(f"{self._name} died {self._failed_starts} times before it was ready", 1)

    async def _stop(self) -> None:
        process = self._process
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            await self._wait(process, self._stop_timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            await self._wait(process)

    async def _wait(self, process: subprocess.Popen[bytes] | Inherited, timeout_s: float | None = None) -> int:
        return await asyncio.get_running_loop().run_in_executor(self._threads, process.wait, timeout_s)


class SpawnedEngine(NamedTuple):
    address: str
    supervisor: Supervisor


@contextlib.contextmanager
def spawned_engine(config: ServeConfig, folder: Path) -> Iterator[SpawnedEngine | None]:
    """Start an engine at a private address, unless `serve` names one that runs; kill it when the block ends.

    It loads while a router reads its tokenizer. The supervisor has to run from then on.
    """
    if config.engine != SPAWN:
        yield None
        return
    with _private_address(config) as address:
        supervisor = engine_supervisor(config, folder, address)
        supervisor.start()
        try:
            yield SpawnedEngine(address, supervisor)
        finally:
            supervisor.kill()


def engine_supervisor(config: ServeConfig, folder: Path, address: str) -> Supervisor:
    """A supervisor of an engine of this process's own, at an address that is private."""
    arguments = config.engine_arguments(folder, address)
    return Supervisor(
        "the engine",
        [sys.executable, "-m", "pagoda_server.engine", *arguments, "--exit-with-parent"],
        # It knows nothing of users, and has its settings from its arguments.
        environment=environment_without_settings(environment_without_secrets(), EngineConfig),
    )


def _read_lines(
    process: subprocess.Popen[bytes] | Inherited, loop: asyncio.AbstractEventLoop, on_line: Callable[[str], None]
) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        try:
            loop.call_soon_threadsafe(on_line, line.decode().rstrip("\n"))
        except RuntimeError:  # the event loop has closed
            return


def _describe(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"


@contextlib.contextmanager
def _private_address(config: ServeConfig) -> Iterator[str]:
    """An address for a spawned engine, over the configured transport; valid until the block ends."""
    if config.channel == "shm" or (config.channel == "auto" and HAS_SHM):
        yield f"{SHM_PREFIX}@pagoda-{secrets.token_hex(8)}"
        return
    with tempfile.TemporaryDirectory(prefix="pagoda-") as private:  # mode 0700: no other user reaches the socket
        yield f"unix:{private}/engine.sock"

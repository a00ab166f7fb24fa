"""Runs the engine as a child process and starts it again when it dies."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

log = logging.getLogger("pagoda.router")

CONFIG_ERROR = 2  # the engine's exit code for what no restart mends; it has said why
BACKOFF_S = (0.2, 10.0)
HEALTHY_AFTER_S = 60.0  # an engine that lived this long died of something new: the backoff starts over
MAX_FAILED_STARTS = 5
STOP_TIMEOUT_S = 5.0


class EngineFailedError(Exception):
    """The engine cannot be kept running; `exit_code` is for the router to leave with."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Supervisor:
    """
    arguments  of `python -m engine`

    The engine's standard input is a pipe from here: when this process ends, however it ends, the engine reads
    end-of-file and exits too.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._command = [sys.executable, "-m", "engine", *arguments, "--exit-with-parent"]
        self._process: subprocess.Popen[bytes] | None = None
        self._failed_starts = 0
        self._has_been_ready = False
        self.restarts = 0

    def mark_ready(self) -> None:
        """The engine has answered: what kills it from now on is not its start."""
        self._failed_starts = 0
        self._has_been_ready = True

    async def run(self) -> None:
        """Until cancelled, which stops the engine. Raises EngineFailedError when starting it again is no use."""
        backoff_s = BACKOFF_S[0]
        try:
            while True:
                started = time.monotonic()
                self._has_been_ready = False
                self._process = self._start()
                log.info("engine started, pid %d", self._process.pid)
                code = await asyncio.to_thread(self._process.wait)
                log.error("the engine exited with %s", _describe(code))
                self._judge(code)
                if time.monotonic() - started > HEALTHY_AFTER_S:
                    backoff_s = BACKOFF_S[0]
                log.info("starting the engine again in %.1f s", backoff_s)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, BACKOFF_S[1])
                self.restarts += 1
        finally:
            await self._stop()

    def kill(self) -> None:
        """Ends an engine that hangs; run() starts another."""
        if self._process:
            self._process.kill()

    def _start(self) -> subprocess.Popen[bytes]:
        # Not asyncio's way: subprocess uses vfork, which runs no fork handlers. gRPC's could not do their work here.
        return subprocess.Popen(self._command, stdin=subprocess.PIPE)

    def _judge(self, code: int) -> None:
        if self._has_been_ready:
            return
        if code == CONFIG_ERROR:
            raise EngineFailedError("the engine cannot serve this model with these settings", CONFIG_ERROR)
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise EngineFailedError(f"the engine died {self._failed_starts} times before it was ready", 1)

    async def _stop(self) -> None:
        process = self._process
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)


def _describe(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"

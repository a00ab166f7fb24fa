"""Requests that wait while no engine can take them, and the mark by which they ask for one."""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import math
import os
import stat
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from ...runtime import followed
from ...runtime.restarts import keep_running
from ...settings.router import FILE_PREFIX
from ..errors import Unavailable

log = logging.getLogger("pagoda.router")

MARK = ".wanted"  # follows the name of the file of members
MARKS_S = 1.0
MOST_BYTES = 4096  # of a mark
LOOKS_AGAIN_S = 1.0  # not every change is signalled: an engine that was to leave may stay
RETRY_S = 1.0  # what a client is advised that has waited in vain
Result = TypeVar("Result")


def mark_of(engines: str) -> Path | None:
    """The file that asks for an engine, beside the file of members that --engine names; None: it names none."""
    return _mark(Path(engines.removeprefix(FILE_PREFIX))) if engines.startswith(FILE_PREFIX) else None


def _mark(members: Path) -> Path:
    return members.with_name(members.name + MARK)


def read_mark(members: Path) -> str:
    """What was last written into the mark beside a file of members; empty: nothing that can be read."""
    try:
        return followed.read_file(_mark(members), MOST_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return ""


def _write(mark: Path, content: bytes) -> None:
    """Raises OSError, for a symbolic link and what is no regular file, too."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO would be waited for
    with open(os.open(mark, flags, 0o666), "wb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")
        file.truncate()
        file.write(content)


class Waiting:
    """Lets requests wait for an engine.

    While a new request waits, `mark` is written every second, each time with another content: whatever starts engines
    may watch it.

    wait_s  how long a new request waits; 0: it does not
    mark    None: nothing is written
    num     requests that wait now, those included that have lost an engine
    """

    def __init__(self, wait_s: float = 0.0, mark: Path | None = None) -> None:
        self.wait_s = wait_s
        self.num = 0
        self._mark = mark
        self._numbers = itertools.count()
        self._marking: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    @property
    def is_on(self) -> bool:
        """Whether a router without engines takes requests."""
        return self.wait_s > 0

    def look_again(self) -> None:
        """Have every request that waits look for an engine."""
        self._changed.set()
        self._changed = asyncio.Event()

    def end(self) -> None:
        """Let nothing wait any more: the router is about to end."""
        self.wait_s = 0.0
        self.look_again()

    async def new(self, find: Callable[[], Result], timeout_s: float | None) -> Result:
        """`found` for a new request, while `is_on`."""
        return await self.found(find, lambda: self.wait_s, timeout_s)

    async def found(self, find: Callable[[], Result], wait_s: Callable[[], float], timeout_s: float | None) -> Result:
        """What `find` returns once it does not raise Unavailable any more.

        wait_s     how long that may take; it is asked again and again
        timeout_s  seconds until the client's deadline; None: it has none

        Raises Unavailable as `find` has done last.
        """
        began, deadline_s = time.monotonic(), math.inf if timeout_s is None else timeout_s
        while True:
            changed = self._changed
            try:
                return find()
            except Unavailable as error:
                left_s = began + min(wait_s(), deadline_s) - time.monotonic()
                if left_s <= 0:
                    error.retry_after_s = error.retry_after_s or RETRY_S
                    raise
            await self._pause(changed, min(left_s, LOOKS_AGAIN_S))

    async def _pause(self, changed: asyncio.Event, timeout_s: float) -> None:
        self.num += 1
        self._ask()
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            pass
        finally:
            self.num -= 1

    def _ask(self) -> None:
        if self._mark is not None and self.is_on and self._marking is None:
            marking = keep_running("the call for an engine", partial(self._keep_marking, self._mark), log)
            self._marking = asyncio.create_task(marking)

    async def _keep_marking(self, mark: Path) -> None:
        fault = ""
        while self.num and self.is_on:
            content = f"{os.getpid()} {time.time_ns()} {next(self._numbers)}\n"
            try:
                await followed.in_daemon(partial(_write, mark, content.encode()))
            except OSError as error:
                if str(error) != fault:
                    log.error("requests wait, but cannot ask for an engine: %s: %s", mark, error.strerror)
                fault = str(error)
            await asyncio.sleep(MARKS_S)
        self._marking = None

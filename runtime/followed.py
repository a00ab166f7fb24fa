"""Files that are read again when they change: bounded reads, and a loop that waits until a change is complete."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

from .restarts import keep_running

POLL_S = 0.25

Stamps: TypeAlias = tuple[tuple[int, ...] | None, ...]
Result = TypeVar("Result")
Content = TypeVar("Content")


def read_file(path: Path, max_bytes: int) -> bytes:
    """Read a regular file. Raises OSError, or ValueError for another kind of file or a larger one."""
    # A FIFO, which is opened without waiting, would have no end.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("is not a regular file")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"has more than {max_bytes} bytes")
    return content


def stamps(paths: Sequence[Path]) -> Stamps:
    """What changes with the files; None for one that is not there."""
    return tuple(map(_stamp, paths))


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class Followed(Protocol[Content]):
    """What is made of files.

    name   its name in the log, a plural
    paths  the files
    seen   their stamps when they were last read
    """

    name: str
    seen: Stamps

    @property
    def paths(self) -> Sequence[Path]: ...

    def read(self) -> Content:
        """Read the files. Called in a thread. Raises an exception whose text says in one line what is wrong."""

    def adopt(self, content: Content) -> None: ...


def wait_until_read(
    name: str, paths: Sequence[Path], read: Callable[[], object], error_type: type[Exception], log: logging.Logger
) -> None:
    """Return when the files can be read: a router that starts late has no older content to go on with."""
    while True:
        seen = stamps(paths)
        try:
            read()
            return
        except error_type as error:
            log.error("this router waits for %s: %s", name, error)
        while stamps(paths) == seen:
            time.sleep(POLL_S)


async def follow(followed: Followed[Content], error_type: type[Exception], log: logging.Logger) -> None:
    """Read the files whenever they have changed, once they rest: a program that writes them may do so in parts.

    An exception of `error_type` is logged, and the content stays as it was. So it does after any other exception.
    """
    await keep_running(f"the reader of {followed.name}", partial(_follow, followed, error_type, log), log)


async def _follow(followed: Followed[Content], error_type: type[Exception], log: logging.Logger) -> None:
    last = followed.seen
    while True:
        await asyncio.sleep(POLL_S)
        before, last = last, await in_daemon(partial(stamps, followed.paths))
        if last == followed.seen or last != before:
            continue
        followed.seen = last
        try:
            followed.adopt(await in_daemon(followed.read))
        except error_type as error:
            log.error("%s stay as they were: %s", followed.name, error)
        else:
            log.info("read %s again", followed.name)


async def in_daemon(work: Callable[[], Result]) -> Result:
    """Work in a thread that nothing waits for when the process ends: a remote folder may never answer."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(done: Callable[[], None]) -> None:
        if not future.done():  # cancelled
            done()

    def run() -> None:
        try:
            done = partial(future.set_result, work())
        except Exception as error:
            done = partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the event loop has closed
            loop.call_soon_threadsafe(settle, done)

    threading.Thread(target=run, name="followed files", daemon=True).start()
    return await future

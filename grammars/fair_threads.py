"""A few threads that work for many tenants in turn, with a bound on what waits."""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

Result = TypeVar("Result")

IDLE_S = 1.0  # without a job, before memory is given back


class _MallInfo(ctypes.Structure):
    """mallinfo2's result."""

    _fields_ = tuple(
        (f"field{index}" if name == "" else name, ctypes.c_size_t)
        for index, name in enumerate(("", "", "", "", "hblkhd", "", "", "uordblks", "", ""))
    )


def allocated_bytes() -> int:
    """Return the bytes that are allocated outside of Python's own pools; 0 where the C library does not count them."""
    with suppress(OSError, AttributeError):
        count = ctypes.CDLL(None).mallinfo2
        count.restype = _MallInfo
        found = count()
        return int(found.uordblks + found.hblkhd)
    return 0


def give_memory_back() -> None:
    """Have the allocator return what is free to the system, where it can: threads' arenas keep it otherwise."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class QueueFull(Exception):
    """Too much work waits already. The message is for the client."""


class FairThreads:
    """Runs one job of each tenant that has any, then the next one of each (round robin).

    most      jobs that may wait
    most_own  jobs of one tenant that may wait
    When there has been no job for a moment, the memory that was freed is given back to the system.
    """

    def __init__(
        self,
        num_threads: int,
        name: str,
        *,
        most: int = 1024,
        most_own: int = 64,
    ) -> None:
        self._num_threads = num_threads
        self._name = name
        self._most = most
        self._most_own = most_own
        self._waiting: OrderedDict[str, deque[tuple[Future[object], Callable[[], object]]]] = OrderedDict()
        self._num_waiting = 0
        self._changed = threading.Condition()
        self._is_started = False

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    def submit(self, tenant: str, work: Callable[[], Result]) -> Future[Result]:
        """Queue a job. It leaves the queue when its future is cancelled. Raises QueueFull."""
        future: Future[Result] = Future()
        with self._changed:
            own = self._waiting.setdefault(tenant, deque())
            if len(own) >= self._most_own or self._num_waiting >= self._most:
                whose, most = ("your", self._most_own) if len(own) >= self._most_own else ("all", self._most)
                if not own:
                    del self._waiting[tenant]
                raise QueueFull(f"{most} of {whose} grammars wait to be compiled, which is the limit")
            own.append((future, work))  # type: ignore[arg-type]
            self._num_waiting += 1
            self._changed.notify()
            if not self._is_started:
                self._is_started = True
                for _ in range(self._num_threads):
                    threading.Thread(target=self._run, name=self._name, daemon=True).start()
        future.add_done_callback(lambda done: self._cancelled(tenant, done) if done.cancelled() else None)
        return future

    def _cancelled(self, tenant: str, future: Future[Result]) -> None:
        with self._changed:
            own = self._waiting.get(tenant, deque())
            left = deque(each for each in own if each[0] is not future)
            self._num_waiting -= len(own) - len(left)
            if left:
                self._waiting[tenant] = left
            else:
                self._waiting.pop(tenant, None)

    def _run(self) -> None:
        while True:
            if (job := self._next(IDLE_S)) is None:
                give_memory_back()
                job = self._next(None)
            assert job is not None, "it waits for one"
            future, work = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # a panic of a library in Rust derives from nothing narrower
                    future.set_exception(error)
            del future, work, job

    def _next(self, timeout_s: float | None) -> tuple[Future[object], Callable[[], object]] | None:
        """Wait for a job, at most so long."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiting, timeout_s):
                return None
            tenant, own = self._waiting.popitem(last=False)
            job = own.popleft()
            if own:
                self._waiting[tenant] = own
            self._num_waiting -= 1
            return job

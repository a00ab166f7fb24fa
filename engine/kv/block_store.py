"""The thread that moves blocks between host memory and a BlockFile, so that the engine's loop never waits for a disk.

The loop posts jobs and takes the outcome of each later. Reads come first, because sequences wait for them.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ..core.step import StepPlan
from .block_file import BlockFile, StoredBlock

log = logging.getLogger("pagoda.engine")

_REFRESH_EVERY_S = 1.0
_LOG_EVERY_S = 60.0  # a full disk fails every write


class HostRows(Protocol):
    """A runner's host blocks, as the store needs them."""

    def host_row(self, host: int) -> memoryview:
        """Return the bytes of a host block, to be read and written by any thread."""

    def copy(self, plan: StepPlan) -> None:
        """Make the saves and loads of a plan that has nothing else, now. No step is in flight."""


@dataclass(frozen=True, slots=True)
class Done:
    """What became of a host block: `is_ok` means that it was read or written.

    seconds  its part of the job's time
    """

    host: int
    is_ok: bool
    seconds: float


Job: TypeAlias = Callable[[], None]


class BlockStore:
    """
    file  the blocks; used by the store's thread alone, except for `holds`
    rows  host memory

    All methods but `work` are for the loop's thread. Without `start`, whoever calls `work` does the thread's work.
    """

    def __init__(self, file: BlockFile, rows: HostRows) -> None:
        self.rows = rows
        self._file = file
        self._reads: deque[Job] = deque()
        self._others: deque[Job] = deque()
        self._posted: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._wake: Callable[[], None] = lambda: None
        self._num_clears_posted = self._num_cleared = 0  # what the file holds does not count between the two
        self._is_usable = True
        self._refreshed_at = time.monotonic()
        self._logged_at = -_LOG_EVERY_S

    def start(self, wake: Callable[[], None]) -> None:
        """Start the thread, which ends with the process. It calls `wake` after each job that has an outcome."""
        self._wake = wake
        threading.Thread(target=self._run, name="block-store", daemon=True).start()

    def __len__(self) -> int:
        return len(self._file)

    @property
    def num_damaged(self) -> int:
        return self._file.num_damaged

    def holds(self, address: bytes) -> bool:
        return self._is_usable and self._num_clears_posted == self._num_cleared and self._file.holds(address)

    def read(self, wanted: Sequence[tuple[bytes, int]]) -> None:
        """Read blocks of these addresses into host blocks."""
        self._post(self._reads, lambda: self._read(wanted))

    def write(self, blocks: Sequence[tuple[StoredBlock, int]]) -> None:
        """Write blocks from host blocks."""
        self._post(self._others, lambda: self._write(blocks))

    def touch(self, addresses: Sequence[bytes]) -> None:
        """Note that blocks were used."""
        self._post(self._others, lambda: self._file.touch(addresses))

    def refresh(self) -> None:
        """Find out what other engines have written, if that was not done just now."""
        if (now := time.monotonic()) - self._refreshed_at >= _REFRESH_EVERY_S:
            self._refreshed_at = now
            self._post(self._others, self._file.refresh)

    def clear(self) -> None:
        """Forget all blocks, those of writes that were posted before, too."""
        self._num_clears_posted += 1
        self._post(self._others, self._clear)

    def take_done(self) -> list[Done]:
        """Return the outcomes since the last call."""
        return [self._done.get_nowait() for _ in range(self._done.qsize())]

    def latest(self, most: int) -> list[bytes]:
        """See BlockFile. Call this, and `load`, before `start`."""
        return self._file.latest(most)

    def load(self, address: bytes, host: int) -> bool:
        """Read a block into a host block, now; return whether that succeeded."""
        return self._file.read(address, self.rows.host_row(host))

    # -- the thread ---------------------------------------------------------------------------------------------------

    def work(self) -> bool:
        """Do the next job; return False if there is none."""
        if not self._reads and not self._others:
            return False
        job = (self._reads or self._others).popleft()
        try:
            job()
        except OSError as error:
            if (now := time.monotonic()) - self._logged_at >= _LOG_EVERY_S:
                self._logged_at = now
                log.warning("the block store: %s; no request fails because of it", error)
        except Exception:
            log.exception("a job of the block store failed")
        return True

    def _post(self, jobs: deque[Job], job: Job) -> None:
        jobs.append(job)
        self._posted.put(None)

    def _run(self) -> None:
        while True:
            self._posted.get()
            self.work()

    def _read(self, wanted: Sequence[tuple[bytes, int]]) -> None:
        started, ok = time.perf_counter(), list[bool]()
        try:
            for address, host in wanted:
                ok.append(self._file.read(address, self.rows.host_row(host)))
        finally:
            self._report([host for _, host in wanted], ok, started)

    def _write(self, blocks: Sequence[tuple[StoredBlock, int]]) -> None:
        started, ok = time.perf_counter(), list[bool]()
        try:
            self._file.write((block, self.rows.host_row(host)) for block, host in blocks)
            ok = [True] * len(blocks)
        finally:
            self._report([host for _, host in blocks], ok, started)

    def _clear(self) -> None:
        try:
            self._file.clear()
        except OSError:
            self._is_usable = False  # rather than serve what was to be forgotten
            raise
        finally:
            self._num_cleared += 1

    def _report(self, hosts: list[int], ok: list[bool], started: float) -> None:
        seconds = (time.perf_counter() - started) / len(hosts)
        for host, is_ok in zip(hosts, ok + [False] * (len(hosts) - len(ok)), strict=True):
            self._done.put(Done(host, is_ok, seconds))
        self._wake()

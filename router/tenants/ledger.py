"""What tenants use of their quotas, in a file that several routers of a host map into their memory.

One row for each tenant, found by the hash of its name: its two buckets, and how many requests each router runs. A lock
on the file's first byte guards all rows. A router that has taken a place locks the place's own byte as long as it
lives; when it is killed the kernel releases both, and what it ran is no longer counted.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from ..errors import ConfigError

log = logging.getLogger("pagoda.router")

LOCK_S = 0.02  # for which the event loop may wait
STUCK_S = 1.0  # after which a lock that was not given up is waited for again
PLACES = 128  # routers of a host
ROWS = 1 << 13  # tenants with a quota, those of earlier tenants files included
NUM_NUMBERS = 5  # of a bucket
_MAGIC = b"pagoda quotas 1\n"
_FIRST_ROW = 4096
_KEY_BYTES = 32
_ROW_BYTES = _KEY_BYTES + 2 * NUM_NUMBERS * 8 + PLACES * 4
_SIZE = _FIRST_ROW + ROWS * _ROW_BYTES  # 5 MB, of which the file system stores what was written


class Numbers(Protocol):
    def __getitem__(self, at: int, /) -> float: ...

    def __setitem__(self, at: int, number: float, /) -> None: ...

    def __iter__(self) -> Iterator[float]: ...


class Row(Protocol):
    """What one tenant uses. The ledger must be locked.

    requests, tokens  the numbers of its two buckets, all zero at first
    """

    requests: Numbers
    tokens: Numbers

    @property
    def live(self) -> int:
        """Requests of all routers, those included that died since the last call of `forget_dead`."""

    def forget_dead(self) -> None:
        """Count the requests of routers that have died no longer."""

    def add(self, count: int) -> None:
        """Count so many requests more of this router."""


class OwnLedger:
    """What tenants use of one router alone."""

    def locked(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def row(self, tenant: str) -> Row:
        return _OwnRow()


class _OwnRow:
    def __init__(self) -> None:
        self.live = 0
        self.requests: Numbers = [0.0] * NUM_NUMBERS
        self.tokens: Numbers = [0.0] * NUM_NUMBERS

    def forget_dead(self) -> None:
        """Do nothing: no other router is counted."""

    def add(self, count: int) -> None:
        self.live += count


class SharedLedger:
    """A ledger in a file. Raises ConfigError for a file that is not one, or if every place is taken."""

    def __init__(self, path: Path) -> None:
        self._stuck_until = 0.0
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
            with self.locked():
                self._prepare(path)
            self._memory = mmap.mmap(self._file, _SIZE)
        except OSError as error:
            raise ConfigError(f"--quotas-file: cannot use {path}: {error.strerror}") from error
        self._place = self._take_place(path)
        self._rows: dict[str, Row] = {}

    def _prepare(self, path: Path) -> None:
        found = os.fstat(self._file)
        if stat.S_ISREG(found.st_mode) and not found.st_size:
            os.ftruncate(self._file, _SIZE)
            os.pwrite(self._file, _MAGIC, 0)
        elif found.st_size != _SIZE or os.pread(self._file, len(_MAGIC), 0) not in (_MAGIC, bytes(len(_MAGIC))):
            raise ConfigError(f"--quotas-file: {path} is something else")

    def _take_place(self, path: Path) -> int:
        for place in range(PLACES):
            if self._try_lock(place):
                return place
        raise ConfigError(f"--quotas-file: {PLACES} routers use {path} already")

    def _try_lock(self, place: int) -> bool:
        """Lock a place's byte, unless a router that lives has it."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1 + place)
        except OSError:
            return False
        return True

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep the other routers out, who hold the lock for microseconds.

        One that was stopped meanwhile would stop all others. They go on without the lock then: an update may be lost,
        and the error is one request.
        """
        has_lock = self._lock()
        try:
            yield
        finally:
            if has_lock:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, 0)

    def _lock(self) -> bool:
        patience_s = LOCK_S if time.monotonic() >= self._stuck_until else 0.0
        given_up_at = time.monotonic() + patience_s
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
                return True
            except OSError:
                if time.monotonic() >= given_up_at:
                    if patience_s:
                        self._stuck_until = time.monotonic() + STUCK_S
                    return False
            time.sleep(LOCK_S / 100)

    def row(self, tenant: str) -> Row:
        """The row of a tenant, the same for all routers. Without room for one more, one of this router alone."""
        if tenant not in self._rows:
            if (offset := self._find(hashlib.sha256(tenant.encode()).digest())) is None:
                log.warning("the quotas file is full: this router counts for itself what some tenants use")
                self._rows[tenant] = _OwnRow()
            else:
                self._rows[tenant] = _SharedRow(self, offset)
        return self._rows[tenant]

    def _find(self, key: bytes) -> int | None:
        first = int.from_bytes(key[:8], "little")
        for step in range(ROWS):
            offset = _FIRST_ROW + (first + step) % ROWS * _ROW_BYTES
            found = self._memory[offset : offset + _KEY_BYTES]
            if found == bytes(_KEY_BYTES):
                self._memory[offset : offset + _KEY_BYTES] = key
                return offset
            if found == key:
                return offset
        return None

    def close(self) -> None:
        """Give the place up. No row may be used any more."""
        os.close(self._file)

    def numbers(self, offset: int, count: int) -> memoryview[float]:
        return memoryview(self._memory)[offset : offset + 8 * count].cast("d")

    def counts(self, offset: int) -> memoryview[int]:
        return memoryview(self._memory)[offset : offset + 4 * PLACES].cast("i")

    @property
    def place(self) -> int:
        return self._place

    def is_dead(self, place: int) -> bool:
        """Whether no router lives that has this place."""
        if place == self._place or not self._try_lock(place):
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, 1 + place)
        return True


class _SharedRow:
    def __init__(self, ledger: SharedLedger, offset: int) -> None:
        self._ledger = ledger
        offset += _KEY_BYTES
        self.requests: Numbers = ledger.numbers(offset, NUM_NUMBERS)
        self.tokens: Numbers = ledger.numbers(offset + 8 * NUM_NUMBERS, NUM_NUMBERS)
        self._counts = ledger.counts(offset + 16 * NUM_NUMBERS)
        self._counts[ledger.place] = 0  # of a router that had the place before

    @property
    def live(self) -> int:
        return sum(self._counts)

    def forget_dead(self) -> None:
        for place, count in enumerate(self._counts):
            if count and self._ledger.is_dead(place):
                self._counts[place] = 0

    def add(self, count: int) -> None:
        self._counts[self._ledger.place] += count

"""The cache of imported models. One process builds each model once, and it appears whole or not at all.

models/NAME    published folders, each with its manifest
work/NAME      an import in progress: the folder being built, and finished stages, which the next try reuses
locks/NAME     held by the process that imports NAME; the kernel releases it if that process dies
in-use/…       held together by the processes that serve a model
sources/…      checksums of GGUF files, so that a file is not hashed at every start
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .files import is_intact, remove_tree, seal, sync
from .folder import CheckpointError
from .progress import Progress

LOCK_POLL_S = 0.1
DRAFT = "draft"

# Called with a folder for stages worth keeping and the empty folder to fill. Returns checksums that it knows, by name.
Build = Callable[[Path, Path], Mapping[str, str] | None]


@dataclass(frozen=True, slots=True)
class Cache:
    root: Path

    @classmethod
    def default(cls) -> Cache:
        """$PAGODA_CACHE, else $XDG_CACHE_HOME/pagoda, else ~/.cache/pagoda."""
        if own := os.environ.get("PAGODA_CACHE"):
            return cls(Path(own).expanduser().absolute())
        base = os.environ.get("XDG_CACHE_HOME")
        return cls((Path(base) if base else Path.home() / ".cache") / "pagoda")

    def published(self, name: str) -> Path | None:
        folder = self.root / "models" / name
        return folder if is_intact(folder) else None

    def published_names(self) -> list[str]:
        models = self.root / "models"
        return sorted(path.name for path in models.iterdir() if is_intact(path)) if models.is_dir() else []

    def obtain(self, name: str, build: Build, progress: Progress) -> Path:
        """Return the published folder `name`, building it if it is missing, damaged or of an older format.

        Raises CheckpointError if the build does, or if the disk is full or cannot be written.
        """
        if folder := self.published(name):
            return folder
        try:
            with self.locked(name, progress):
                return self.published(name) or self._build(name, build, progress)
        except OSError as error:
            raise self._storage_error(name, error) from error

    def hold(self, folder: Path) -> None:
        """Keep a model of this cache from being removed for as long as this process lives."""
        if self.root in folder.parents:
            with suppress(OSError):  # a cache that cannot be written has nothing to remove
                fcntl.flock(self._use_lock(folder), fcntl.LOCK_SH)  # stays open: the process's end releases it

    def remove(self, folder: Path, remove: Callable[[], None]) -> None:
        """Call `remove` while nothing holds the folder. Raises CheckpointError if a process serves it."""
        lock = self._use_lock(folder)
        try:
            if not _try_lock(lock):
                raise CheckpointError(f"{folder.name} is in use: a process serves it")
            remove()
        finally:
            os.close(lock)

    def remove_published(self, name: str) -> None:
        """Remove a published model and what an interrupted import of it left. Raises as `remove` does."""
        folder = self.root / "models" / name

        def remove() -> None:
            with self._lock_file(name) as lock:
                if not _try_lock(lock):
                    raise CheckpointError(f"{name} is being imported")
                doomed = self.root / "work" / name / DRAFT
                remove_tree(doomed.parent)
                if folder.is_dir():
                    doomed.parent.mkdir(parents=True)
                    folder.rename(doomed)  # so that it disappears whole
                    remove_tree(doomed.parent)

        self.remove(folder, remove)

    def _use_lock(self, folder: Path) -> int:
        (self.root / "in-use").mkdir(parents=True, exist_ok=True)
        key = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
        return os.open(self.root / "in-use" / key, os.O_RDWR | os.O_CREAT, 0o644)

    def _build(self, name: str, build: Build, progress: Progress) -> Path:
        self._remove_abandoned_drafts()
        folder, work = self.root / "models" / name, self.root / "work" / name
        draft = work / DRAFT
        remove_tree(draft)
        for partial in work.glob("*.partial"):
            partial.unlink()
        draft.mkdir(parents=True)
        try:
            seal(draft, progress, build(work, draft))
            folder.parent.mkdir(exist_ok=True)
            remove_tree(folder)
            draft.rename(folder)
            sync(folder.parent)
        finally:
            remove_tree(draft)
            with suppress(OSError):  # what a download has left stays for the next try
                work.rmdir()
        remove_tree(work)
        return folder

    def _remove_abandoned_drafts(self) -> None:
        """Remove what killed imports were building: it is large, and their next try builds it again."""
        for draft in (self.root / "work").glob(f"*/{DRAFT}"):
            with self._lock_file(draft.parent.name) as lock:
                if _try_lock(lock):
                    remove_tree(draft)

    @contextmanager
    def locked(self, name: str, progress: Progress) -> Iterator[None]:
        """Be the one process that imports `name`."""
        with self._lock_file(name) as lock:
            waiting = f"Waiting for another process to import {name}"
            if not _try_lock(lock):
                progress(waiting, 0, 0)
                while not _try_lock(lock):
                    time.sleep(LOCK_POLL_S)
                progress(waiting, 1, 1)
            yield

    @contextmanager
    def _lock_file(self, name: str) -> Iterator[int]:
        locks = self.root / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        lock = os.open(locks / name, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            yield lock
        finally:
            os.close(lock)

    def _storage_error(self, name: str, error: OSError) -> CheckpointError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return CheckpointError(f"the disk that holds {self.root} is full: {name} was not imported")
        return CheckpointError(f"{name} was not imported into {self.root}: {error}")


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

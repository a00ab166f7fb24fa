"""A cache of parsed headers: a process parses the header of each file once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ParsedOnce(Generic[T]):
    """A parser of files that remembers what it returned, until the file's size, inode or modification time changes.

    Several threads that ask for the same file parse it once.
    """

    def __init__(self, parse: Callable[[Path], T]) -> None:
        self._parse = parse
        self._known: dict[Path, tuple[tuple[int, ...], T]] = {}
        self._lock = Lock()
        _PARSERS.append(self)

    def __call__(self, path: Path) -> T:
        with self._lock:
            stat = path.stat()
            identity = stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
            if path not in self._known or self._known[path][0] != identity:
                self._known[path] = identity, self._parse(path)
            return self._known[path][1]

    def forget(self) -> None:
        with self._lock:
            self._known.clear()


_PARSERS: list[ParsedOnce[Any]] = []


def forget_headers() -> None:
    """Let go of what was parsed, so that no file stays mapped: one that is cut while it is would end the process."""
    for parser in _PARSERS:
        parser.forget()

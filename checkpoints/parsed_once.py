"""Headers that a process parses once, whoever asks for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from threading import Lock
from typing import TypeVar

T = TypeVar("T")


def parsed_once(parse: Callable[[Path], T]) -> Callable[[Path], T]:
    """Make a parser remember what it returned for a file until that file's size, inode or modification time changes.

    Several threads that ask for the same file parse it once. What is remembered lives as long as the process.
    """
    known: dict[Path, tuple[tuple[int, ...], T]] = {}
    lock = Lock()

    @wraps(parse)
    def parsed(path: Path) -> T:
        with lock:
            stat = path.stat()
            identity = stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
            if path not in known or known[path][0] != identity:
                known[path] = identity, parse(path)
            return known[path][1]

    return parsed

"""Reports of progress during long operations."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Protocol, TextIO


class Progress(Protocol):
    def __call__(self, description: str, done: int, total: int, /) -> None:
        """Report `done` of `total` bytes of the stage that `description` names; a `total` of 0 is unknown."""


def no_progress(description: str, done: int, total: int, /) -> None:
    pass


class PrintedProgress:
    """Prints lines for logs: one when a stage begins, at most one every `interval_s`, and one when it ends."""

    def __init__(self, stream: TextIO | None = None, interval_s: float = 2.0) -> None:
        self._stream = stream or sys.stderr
        self._interval_s = interval_s
        self._description = ""
        self._next_at = 0.0
        self._is_complete = False

    def __call__(self, description: str, done: int, total: int, /) -> None:
        if description != self._description:
            self._description, self._next_at, self._is_complete = description, 0.0, False
        completes = total > 0 and done >= total and not self._is_complete
        now = time.monotonic()
        if now < self._next_at and not completes:
            return
        if self._is_complete:
            return
        self._next_at, self._is_complete = now + self._interval_s, completes
        amount = f" {done / 1e6:.0f} of {total / 1e6:.0f} MB" if total >= 1_000_000 else ""
        with contextlib.suppress(OSError):  # a disk without room for the log ends no download and no start
            print(f"{description}{amount}", file=self._stream, flush=True)

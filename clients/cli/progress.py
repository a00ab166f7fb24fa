"""Progress of downloads, imports and loading on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from pagoda_server.checkpoints import Progress


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """Show progress on standard error: as bars on a terminal, else as plain lines."""
    if not sys.stderr.isatty():
        from pagoda_server.checkpoints import PrintedProgress

        yield PrintedProgress()
        return
    with ProgressBars() as bars:
        yield bars


class ProgressBars:
    """A checkpoints.Progress that draws one bar per part; a full bar stays on the screen."""

    def __init__(self) -> None:
        self._bars: RichProgress | None = None
        self._task: TaskID | None = None
        self._description = ""
        self._is_complete = False

    def __call__(self, description: str, done: int, total: int, /) -> None:
        if description != self._description:
            self._begin(description)
        if self._bars is None or self._task is None:
            return
        self._bars.update(self._task, completed=done, total=total or None)
        if total and done >= total:
            self._stop()

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _begin(self, description: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

        self._stop()
        self._description = description
        columns = TextColumn("{task.description:<38}"), BarColumn(), DownloadColumn(), TimeElapsedColumn()
        self._bars = Progress(*columns, console=Console(stderr=True))
        self._task = self._bars.add_task(description, total=None)
        self._bars.start()

    def _stop(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = self._task = None

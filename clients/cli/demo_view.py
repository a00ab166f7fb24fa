"""Eight streams at once, as one sees them come: panels on a terminal, a running log elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pagoda_server.cli.stream_meter import StreamMeter

COLUMNS = 2
LOG_WIDTH = 110


@dataclass(slots=True)
class Stream:
    """One prompt and what has come of it so far."""

    prompt: str
    is_chat: bool
    text: str = ""
    is_finished: bool = False
    meter: StreamMeter = field(default_factory=StreamMeter)

    @property
    def title(self) -> str:
        return f"{'chat' if self.is_chat else 'text'} › {self.prompt.strip()}"


class View(Protocol):
    def __enter__(self) -> View: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, stream: Stream, delta: str) -> None:
        """The stream has grown by this text, or has finished."""


def view_of(streams: list[Stream], console: Console) -> View:
    return Panels(streams, console) if console.is_terminal else Log(streams, console)


class Panels:
    """A panel a stream, which shows the end of its text."""

    def __init__(self, streams: list[Stream], console: Console) -> None:
        self._streams = streams
        self._console = console
        self._live = Live(get_renderable=self._grid, console=console, refresh_per_second=12, transient=True)

    def __enter__(self) -> Panels:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, stream: Stream, delta: str) -> None:
        pass  # the live display looks at the streams by itself

    def _grid(self) -> Table:
        num_rows = -(-len(self._streams) // COLUMNS)
        height = max(4, (self._console.height - 1) // num_rows)
        width = self._console.width // COLUMNS
        grid = Table.grid()
        for _ in range(COLUMNS):
            grid.add_column(width=width)
        for row in range(num_rows):
            grid.add_row(*(self._panel(s, width, height) for s in self._streams[row * COLUMNS : (row + 1) * COLUMNS]))
        return grid

    def _panel(self, stream: Stream, width: int, height: int) -> Panel:
        lines = Text(stream.text).wrap(self._console, width - 4)[-(height - 2) :]
        style = "green" if stream.is_finished else "cyan" if stream.text else "dim"
        title = Text(stream.title, overflow="ellipsis", no_wrap=True)
        title.truncate(width - 6, overflow="ellipsis")
        figures = Text(str(stream.meter), style="dim") if stream.text else None
        return Panel(Text("\n").join(lines), title=title, title_align="left", subtitle=figures, subtitle_align="right",
                     height=height, width=width, border_style=style)  # fmt: skip


class Log:
    """Every delta in the order of arrival behind its stream's number: `3│ Stockholm`. Newlines show as ⏎."""

    def __init__(self, streams: list[Stream], console: Console) -> None:
        self._streams = streams
        self._console = console
        self._line = ""

    def __enter__(self) -> Log:
        for number, stream in enumerate(self._streams, 1):
            self._print(f"{number}│ {stream.title}")
        self._print("")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._print(self._line)

    def show(self, stream: Stream, delta: str) -> None:
        if not delta:
            return
        number = next(i for i, other in enumerate(self._streams, 1) if other is stream)
        piece = f"{number}│{delta} ".replace("\n", "⏎")
        if len(self._line) + len(piece) > LOG_WIDTH:
            self._print(self._line)
            self._line = ""
        self._line += piece

    def _print(self, line: str) -> None:
        self._console.out(line, highlight=False)
        self._console.file.flush()

"""`make demo`: a real server on the default model, and eight prompts streamed from it at once.

`python -m pagoda_server.cli.demo MODEL [OPTIONS]` runs it with another model and further options of `pagoda serve`.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pagoda.aio import AsyncClient
from pagoda.errors import PagodaError
from pagoda_server.checkpoints import DEFAULT_MODEL, CheckpointError, resolve
from pagoda_server.cli import INTERRUPTED
from pagoda_server.cli.progress import shown_progress
from pagoda_server.cli.server_process import ServerError, ServerProcess, wait_shown
from pagoda_server.cli.terminal import StreamMeter

# -- the streams on the screen -----------------------------------------------------------------------------------------


COLUMNS = 2
LOG_WIDTH = 110


@dataclass(slots=True)
class Stream:
    """One prompt and its output so far."""

    prompt: str
    is_chat: bool
    text: str = ""
    is_finished: bool = False
    meter: StreamMeter = field(default_factory=StreamMeter)

    @property
    def title(self) -> str:
        return f"{'chat' if self.is_chat else 'text'} › {self.prompt.strip()}"


class View(Protocol):
    """Shows the streams as they grow, for as long as its block runs."""

    def __enter__(self) -> View: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, stream: Stream, delta: str) -> None:
        """Show that the stream has grown by `delta`, or has finished."""


def view_of(streams: list[Stream], console: Console) -> View:
    return Panels(streams, console) if console.is_terminal else Log(streams, console)


class Panels:
    """A panel per stream, which shows the end of its text."""

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
        pass  # the live display reads the streams itself

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
    """Every delta in order of arrival, after its stream's number: `3│ Stockholm`. Newlines show as ⏎."""

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


# -- the demo ----------------------------------------------------------------------------------------------------------


MAX_TOKENS = 80
PAGE = "http://127.0.0.1:8000"  # of `make serve`
TIMEOUT_S = 300.0
CHATS = [
    "What is the capital of Sweden?",
    "Why is the sky blue? Answer in two sentences.",
    "Write a short poem about the sea.",
    "Give me three tips for learning a language.",
    "What is the difference between a river and a lake?",
]
TEXTS = [
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "Photosynthesis is the process by which",
]


def main(model: str = DEFAULT_MODEL, *serve_options: str) -> int:
    """Run the demo. Returns 0, or 1 after printing a message and the server's last log lines to standard error."""
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    # SIGTERM acts as Ctrl-C, which unwinds asyncio and the server's block; by default it would leave the server behind.
    # A script's background job starts with SIGINT ignored, which would then ignore SIGTERM too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    server = ServerProcess(["--model", model, *serve_options])
    try:
        with shown_progress() as progress:
            resolve(model, progress)
        with server:
            waited_s = wait_shown(server, model, console)
            console.print(f"{model}: ready at {server.address} after {waited_s:.1f} s\n", markup=False)
            streams = asyncio.run(_stream_all(server.address, console))
            server.stop()
    except (ServerError, PagodaError, CheckpointError, OSError) as error:
        errors.print(Text.assemble(("error: ", "red"), str(error)))
        for line in server.log:
            errors.print(f"  {line}", style="dim", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    _report(streams, console)
    return 0


async def _stream_all(address: str, console: Console) -> list[Stream]:
    streams = [Stream(prompt, is_chat=True) for prompt in CHATS] + [Stream(prompt, is_chat=False) for prompt in TEXTS]
    async with AsyncClient(address, timeout_s=TIMEOUT_S) as client:
        with view_of(streams, console) as view:
            await asyncio.gather(*(_stream(client, stream, view) for stream in streams))
    return streams


async def _stream(client: AsyncClient, stream: Stream, view: View) -> None:
    stream.meter = StreamMeter()
    message, prompt = (stream.prompt, None) if stream.is_chat else (None, stream.prompt)
    async for chunk in client.generate(message, prompt=prompt, max_tokens=MAX_TOKENS):
        stream.meter.add(len(chunk.tokens))
        stream.text += chunk.text
        stream.is_finished = chunk.finish_reason is not None
        view.show(stream, chunk.text)


def _report(streams: list[Stream], console: Console) -> None:
    for stream in streams:
        console.print(stream.title, style="bold", markup=False)
        console.print(stream.text.strip() if stream.is_chat else stream.prompt + stream.text.rstrip(), markup=False)
        console.print(f"{stream.meter}\n", style="dim", markup=False)
    num_tokens = sum(stream.meter.num_tokens for stream in streams)
    wall_s = max(stream.meter.last for stream in streams) - min(stream.meter.start for stream in streams)
    total = f"{num_tokens} tokens in {wall_s:.2f} s, {num_tokens / wall_s:.1f} tokens/s"
    console.print(f"{len(streams)} streams at once: {total}", style="bold")
    console.print(f"\nA chat, and the engine at work in pictures: make serve, then open {PAGE}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

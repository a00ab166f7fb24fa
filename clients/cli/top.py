"""`pagoda top`: a running server's batch, blocks, rates and latencies, in a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagoda_server.cli.terminal import (
    DEFAULT_ADDRESS,
    Address,
    Tenant,
    Tls,
    TlsCa,
    Token,
    connect,
    errors_reported,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from pagoda.aio import AsyncClient
    from pagoda_server.cli.top_board import Board

TIMEOUT_S = 10.0  # of each call but WatchLoad
INFO_S = 5.0
FIRST_TRACE_S = 10.0  # rates and latencies of these seconds are there from the start
LONGEST_TRACE_S = 30.0
OVERLAP_S = 0.25  # of consecutive traces, so that none misses a step
RECONNECT_S = 1.0
GATHER_S = 0.05  # what comes within it is drawn once


def top(
    server: Annotated[str | None, typer.Argument(metavar="ADDRESS", help="As --address.", show_default=False)] = None,
    interval: Annotated[float, typer.Option(help="Seconds between updates.", min=0.1, max=60.0)] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print the figures once, as when standard output is no terminal.")
    ] = False,
    address: Address = DEFAULT_ADDRESS,
    token: Token = None,
    tenant: Tenant = None,
    tls: Tls = False,
    tls_ca: TlsCa = None,
) -> None:
    """Watch a running server: what each sequence does, KV blocks, tokens a second, latencies, tenants and engines."""
    from rich.console import Console

    from pagoda_server.cli.top_board import Board

    address = server or address
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # of glyphs that an encoding lacks
    console = Console(highlight=False)
    board = Board(address)

    async def run() -> None:
        async with connect(address, token, tls, tls_ca, TIMEOUT_S, tenant, retries=0) as client:
            board.saw_info(await client.server_info())
            if once or not console.is_terminal:
                await _print_once(client, board, console)
            else:
                await _Top(client, board, console, interval).run()

    with errors_reported(address):
        asyncio.run(run())


async def _print_once(client: AsyncClient, board: Board, console: Console) -> None:
    from pagoda_server.cli.top_screen import draw

    board.saw_load(await client.load())
    await _take_trace(client, board, FIRST_TRACE_S)
    for line in draw(board, console.width, None):
        console.print(line, soft_wrap=True)


async def _take_trace(client: AsyncClient, board: Board, window_s: float) -> None:
    """Ask for a step trace. A server without a ready engine, or with too many such calls, has none for now."""
    from pagoda.errors import DeadlineExceeded, Overloaded, Unavailable

    try:
        board.saw_trace([part async for part in client.step_trace(window_s)], window_s)
    except (Unavailable, Overloaded, DeadlineExceeded) as error:
        board.trace_problem = str(error)


class _Top:
    """The live display: one task follows the server, another draws and obeys keys."""

    def __init__(self, client: AsyncClient, board: Board, console: Console, interval_s: float) -> None:
        from pagoda_server.cli.top_screen import SORTS

        self._client = client
        self._board = board
        self._console = console
        self._terminal = _Terminal(console)
        self._interval_s = interval_s
        self._sorts = deque(SORTS)
        self._changed = asyncio.Event()
        self._is_paused = False
        self._is_over = False
        self._traced_at = time.monotonic() - FIRST_TRACE_S

    async def run(self) -> None:
        """Show the server until a key or a signal ends it. Raises PagodaError for what waiting does not heal."""
        follower: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._end)
        loop.add_signal_handler(signal.SIGWINCH, self._changed.set)
        loop.add_signal_handler(signal.SIGTSTP, self._suspend)
        if self._terminal.keyboard is not None:
            loop.add_reader(self._terminal.keyboard, self._read_keys, self._terminal.keyboard)
        with self._terminal:
            while not self._is_over:
                if follower is None and not self._is_paused:
                    follower = self._followed()
                elif follower is not None and self._is_paused:
                    follower.cancel()
                    follower = None
                elif follower is not None and follower.done():
                    follower.result()
                self._draw()
                await self._wait()

    # -- the server ------------------------------------------------------------------------------------------------

    def _followed(self) -> asyncio.Task[None]:
        """A task that keeps the board current, and ends only with an error that no later attempt would heal."""
        follower = asyncio.create_task(self._follow())
        follower.add_done_callback(lambda _: self._changed.set())
        return follower

    async def _follow(self) -> None:
        from pagoda.errors import InvalidArgument, PagodaError, PermissionDenied, Unauthenticated, Unimplemented

        while True:
            self._board.waits()
            try:
                await self._watch()
                self._board.lost("it ended the stream of loads")
            except (InvalidArgument, PermissionDenied, Unauthenticated, Unimplemented):
                raise
            except PagodaError as error:
                self._board.lost(str(error))
            self._changed.set()
            await asyncio.sleep(RECONNECT_S)

    async def _watch(self) -> None:
        """Take in the loads, and at each what else has changed: a slow answer to that must not delay the next load."""
        asking: asyncio.Task[None] | None = None
        asked_info_at = -math.inf
        try:
            async for load in self._client.watch_load(self._interval_s):
                self._board.saw_load(load)
                if asking is None or asking.done():
                    if asking is not None:
                        asking.result()
                    is_info_due = time.monotonic() - asked_info_at > INFO_S
                    asked_info_at = time.monotonic() if is_info_due else asked_info_at
                    asking = asyncio.create_task(self._ask(is_info_due))
                self._changed.set()
        finally:
            if asking is not None:
                asking.cancel()

    async def _ask(self, is_info_due: bool) -> None:
        if is_info_due:
            self._board.saw_info(await self._client.server_info())
        asked_at = time.monotonic()
        await _take_trace(self._client, self._board, min(asked_at - self._traced_at + OVERLAP_S, LONGEST_TRACE_S))
        if not self._board.trace_problem:
            self._traced_at = asked_at
        self._changed.set()

    # -- the terminal ----------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        from pagoda_server.cli.top_screen import draw

        width, height = self._console.size
        self._terminal.show(
            draw(
                self._board, width, height, sort=self._sorts[0], is_paused=self._is_paused, interval_s=self._interval_s
            )
        )

    async def _wait(self) -> None:
        """Wait for a change, but no longer than a second, because times go on."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if self._is_paused else 1.0):
                await self._changed.wait()
        await asyncio.sleep(GATHER_S)
        self._changed.clear()

    def _read_keys(self, keyboard: int) -> None:
        keys = os.read(keyboard, 64)
        if not keys or b"q" in keys:
            self._end()
        if not keys.startswith(b"\x1b"):  # an arrow, for example
            self._is_paused ^= bool(keys.count(b"p") % 2)
            self._sorts.rotate(-keys.count(b"s"))
        self._changed.set()

    def _end(self) -> None:
        self._is_over = True
        self._changed.set()

    def _suspend(self) -> None:
        """Give the terminal back while Ctrl-Z has stopped this process."""
        with self._terminal.given_back():
            os.kill(os.getpid(), signal.SIGSTOP)
        self._changed.set()


class _Terminal:
    """The terminal's other screen, with keys that arrive at once and unseen. Leaving the block restores the terminal.

    keyboard  a descriptor to read keys from; None if standard input is no terminal
    """

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self.keyboard = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._live = Live(console=console, screen=True, auto_refresh=False)
        self._saved: list[Any] = []

    def __enter__(self) -> None:
        import termios
        import tty

        if self.keyboard is not None:
            self._saved = termios.tcgetattr(self.keyboard)
            tty.setcbreak(self.keyboard)
        self._live.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import termios

        self._live.stop()
        if self.keyboard is not None:
            termios.tcsetattr(self.keyboard, termios.TCSAFLUSH, self._saved)

    @contextlib.contextmanager
    def given_back(self) -> Iterator[None]:
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def show(self, lines: list[Text]) -> None:
        from rich.console import Group

        self._live.update(Group(*lines), refresh=True)

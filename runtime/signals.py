"""The signals by which a process is asked to end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable


def on_stop(stop: Callable[[], None]) -> None:
    """Have the running event loop call `stop` for each signal that asks this process to end.

    SIGTERM and Ctrl-C may come twice, and the second one ends a grace period. SIGHUP comes when a terminal closes, or
    from a service manager right behind SIGTERM: it begins a grace period and never ends one. Under nohup it is ignored.
    """
    loop, asked = asyncio.get_running_loop(), False

    def ask(is_hangup: bool) -> None:
        nonlocal asked
        if not (is_hangup and asked):
            asked = True
            stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ask, False)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, ask, True)

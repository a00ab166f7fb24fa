"""What a service says to the service manager that has started it: the datagrams of sd_notify(3), as systemd reads them.

Nothing is sent unless $NOTIFY_SOCKET names a socket.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable

log = logging.getLogger("pagoda.runtime")

READY, STOPPING, WATCHDOG = "READY=1", "STOPPING=1", "WATCHDOG=1"
SEND_S = 0.1  # for which a manager that reads nothing holds up this process
REPORTS = 4  # in the time after which a silent service counts as hung


def notify(state: str) -> None:
    """Send a state to the service manager, if there is one. A failure goes to the log alone."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    address = f"\0{path[1:]}" if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(SEND_S)
            sender.sendto(state.encode(), address)
    except OSError as error:
        log.warning("%s cannot be sent to the service manager: %s", state, error)


def forget_manager() -> None:
    """Send nothing from now on, nor do later children: the parent speaks for this process."""
    os.environ.pop("NOTIFY_SOCKET", None)


async def report_progress(progress: Callable[[], Awaitable[None]] | None = None) -> None:
    """Report to the watchdog of the service manager until cancelled, if it has one.

    progress  returns once the service has made some, and nothing is reported until then; None: a turn of the event loop
              is progress
    """
    period_s = _watchdog_s()
    while period_s:
        if progress is not None:
            await progress()
        notify(WATCHDOG)
        await asyncio.sleep(period_s / REPORTS)


def _watchdog_s() -> float:
    """Seconds without a report after which the manager acts; 0: it does not."""
    given, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID") or str(os.getpid())
    return int(given) / 1e6 if given.isdecimal() and pid == str(os.getpid()) else 0.0

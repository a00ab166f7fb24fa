"""Parts of a process that run for as long as it does: an exception ends one of them alone, and it is started again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

SAYS_AGAIN_S = 60.0  # the same fault is one line of the log in this time
LONGEST_PAUSE_S = 30.0
PROVEN_S = 60.0  # what has worked for so long starts with the shortest pause again
MAX_FAULTS = 64  # that are remembered


class Faults:
    """The faults of something that is tried again: which of them go to the log, and the pause before the next try."""

    def __init__(self) -> None:
        self._strikes = 0
        self._said: dict[str, float] = {}

    def may_say(self, fault: str) -> bool:
        """Whether a fault goes to the log: not again within a minute."""
        now = time.monotonic()
        if now - self._said.get(fault, -SAYS_AGAIN_S) < SAYS_AGAIN_S:
            return False
        if len(self._said) >= MAX_FAULTS:
            self._said = {each: at for each, at in self._said.items() if now - at < SAYS_AGAIN_S}
        if len(self._said) < MAX_FAULTS:
            self._said[fault] = now
            return True
        return False

    def served(self, seconds: float) -> None:
        """Note for how long it has worked before its next fault."""
        if seconds >= PROVEN_S:
            self._strikes = 0

    def strike(self, first_s: float | None = None) -> float:
        """Count a fault; return the pause after it: 1, 2, 4 … 30 s.

        first_s  the pause after the first one, before these; None: none comes before
        """
        self._strikes += 1
        doublings = self._strikes - (1 if first_s is None else 2)
        return min(2.0**doublings, LONGEST_PAUSE_S) if doublings >= 0 else first_s or 0.0


async def keep_running(
    name: str,
    part: Callable[[], Awaitable[None]],
    log: logging.Logger,
    faults: Faults | None = None,
    *,
    fatal: tuple[type[Exception], ...] = (),
) -> None:
    """Run a part of a process until it returns. After an exception it is logged and started again: nothing else ends.

    name    of the part, as the log calls it
    faults  those of the part, where something else counts them, too
    fatal   exceptions that are raised
    """
    faults = faults or Faults()
    while True:
        began = time.monotonic()
        try:
            return await part()
        except fatal:
            raise
        except Exception as error:
            faults.served(time.monotonic() - began)
            pause_s = faults.strike()
            if faults.may_say(_origin(error)):
                log.error("%s failed, and is started again after %g s", name, pause_s, exc_info=error)
        await asyncio.sleep(pause_s)


def _origin(error: Exception) -> str:
    """The kind of an exception and the line that raised it. Its text may differ each time."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else ""
    return f"{type(error).__name__} {where}"

"""When a failed call is tried again. Nothing here waits or calls: both clients ask, and sleep in their own way."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

from pagoda.errors import Overloaded, PagodaError, Unavailable
from pagoda.fields import wrong

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
MAX_SUGGESTED_S = 30.0
MAX_TIMEOUT_S = 1e9  # gRPC takes what ends in a few centuries for what has ended


class Attempts:
    """The attempts of one call, which share its retries and its deadline.

    A call is tried again if the server was unavailable, after an exponential backoff with jitter, or if it was
    overloaded and said when to come back, after that time. Never once a message has arrived: what the caller has seen
    cannot be taken back. Never if the wait would outlast the deadline, or the server suggests more than 30 s.

    timeout_s  of all attempts together; None or infinity: there is no deadline

    Raises InvalidArgument if timeout_s is no number.
    """

    def __init__(
        self,
        retries: int,
        timeout_s: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        if timeout_s is not None and (not isinstance(timeout_s, int | float) or math.isnan(timeout_s)):
            raise wrong("timeout_s", f"is {timeout_s!r}, must be a number of seconds")
        self._retries_left = retries
        self._backoff_s = FIRST_BACKOFF_S
        self._clock = clock
        self._jitter = jitter
        self._deadline = None if timeout_s is None or timeout_s > MAX_TIMEOUT_S else clock() + timeout_s

    def remaining_s(self) -> float | None:
        """What is left for the next attempt; None without a deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def delay_after(self, error: PagodaError, *, has_begun: bool) -> float:
        """Seconds to wait before the next attempt. Raises `error` where there is to be none."""
        delay_s = self._delay_after(error)
        remaining_s = self.remaining_s()
        outlasts = delay_s is not None and remaining_s is not None and delay_s >= remaining_s
        if has_begun or delay_s is None or outlasts or self._retries_left == 0:
            raise error
        self._retries_left -= 1
        return delay_s

    def _delay_after(self, error: PagodaError) -> float | None:
        if isinstance(error, Unavailable | Overloaded) and error.retry_after_s is not None:
            return error.retry_after_s if error.retry_after_s <= MAX_SUGGESTED_S else None
        if isinstance(error, Unavailable):
            backoff_s, self._backoff_s = self._backoff_s, min(2 * self._backoff_s, MAX_BACKOFF_S)
            return backoff_s * (0.5 + 0.5 * self._jitter())
        return None

"""How calls reach a server: channel options, TLS, metadata, and when a failed call is tried again."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from pathlib import Path

import grpc

from pagoda.errors import Overloaded, PagodaError, Unavailable
from pagoda.fields import wrong

MAX_MESSAGE_BYTES = 64 << 20

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # By default a channel waits 1 s after a refused connection before it tries another: longer than most retries.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Pings detect a peer that has vanished, even on a quiet stream.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # otherwise an answer may take a minute, whatever keepalive_timeout_ms is
]


def credentials(tls: bool | str | Path) -> grpc.ChannelCredentials | None:
    """Credentials for TLS; None for a connection without it.

    tls  True: trust the system's authorities; a path: trust the authorities in that PEM file

    Raises OSError if the file cannot be read.
    """
    if tls is False:
        return None
    return grpc.ssl_channel_credentials(None if tls is True else Path(tls).read_bytes())


def call_metadata(token: str | None, tenant: str | None) -> list[tuple[str, str]]:
    """The metadata of each call. Raises InvalidArgument for a value that metadata cannot carry."""
    for name, value in {"token": token, "tenant": tenant}.items():
        if value is not None and not (isinstance(value, str) and value.isascii() and value.isprintable()):
            raise wrong(name, "must be printable ASCII text")  # omits the value, which may be a secret
    given = {"authorization": token and f"Bearer {token}", "x-pagoda-tenant": tenant}
    return [(key, value) for key, value in given.items() if value is not None]


FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
MAX_SUGGESTED_S = 30.0
SPREAD = 0.25  # of a suggested delay
MAX_TIMEOUT_S = 1e9  # gRPC treats a deadline centuries away as one that has passed


class Attempts:
    """The attempts of one call, which share its retries and its deadline.

    A call is retried if the server was unavailable, after an exponential backoff with jitter, or if the server was
    overloaded and suggested a delay, after that delay and up to a quarter more. A call is not retried once a message
    has arrived, because what the caller has seen cannot be taken back (a resumable one goes on: see pagoda/resume.py);
    nor if the wait would outlast the deadline, or the server suggests more than 30 s. Nothing here waits: both clients
    sleep in their own way.

    timeout_s  deadline of all attempts together; None or infinity: no deadline

    Raises InvalidArgument if timeout_s is not a number.
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
        self._retries = retries
        self.renew()
        self._clock = clock
        self._jitter = jitter
        self._deadline = None if timeout_s is None or timeout_s > MAX_TIMEOUT_S else clock() + timeout_s

    def renew(self) -> None:
        """Count retries from zero: the last attempt was of use. The deadline stays."""
        self._retries_left = self._retries
        self._backoff_s = FIRST_BACKOFF_S

    def remaining_s(self) -> float | None:
        """Time left for the next attempt; None without a deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def delay_after(self, error: PagodaError, *, has_begun: bool) -> float:
        """Seconds to wait before the next attempt. Raises `error` if there must be none."""
        delay_s = self._delay_after(error)
        remaining_s = self.remaining_s()
        outlasts = delay_s is not None and remaining_s is not None and delay_s >= remaining_s
        if has_begun or delay_s is None or outlasts or self._retries_left == 0:
            raise error
        self._retries_left -= 1
        return delay_s

    def _delay_after(self, error: PagodaError) -> float | None:
        if isinstance(error, Unavailable | Overloaded) and error.retry_after_s is not None:
            # The server suggests the same delay to all that it refuses at once: they must not come back at once.
            spread = 1 + SPREAD * self._jitter()
            return spread * error.retry_after_s if error.retry_after_s <= MAX_SUGGESTED_S else None
        if isinstance(error, Unavailable):
            backoff_s, self._backoff_s = self._backoff_s, min(2 * self._backoff_s, MAX_BACKOFF_S)
            return backoff_s * (0.5 + 0.5 * self._jitter())
        return None

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
    # A peer that has vanished without a word is noticed though the stream is quiet.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # else an answer may take a minute, whatever the line above says
]


def credentials(tls: bool | str | Path) -> grpc.ChannelCredentials | None:
    """tls: whether to use TLS with the system's authorities, or a PEM file of the authorities to trust.

    Raises OSError if the file cannot be read.
    """
    if tls is False:
        return None
    return grpc.ssl_channel_credentials(None if tls is True else Path(tls).read_bytes())


def call_metadata(token: str | None, tenant: str | None) -> list[tuple[str, str]]:
    """Raises InvalidArgument for what cannot travel so."""
    for name, value in {"token": token, "tenant": tenant}.items():
        if value is not None and not (isinstance(value, str) and value.isascii() and value.isprintable()):
            raise wrong(name, "must be printable ASCII text")  # without its value, which may be a secret
    given = {"authorization": token and f"Bearer {token}", "x-pagoda-tenant": tenant}
    return [(key, value) for key, value in given.items() if value is not None]


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

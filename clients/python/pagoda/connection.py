"""How a client reaches a server: channel options, TLS, and the token and tenant that go with each call."""

from __future__ import annotations

from pathlib import Path

import grpc

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

"""The public port: where it listens, with which credentials, and what is too dangerous to open by accident."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc

from pagoda_server.channel.address import host_of, is_local, is_unix
from pagoda_server.channel.listening import KEEPALIVE_OPTIONS, GrpcPort
from pagoda_server.router.errors import ConfigError
from pagoda_server.settings import ServeConfig

log = logging.getLogger("pagoda.router")

MAX_MESSAGE_BYTES = 16 << 20
SERVER_OPTIONS = [
    *KEEPALIVE_OPTIONS,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),  # clients may ping an idle stream this often
]


def server_options(shares_port: bool) -> list[tuple[str, int]]:
    """gRPC shares ports by default: two servers on one by mistake would each get half of the calls."""
    return [*SERVER_OPTIONS, ("grpc.so_reuseport", int(shares_port))]


@contextlib.contextmanager
def reserved_port(listen: str) -> Iterator[str]:
    """Keeps HOST:PORT for processes that will share it; yields it with the port that was taken. Raises ConfigError."""
    host, _, port = listen.rpartition(":")
    if is_unix(listen):
        raise ConfigError(f"--workers: processes can share HOST:PORT, not {listen}")
    with contextlib.ExitStack() as stack:
        taken = int(port)
        try:
            found = socket.getaddrinfo(host_of(listen), taken, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, kind, protocol, _, address in found:
                # Alone first: with SO_REUSEPORT it would succeed beside another server's workers.
                with socket.socket(family, kind, protocol) as alone:
                    alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    alone.bind((address[0], taken))
                    taken = alone.getsockname()[1]
                # It never listens, so that no connection comes here; it keeps the port while workers come and go.
                shared = stack.enter_context(socket.socket(family, kind, protocol))
                shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                shared.bind((address[0], taken))
        except OSError as error:
            raise ConfigError(f"--listen: cannot bind {listen}: {error.strerror or error}") from error
        yield f"{host}:{taken}"


def auth_token(config: ServeConfig) -> str | None:
    """From --auth-token-file or $PAGODA_AUTH_TOKEN. Raises ConfigError if it is empty or no client could send it."""
    if config.auth_token_file is None:
        return os.environ.get("PAGODA_AUTH_TOKEN") or None
    try:
        token = Path(config.auth_token_file).read_text().strip()
    except OSError as error:
        raise ConfigError(f"--auth-token-file: cannot read {config.auth_token_file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--auth-token-file: {config.auth_token_file} holds no text: {error}") from error
    if not token:
        raise ConfigError(f"--auth-token-file: {config.auth_token_file} is empty")
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(f"--auth-token-file: {config.auth_token_file} is to hold one line of printable ASCII")
    return token


def check_exposure(config: ServeConfig) -> None:
    """Raises ConfigError for an address that others can reach with neither TLS nor a token to hold them off."""
    if bool(config.tls_cert) != bool(config.tls_key):
        raise ConfigError("--tls-cert and --tls-key go together")
    is_guarded = config.tls_cert is not None or auth_token(config) is not None
    if not (is_local(config.listen) or is_guarded or config.allow_insecure):
        raise ConfigError(
            f"--listen {config.listen} is reachable by others: give --tls-cert and --tls-key or --auth-token-file, "
            "or --allow-insecure if the network itself is guarded"
        )
    if not (is_local(config.listen) or config.tls_cert or config.allow_insecure):
        log.warning("--listen %s: without --tls-cert and --tls-key the token travels in the clear", config.listen)


def bind(server: grpc.aio.Server, config: ServeConfig) -> GrpcPort:
    """Raises ConfigError if the configured address cannot be bound with the configured certificate."""
    try:
        if config.tls_cert and config.tls_key:
            credentials = _credentials(config.tls_cert, config.tls_key)
            return GrpcPort(config.listen, lambda address: server.add_secure_port(address, credentials))
        return GrpcPort(config.listen, server.add_insecure_port)
    except OSError as error:
        raise ConfigError(f"--listen: cannot bind {config.listen}: {error.strerror or error}") from error


def _credentials(certificate: str, key: str) -> grpc.ServerCredentials:
    """Looks at the files before gRPC does, which would say no more than that it cannot bind. Raises ConfigError."""
    try:
        pair = (Path(key).read_bytes(), Path(certificate).read_bytes())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_ciphers("ALL:@SECLEVEL=0")  # which keys are too weak is gRPC's to say
        context.load_cert_chain(certificate, key, password=lambda: "")
    except ssl.SSLError as error:
        raise ConfigError(
            f"--tls-cert {certificate}, --tls-key {key}: not a certificate and its own unencrypted key in PEM "
            f"({error.reason or error})"
        ) from error
    except OSError as error:
        raise ConfigError(f"--tls-cert, --tls-key: cannot read {error.filename}: {error.strerror}") from error
    return grpc.ssl_server_credentials([pair])

"""The public port: its address, its credentials and its gRPC options."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...channel.address import host_of, is_local, is_unix
from ...channel.listening import CLIENTS_KEEPALIVE, GrpcPort
from ...runtime.channel_trust import expiry_of_server, warn_of_expiry
from ...settings import ServeConfig
from ...settings.router import AUTH_TOKEN_VARIABLE
from ..config_error import ConfigError

if TYPE_CHECKING:
    import grpc

log = logging.getLogger("pagoda.router")

MAX_PENDING_CALLS = 1 << 16  # arrived and not yet taken up; beyond it gRPC answers with a bare CANCELLED
SERVER_OPTIONS = [
    *CLIENTS_KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),  # clients may ping an idle stream this often
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
]
OTHER_CALLS = 8192  # of a connection, beside those that can be admitted: refused ones, and those that need no engine
AGE_JITTER = 1.1  # gRPC lengthens a connection's age by a tenth at most
LAST_CALLS_S = 3.0  # in which calls arrive that clients start before they learn that their connection is too old
_BYTES_PER_ID = 5  # of a token id on the wire, at most
_OTHER_BYTES = 512 << 10  # tags and lengths of all fields, and the contents of those with small limits


def max_message_bytes(max_text_bytes: int, max_model_len: int, vocab_size: int) -> int:
    """The largest request that the limits of its fields allow: a text or token ids, allowed ids, and all others."""
    return max(max_text_bytes, _BYTES_PER_ID * max_model_len) + _BYTES_PER_ID * vocab_size + _OTHER_BYTES


def server_options(
    shares_port: bool,
    max_message_bytes: int,
    max_connection_age_s: float | None = None,
    max_requests: int | None = None,
) -> list[tuple[str, int]]:
    """gRPC options of a server. gRPC shares ports by default, and two servers on one would split the calls.

    max_message_bytes     of a message that the server receives, compressed and not
    max_connection_age_s  after which a connection takes no new calls; its own calls end when they end, because
                          gRPC's default grace period has no end. None: unlimited
    max_requests          that the server admits. It limits the calls of a connection, those too whose client has reset
                          them: without it, 62,000 of those took 0.8 GB. None: unlimited
    """
    options = [*SERVER_OPTIONS, ("grpc.max_receive_message_length", max_message_bytes)]
    if max_connection_age_s is not None:
        options.append(("grpc.max_connection_age_ms", math.ceil(1e3 * max_connection_age_s)))
    if max_requests is not None:
        options.append(("grpc.max_concurrent_streams", min(max_requests + OTHER_CALLS, (1 << 31) - 1)))
    return [*options, ("grpc.so_reuseport", int(shares_port))]


def longest_age_s(config: ServeConfig) -> float:
    """Seconds after which no new calls come on the connections of a port that was left."""
    return AGE_JITTER * config.max_connection_age_s + LAST_CALLS_S


@contextlib.contextmanager
def reserved_port(listen: str, name: str = "--listen", is_shared: bool = False) -> Iterator[str]:
    """Reserve HOST:PORT for processes that will share it, and yield it with the actual port.

    Raises ConfigError, which names the setting.

    is_shared  these processes have the port already
    """
    host, _, port = listen.rpartition(":")
    if is_unix(listen):
        raise ConfigError(f"--workers: processes can share HOST:PORT, not {listen}")
    with contextlib.ExitStack() as stack:
        taken = int(port)
        try:
            found = socket.getaddrinfo(host_of(listen), taken, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, kind, protocol, _, address in found:
                # Bind without SO_REUSEPORT first: with it, bind would succeed beside another server's workers.
                if not is_shared:
                    with socket.socket(family, kind, protocol) as alone:
                        alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                        alone.bind((address[0], taken))
                        taken = alone.getsockname()[1]
                # This socket never listens, so it gets no connections; it holds the port while workers restart.
                shared = stack.enter_context(socket.socket(family, kind, protocol))
                shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                shared.bind((address[0], taken))
        except OSError as error:
            raise ConfigError(f"{name}: cannot bind {listen}: {error.strerror or error}") from error
        yield f"{host}:{taken}"


def auth_token(config: ServeConfig) -> str | None:
    """Read the token from --auth-token-file or $PAGODA_AUTH_TOKEN. Raises ConfigError if the file is no good."""
    if config.auth_token_file is None:
        return os.environ.get(AUTH_TOKEN_VARIABLE) or None
    try:
        token = Path(config.auth_token_file).read_text().strip()
    except OSError as error:
        raise ConfigError(f"--auth-token-file: cannot read {config.auth_token_file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--auth-token-file: {config.auth_token_file} is not text: {error}") from error
    if not token:
        raise ConfigError(f"--auth-token-file: {config.auth_token_file} is empty")
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(f"--auth-token-file: {config.auth_token_file} must hold one line of printable ASCII")
    return token


def check_exposure(config: ServeConfig) -> None:
    """Raise ConfigError if other hosts can reach the address and neither TLS nor a token protects it."""
    if bool(config.tls_cert) != bool(config.tls_key):
        raise ConfigError("--tls-cert and --tls-key must be given together")
    if config.auth_token_file is not None and config.tenants_file is not None:
        raise ConfigError("--auth-token-file and --tenants-file cannot be given together")
    is_guarded = config.tls_cert is not None or config.tenants_file is not None or auth_token(config) is not None
    for name, address in (("--listen", config.listen), ("--http", config.http)):
        if address is None or is_local(address):
            continue
        if not (is_guarded or config.allow_insecure):
            raise ConfigError(
                f"{name} {address} is reachable from other hosts: give --tls-cert and --tls-key, --auth-token-file or "
                "--tenants-file, or --allow-insecure if the network itself is protected"
            )
        if not (config.tls_cert or config.allow_insecure):
            log.warning("%s %s: without --tls-cert and --tls-key tokens travel in the clear", name, address)


def bind(server: grpc.aio.Server, config: ServeConfig, takes_over: bool = False) -> GrpcPort:
    """Bind the configured address with the configured certificate. `takes_over` is GrpcPort's. Raises ConfigError."""
    try:
        if config.tls_cert and config.tls_key:
            credentials = _credentials(config.tls_cert, config.tls_key)
            expires = expiry_of_server(Path(config.tls_cert), Path(config.tls_key))
            warn_of_expiry(f"--tls-cert {config.tls_cert}", expires, log)
            return GrpcPort(config.listen, lambda address: server.add_secure_port(address, credentials), takes_over)
        return GrpcPort(config.listen, server.add_insecure_port, takes_over)
    except OSError as error:
        raise ConfigError(f"--listen: cannot bind {config.listen}: {error.strerror or error}") from error


def _credentials(certificate: str, key: str) -> grpc.ServerCredentials:
    """Read and check the files, because gRPC would only report that it cannot bind. Raises ConfigError."""
    with _readable(certificate, key):
        pair = (Path(key).read_bytes(), Path(certificate).read_bytes())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_ciphers("ALL:@SECLEVEL=0")  # gRPC refuses weak keys itself
        context.load_cert_chain(certificate, key, password=lambda: "")
    import grpc  # only now: an engine is started before it

    return grpc.ssl_server_credentials([pair])


def tls_context(certificate: str, key: str) -> ssl.SSLContext:
    """What a server of HTTP encrypts with. Raises ConfigError."""
    with _readable(certificate, key):
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key, password=lambda: "")
        context.set_alpn_protocols(["http/1.1"])
    return context


@contextlib.contextmanager
def _readable(certificate: str, key: str) -> Iterator[None]:
    """Raise ConfigError if the block cannot use these files."""
    try:
        yield
    except ssl.SSLError as error:
        raise ConfigError(
            f"--tls-cert {certificate}, --tls-key {key}: not a certificate and its own unencrypted key in PEM "
            f"({error.reason or error})"
        ) from error
    except OSError as error:
        raise ConfigError(f"--tls-cert, --tls-key: cannot read {error.filename}: {error.strerror}") from error

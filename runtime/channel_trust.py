"""What guards the channel at HOST:PORT: certificates of both ends, a token, or both. Their files are followed."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from ..settings.engine import CommonSettings
from . import followed

ENGINE_NAME = "pagoda-engine"  # a certificate with this name is an engine's, and makes no router
MAX_PEM_BYTES = 1 << 20
MAX_TOKEN_BYTES = 1 << 12
MAX_TOKENS = 2  # the old one and the new one
DAY_S = 86400.0
WARNS_BEFORE_DAYS = 30
_HAS_EXPIRED = 10  # X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL


class TrustError(Exception):
    """A file of certificates or tokens cannot be used. The message names the setting and the file."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """One end's certificates.

    certificate, key  this end's own, in PEM
    authorities       PEM of those that sign the other end's certificate
    context           the same files as a TLS client presents and checks them
    expires           when this end's certificate does, in seconds since 1970
    is_clients        whether this end's certificate is a client's, perhaps beside a server's
    peer_name         that an engine asks of other engines' certificates; None: the host of each engine's address
    """

    certificate: bytes
    key: bytes
    authorities: bytes
    context: ssl.SSLContext = field(compare=False)
    expires: float = field(compare=False)
    is_clients: bool = field(compare=False)
    peer_name: str | None = field(compare=False)

    @property
    def has_expired(self) -> bool:
        return time.time() > self.expires


@dataclass(frozen=True, slots=True)
class Trust:
    """What an end shows, and what it asks of the other.

    certificates  None: the channel has no TLS
    tokens        a router sends all of them, and an engine takes any; none: no token is asked for
    """

    certificates: Certificates | None = None
    tokens: tuple[str, ...] = ()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return tuple(("authorization", f"Bearer {token}") for token in self.tokens)

    def accepts(self, metadata: Sequence[tuple[str, str | bytes]]) -> bool:
        """Whether the metadata of a call has a token that this end takes. The time reveals nothing of the tokens."""
        if not self.tokens:
            return True
        given = [value.encode() for key, value in metadata if key == "authorization" and isinstance(value, str)]
        wanted = [value.encode() for _, value in self.metadata]
        found = [hmac.compare_digest(*pair) for pair in product(given[:MAX_TOKENS], wanted)]
        return any(found)  # none is left out once one is found


class ChannelTrust:
    """The files that the settings name; a Followed.

    is_engine    whether this end's certificate is a server's, and not a client's
    engine_name  that a router asks of engines' certificates; None: the host of each engine's address
    """

    name = "the channel's certificates and tokens"

    def __init__(self, config: CommonSettings, *, is_engine: bool, engine_name: str | None = None) -> None:
        self.engine_name = engine_name
        self.current = Trust()
        self.seen: followed.Stamps = ()
        self._config = config
        self._is_engine = is_engine
        files = (config.channel_tls_cert, config.channel_tls_key, config.channel_tls_ca, config.channel_token_file)
        self.paths = [Path(file) for file in files if file is not None]

    def load(self) -> None:
        """Read the files. Raises TrustError."""
        self.seen = followed.stamps(self.paths)
        self.adopt(self.read())

    def adopt(self, trust: Trust) -> None:
        self.current = trust

    def read(self) -> Trust:
        config = self._config
        certificates = None
        if config.channel_tls_cert and config.channel_tls_key and config.channel_tls_ca:
            certificates = _certificates(
                Path(config.channel_tls_cert),
                Path(config.channel_tls_key),
                Path(config.channel_tls_ca),
                self._is_engine,
            )
        tokens = _tokens(Path(config.channel_token_file)) if config.channel_token_file else ()
        return Trust(certificates, tokens)

    async def follow(self, log: logging.Logger) -> None:
        """Read the files whenever they have changed. What is wrong with them is logged, and the last ones stay."""
        if self.paths:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(followed.follow(self, TrustError, log))
                tasks.create_task(self._warn_of_expiry(log))

    async def _warn_of_expiry(self, log: logging.Logger) -> None:
        """Log once a day that this end's certificate expires soon, or has expired."""
        while True:
            if certificates := self.current.certificates:
                warn_of_expiry(f"--channel-tls-cert {self._config.channel_tls_cert}", certificates.expires, log)
            await asyncio.sleep(DAY_S)


def warn_of_expiry(certificate: str, expires: float, log: logging.Logger) -> None:
    """Log that a certificate, named with its option, expires soon or has expired."""
    days = (expires - time.time()) / DAY_S
    if days < WARNS_BEFORE_DAYS:
        log.warning("%s: it %s: renew it", certificate, f"expires in {days:.1f} days" if days > 0 else "has expired")


def expiry_of_server(certificate: Path, key: Path) -> float:
    """When a server's certificate expires, in seconds since 1970; 0 if it has, infinity if that cannot be found out."""
    try:
        return ssl.cert_time_to_seconds(str(_shown(certificate, key, is_engine=True)["notAfter"]))
    except ssl.SSLCertVerificationError as error:
        return 0.0 if error.verify_code == _HAS_EXPIRED else math.inf
    except OSError:  # a key that is too weak for Python's defaults, for example
        return math.inf


def _read(option: str, path: Path, max_bytes: int) -> bytes:
    try:
        return followed.read_file(path, max_bytes)
    except OSError as error:
        raise TrustError(f"{option}: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise TrustError(f"{option}: {path} {error}") from None


def _tokens(path: Path) -> tuple[str, ...]:
    option = "--channel-token-file"
    try:
        lines = [line.strip() for line in _read(option, path, MAX_TOKEN_BYTES).decode("ascii").splitlines()]
    except UnicodeDecodeError:
        raise TrustError(f"{option}: {path} must hold printable ASCII") from None
    tokens = tuple(filter(None, lines))
    if not all(map(str.isprintable, tokens)):
        raise TrustError(f"{option}: {path} must hold printable ASCII")
    if not 1 <= len(tokens) <= MAX_TOKENS:
        raise TrustError(f"{option}: {path} must hold a token, or the old and the new one in two lines")
    return tokens


def _certificates(certificate: Path, key: Path, authorities: Path, is_engine: bool) -> Certificates:
    pair = f"--channel-tls-cert {certificate}, --channel-tls-key {key}"
    own = _read("--channel-tls-cert", certificate, MAX_PEM_BYTES)
    own_key = _read("--channel-tls-key", key, MAX_PEM_BYTES)
    signers = _read("--channel-tls-ca", authorities, MAX_PEM_BYTES)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    try:
        context.load_verify_locations(cadata=signers.decode())
    except (ssl.SSLError, ValueError):
        raise TrustError(f"--channel-tls-ca {authorities}: holds no certificates in PEM") from None
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise TrustError(f"{pair}: not a certificate and its own unencrypted key in PEM ({reason})") from None
    try:
        shown = _shown(certificate, key, is_engine)
    except ssl.SSLCertVerificationError as error:
        role = "an engine" if is_engine else "a router"
        raise TrustError(f"{pair}: not a certificate for {role}: {error.verify_message}") from None
    except OSError as error:
        raise TrustError(f"{pair}: {getattr(error, 'reason', None) or error}") from None
    is_named = ("DNS", ENGINE_NAME) in shown.get("subjectAltName", ())
    if is_named and not is_engine:
        raise TrustError(f"{pair}: not a certificate for a router: it bears the name of all engines, {ENGINE_NAME}")
    expires = ssl.cert_time_to_seconds(str(shown["notAfter"]))
    is_clients = not is_engine or _is_clients(certificate, key)
    return Certificates(own, own_key, signers, context, expires, is_clients, ENGINE_NAME if is_named else None)


def _is_clients(certificate: Path, key: Path) -> bool:
    with contextlib.suppress(ssl.SSLCertVerificationError):
        _shown(certificate, key, is_engine=False)
        return True
    return False


def _shown(certificate: Path, key: Path, is_engine: bool) -> Mapping[str, Any]:
    """What the other end of a connection sees of a certificate. Raises ssl.SSLError if that end refuses it.

    The connection is made in memory, and its other end trusts this certificate alone.
    """
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    for end in (server, client):
        end.load_cert_chain(certificate, key, password=lambda: "")
    checking = client if is_engine else server
    checking.verify_mode = ssl.CERT_REQUIRED
    checking.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    checking.load_verify_locations(certificate)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = {
        client: client.wrap_bio(to_client, to_server),
        server: server.wrap_bio(to_server, to_client, server_side=True),
    }
    for end in (client, server, client, server):
        with contextlib.suppress(ssl.SSLWantReadError):
            ends[end].do_handshake()
    shown = ends[checking].getpeercert()
    assert shown, "the handshake is over"
    return shown

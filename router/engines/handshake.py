"""A TLS handshake with an engine before gRPC makes its own, because gRPC does not say what is wrong.

gRPC's library would also try again several times a second for as long as a channel lives, and write a line each time.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import ClassVar

from ...channel.address import host_of
from ...runtime.channel_trust import Certificates, ChannelTrust, TrustError
from ...settings import RouterSettings
from ..config_error import ConfigError
from .refusals import Reason

TIMEOUT_S = 5.0
LOOK_S = 1.0

# OpenSSL's codes of what is wrong with a certificate (X509_V_ERR_…).
_HAS_EXPIRED = 10
_UNKNOWN_AUTHORITY = (2, 18, 19, 20, 21)
_WRONG_NAME = (62, 64)


class NotTrusted(Exception):
    """The engine answers, but certificates or tokens do not fit. The message says which, and names the setting."""

    reason: ClassVar[Reason] = "trust"


def channel_trust(config: RouterSettings) -> ChannelTrust:
    """What guards the channels to engines at HOST:PORT. Raises ConfigError if a file is no good."""
    trust = ChannelTrust(config, is_engine=False, engine_name=config.channel_tls_name)
    try:
        trust.load()
    except TrustError as error:
        raise ConfigError(str(error)) from error
    return trust


async def shake_hands(address: str, name: str | None, certificates: Certificates) -> None:
    """Check that both ends accept each other's certificate.

    name  that the engine's certificate must bear; None: the address' host

    Raises NotTrusted, or OSError if the engine is away.
    """
    host, _, port = address.rpartition(":")
    name = name or host_of(address)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(
                host.strip("[]"), int(port), ssl=certificates.context, server_hostname=name
            )
            try:
                is_accepted = bool(await reader.read(1))  # an engine that refuses a certificate closes the connection
            finally:
                writer.transport.abort()
    except ssl.SSLError as error:
        raise NotTrusted(_fault_of_engine(error, name)) from error
    except TimeoutError:
        raise TimeoutError(f"no answer to a TLS handshake within {TIMEOUT_S:.0f} s") from None
    if is_accepted:
        return
    if certificates.has_expired:
        raise NotTrusted("this router's own certificate has expired: renew --channel-tls-cert")
    raise NotTrusted(
        "it refuses this router's certificate: its --channel-tls-ca must hold the authority that has signed this "
        "router's --channel-tls-cert"
    )


def _fault_of_engine(error: ssl.SSLError, name: str) -> str:
    if not isinstance(error, ssl.SSLCertVerificationError):
        if error.reason == "WRONG_VERSION_NUMBER":
            return "it does not use TLS: start it with --channel-tls-cert, or this router without"
        return f"the TLS handshake fails: {error.reason or error}"
    if error.verify_code == _HAS_EXPIRED:
        return "its certificate has expired: renew its --channel-tls-cert"
    if error.verify_code in _UNKNOWN_AUTHORITY:
        return "its certificate is from an authority that is not in this router's --channel-tls-ca"
    if error.verify_code in _WRONG_NAME:
        return f"its certificate does not bear the name {name}: renew its --channel-tls-cert, or set --channel-tls-name"
    return f"its certificate (--channel-tls-cert) is refused: {error.verify_message}"


async def uses_tls(address: str) -> bool:
    """Whether what listens there answers a TLS handshake."""
    anything = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anything.check_hostname = False
    anything.verify_mode = ssl.CERT_NONE
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(LOOK_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=anything)
    except OSError:
        return False
    writer.transport.abort()
    return True

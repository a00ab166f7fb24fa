"""A private authority, and the certificates with which it signs routers and engines of one fleet."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from .channel_trust import ENGINE_NAME

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

AUTHORITY, ROUTER = "ca", "router"  # names of files
AUTHORITY_DAYS = 3650
SKEW = timedelta(hours=1)  # a host's clock may be late
_DNS_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*")


class CertsError(Exception):
    """Nothing has been written. The message says why."""


class Authority:
    """A folder with an authority, in ca.pem and ca.key, and what it has signed, in NAME.pem and NAME.key.

    days  that what it signs is valid
    """

    def __init__(self, folder: Path, days: float) -> None:
        self._folder = folder
        self._valid = timedelta(days=days)

    def add(self, engines: Sequence[str]) -> list[str]:
        """Sign certificates for engines and, once, for a router; make the authority if there is none.

        Return the names of the engines' files. Raises CertsError, OSError.
        """
        names = {hosts[0]: hosts for hosts in map(_hosts, engines)}
        if not names:
            raise CertsError("name the host of an engine, or replace what is there with --renew")
        if present := [name for name in names if self._certificate(name).exists() or self._key(name).exists()]:
            raise CertsError(f"{self._certificate(present[0])} is there already: --renew replaces it")
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self._key(AUTHORITY).exists():
            self._make()
        if not self._certificate(ROUTER).exists():
            self._issue(ROUTER, [ROUTER], is_engine=False)
        for name, hosts in names.items():
            self._issue(name, [*hosts, ENGINE_NAME], is_engine=True)
        return list(names)

    def renew(self, engines: Sequence[str]) -> list[str]:
        """Sign new certificates for new keys and the same names: of all engines and the router, or of engines named.

        Return the names of the engines' files. Raises CertsError, OSError.
        """
        signed = [path.stem for path in sorted(self._folder.glob("*.pem")) if path.stem != AUTHORITY]
        names = [_hosts(each)[0] for each in engines] or signed
        if absent := [name for name in names if name not in signed]:
            raise CertsError(f"{self._certificate(absent[0])} is not there: without --renew it is made")
        if not names:
            raise CertsError(f"{self._folder} holds no certificates")
        for name in names:
            self._issue(name, self._hosts_of(name), is_engine=name != ROUTER)
        return [name for name in names if name != ROUTER]

    def _certificate(self, name: str) -> Path:
        return self._folder / f"{name}.pem"

    def _key(self, name: str) -> Path:
        return self._folder / f"{name}.key"

    def _make(self) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        name = _name("Pagoda's private authority")
        usage = _key_usage(key_cert_sign=True, crl_sign=True)
        builder = _builder(name, key, now, now + timedelta(days=AUTHORITY_DAYS)).issuer_name(name)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self._write(AUTHORITY, key, builder.add_extension(usage, critical=True), key)

    def _issue(self, name: str, hosts: Sequence[str], *, is_engine: bool) -> None:
        """Sign a certificate: for a router as a client, or for an engine, which is a client of other engines, too."""
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        authority, signer = self._load()
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        expiry = min(now + self._valid, authority.not_valid_after_utc)
        roles = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if is_engine else [])]
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
        builder = _builder(_name(name), key, now, expiry).issuer_name(authority.subject)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_key_usage(digital_signature=True), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(roles), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(list(map(_general_name, hosts))), critical=False)
        self._write(name, key, builder.add_extension(issuer, critical=False), signer)

    def _load(self) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            certificate = x509.load_pem_x509_certificate(self._certificate(AUTHORITY).read_bytes())
            key = load_pem_private_key(self._key(AUTHORITY).read_bytes(), None)
        except (ValueError, TypeError) as error:
            raise CertsError(f"{self._folder} holds no authority of `pagoda certs`: {error}") from None
        except FileNotFoundError as error:
            raise CertsError(f"{error.filename} is not there: the authority cannot sign without it") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise CertsError(f"{self._key(AUTHORITY)} is not the key of {self._certificate(AUTHORITY)}")
        if certificate.not_valid_after_utc <= datetime.now(UTC):
            raise CertsError(f"{self._certificate(AUTHORITY)} has expired: make a new authority in another folder")
        return certificate, key

    def _hosts_of(self, name: str) -> list[str]:
        from cryptography import x509

        try:
            certificate = x509.load_pem_x509_certificate(self._certificate(name).read_bytes())
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except (ValueError, x509.ExtensionNotFound):
            raise CertsError(f"{self._certificate(name)} is not a certificate of `pagoda certs`") from None
        return [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]

    def _write(
        self,
        name: str,
        key: EllipticCurvePrivateKey,
        builder: x509.CertificateBuilder,
        signer: EllipticCurvePrivateKey,
    ) -> None:
        from cryptography.hazmat.primitives import hashes, serialization

        signed = builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        write_whole(self._key(name), secret, 0o600)
        write_whole(self._certificate(name), signed, 0o644)


def write_whole(path: Path, content: bytes, mode: int) -> None:
    """Write a whole file or none: those who follow it never read half of it."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with open(new, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(content)
    os.replace(new, path)


def _hosts(engine: str) -> list[str]:
    """The hosts of an argument. Raises CertsError."""
    hosts = engine.split(",")
    for host in hosts:
        if not (_is_ip(host) or _DNS_NAME.fullmatch(host)):
            raise CertsError(f"{host!r} is neither the name of a host nor an IP address")
    if hosts[0] in (AUTHORITY, ROUTER):
        raise CertsError(f"an engine cannot be called {hosts[0]}: its files would be those of the {hosts[0]}")
    return hosts


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _general_name(host: str) -> x509.GeneralName:
    from cryptography import x509

    return x509.IPAddress(ipaddress.ip_address(host)) if _is_ip(host) else x509.DNSName(host)


def _name(name: str) -> x509.Name:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:64])])  # as many as X.509 allows


def _key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _builder(
    subject: x509.Name, key: EllipticCurvePrivateKey, now: datetime, expiry: datetime
) -> x509.CertificateBuilder:
    from cryptography import x509

    builder = x509.CertificateBuilder().subject_name(subject).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - SKEW).not_valid_after(expiry)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)

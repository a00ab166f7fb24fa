"""What a fleet keeps on the driver's disk: the members that routers follow, certificates, and the channel's token."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from pathlib import Path

from ..router.engines.fleet import Member
from ..router.engines.membership import read_members
from ..router.engines.waiting import read_mark
from ..router.errors import ConfigError
from ..runtime.authority import AUTHORITY, ROUTER, Authority, write_whole
from ..runtime.channel_trust import ENGINE_NAME, ChannelTrust
from ..settings.engine import CommonSettings
from .host import MEMBERS_OPTION

DAYS = 365  # that certificates are valid: an engine gets new ones when it is started
MEMBERS, CERTIFICATES, TOKEN, CONTROL = "engines.json", "certs", "token", "control"


class FleetFolder:
    """
    path  of the folder, which only its owner may enter
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: bytes | None = None
        self._authority = Authority(path / CERTIFICATES, DAYS)

    def prepare(self) -> None:
        """Make what is missing. Raises CertsError, OSError."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (self.path / TOKEN).exists():
            write_whole(self.path / TOKEN, f"{secrets.token_urlsafe(32)}\n".encode(), 0o600)
        if not self._file(ROUTER, "pem").exists():
            self._certify("engine-1")
        if not (self.path / MEMBERS).exists():
            self.write_members(())

    def _certify(self, engine: str) -> None:
        if self._file(engine, "pem").exists():
            self._authority.renew([engine])
        else:
            self._authority.add([engine])

    def _file(self, name: str, suffix: str) -> Path:
        return self.path / CERTIFICATES / f"{name}.{suffix}"

    @property
    def router_options(self) -> list[str]:
        """The options of a router that uses this fleet's engines."""
        return [
            f"--engine=file:{self.path / MEMBERS}",
            f"--channel-tls-cert={self._file(ROUTER, 'pem')}",
            f"--channel-tls-key={self._file(ROUTER, 'key')}",
            f"--channel-tls-ca={self._file(AUTHORITY, 'pem')}",
            f"--channel-tls-name={ENGINE_NAME}",
            f"--channel-token-file={self.path / TOKEN}",
        ]

    def trust(self) -> ChannelTrust:
        """What the driver shows engines, which is what a router shows. Raises TrustError."""
        settings = CommonSettings(
            channel_tls_cert=str(self._file(ROUTER, "pem")),
            channel_tls_key=str(self._file(ROUTER, "key")),
            channel_tls_ca=str(self._file(AUTHORITY, "pem")),
            channel_token_file=str(self.path / TOKEN),
        )
        trust = ChannelTrust(settings, is_engine=False, engine_name=ENGINE_NAME)
        trust.load()
        return trust

    def engine_files(self, engine: str) -> dict[str, bytes]:
        """Make a new certificate for an engine; return the files that guard it, by option.

        Raises CertsError, OSError.
        """
        self._certify(engine)
        return self._guards(engine)

    def router_files(self) -> dict[str, bytes]:
        """The files of a router on another host, by option. Raises OSError."""
        return {MEMBERS_OPTION: self.members_file()} | self._guards(ROUTER)

    def _guards(self, name: str) -> dict[str, bytes]:
        return {
            "--channel-tls-cert": self._file(name, "pem").read_bytes(),
            "--channel-tls-key": self._file(name, "key").read_bytes(),
            "--channel-tls-ca": self._file(AUTHORITY, "pem").read_bytes(),
            "--channel-token-file": (self.path / TOKEN).read_bytes(),
        }

    def mark(self) -> str:
        """What routers write here while requests wait for an engine: see router/engines/waiting.py."""
        return read_mark(self.path / MEMBERS)

    def members_file(self) -> bytes:
        """The file of members as it is. Raises OSError."""
        return (self.path / MEMBERS).read_bytes() if self._written is None else self._written

    def members(self) -> dict[str, str]:
        """The addresses in the file of members, by name; none if it cannot be read."""
        try:
            return {member.name: member.address for member in read_members(self.path / MEMBERS)}
        except ConfigError:
            return {}

    def write_members(self, members: Iterable[Member]) -> None:
        """Write the file of members, unless it has these already. Raises OSError."""
        entries = [{"name": member.name, "address": member.address} for member in members]
        content = f"{json.dumps({'engines': entries}, indent=1)}\n".encode()
        if content != self._written:
            write_whole(self.path / MEMBERS, content, 0o644)
            self._written = content

"""Which engines a router uses: a list, the addresses of a name in DNS, or a file that is read again when it changes."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from pathlib import Path
from typing import Any, Protocol

from ...channel.address import check_address, check_distinct, check_engine_name, named_address
from ...runtime import followed
from ...runtime.restarts import keep_running
from ...settings.router import DNS_PREFIX, FILE_PREFIX
from ..errors import ConfigError
from .fleet import Fleet, Member

log = logging.getLogger("pagoda.router")

MAX_FILE_BYTES = 1 << 20
MAX_ENGINES = 1024
LOOKUP_S = 5.0  # between two lookups of a name; servers of names keep answers for as long or longer


class Membership(Protocol):
    """Tells a fleet its members."""

    def load(self) -> None:
        """Before the first request. Raises ConfigError."""

    async def follow(self) -> None:
        """Follow what changes, until cancelled."""


def membership(engines: str, fleet: Fleet) -> Membership:
    """The membership that a value of --engine describes."""
    if engines.startswith(FILE_PREFIX):
        return MembersFile(Path(engines.removeprefix(FILE_PREFIX)), fleet)
    if engines.startswith(DNS_PREFIX):
        return NamesLookup(engines.removeprefix(DNS_PREFIX), fleet)
    return FixedList(engines, fleet)


class FixedList:
    def __init__(self, engines: str, fleet: Fleet) -> None:
        self._engines = engines
        self._fleet = fleet

    def load(self) -> None:
        self._fleet.set_members(Member(*named_address(each, at)) for at, each in enumerate(self._engines.split(",")))

    async def follow(self) -> None:
        """Return: nothing changes."""


class NamesLookup:
    """The addresses of a name, such as that of a headless service of Kubernetes.

    An address that is no longer found stays a member for as long as its engine answers: a server of names may be wrong
    or late, and an engine that ends says so on its channel.
    """

    def __init__(self, name: str, fleet: Fleet) -> None:
        host, _, port = name.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._fleet = fleet
        self._fault = ""

    def load(self) -> None:
        """Do nothing: the name may not be known yet."""

    async def follow(self) -> None:
        await keep_running(f"the look-up of {self._host}", self._follow, log)

    async def _follow(self) -> None:
        while True:
            try:
                found = await followed.in_daemon(self._addresses)
            except OSError as error:
                self._log(f"cannot look up {self._host}: {error.strerror or error}")
            else:
                self._log(f"{self._host} has {len(found)} addresses; the first {MAX_ENGINES} count", found)
                self._adopt(set(found[:MAX_ENGINES]))
            await asyncio.sleep(LOOKUP_S)

    def _addresses(self) -> list[str]:
        found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        hosts = sorted({str(entry[4][0]) for entry in found})
        return [f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}" for host in hosts]

    def _adopt(self, found: set[str]) -> None:
        kept = {channel.address for channel in self._fleet.channels if channel.takes_requests}
        self._fleet.set_members(Member(address, address) for address in sorted(found | kept))

    def _log(self, fault: str, found: list[str] | None = None) -> None:
        """Log a fault once, until there is another or none."""
        if found is not None and len(found) <= MAX_ENGINES:
            fault = ""
        if fault and fault != self._fault:
            log.warning("%s", fault)
        self._fault = fault


class MembersFile:
    """A file of members: {"engines": [{"name": "a", "address": "HOST:PORT"}]}; without a name, the address is one.

    What is wrong with a new content is logged, and the members stay as they were.
    """

    name = "the engines"
    seen: followed.Stamps

    def __init__(self, path: Path, fleet: Fleet) -> None:
        self.paths = [path]
        self._fleet = fleet

    def load(self) -> None:
        self.seen = followed.stamps(self.paths)
        self.adopt(self.read())

    def read(self) -> list[Member]:
        return read_members(self.paths[0])

    def adopt(self, members: list[Member]) -> None:
        self._fleet.set_members(members)

    async def follow(self) -> None:
        await followed.follow(self, ConfigError, log)


def read_members(path: Path) -> list[Member]:
    """Read a file of members. Raises ConfigError, in one line, with the file and the place in it."""
    try:
        return _members_from(json.loads(followed.read_file(path, MAX_FILE_BYTES)))
    except OSError as error:
        raise ConfigError(f"--engine: cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # also those of JSON and UTF-8, which name the place
        raise ConfigError(f"--engine: {path}: {' '.join(str(error).split())}") from None


def _members_from(given: Any) -> list[Member]:
    """Raises ValueError, which names the entry and the key."""
    if not isinstance(given, dict) or given.keys() != {"engines"} or not isinstance(given["engines"], list):
        raise ValueError('must be an object {"engines": […]}')
    if len(given["engines"]) > MAX_ENGINES:
        raise ValueError(f"engines: has {len(given['engines'])} entries, at most {MAX_ENGINES} are allowed")
    members = [_member_from(f"engines[{at}]", entry) for at, entry in enumerate(given["engines"])]
    check_distinct((member.name, member.address) for member in members)
    return members


def _member_from(place: str, entry: Any) -> Member:
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise ValueError(f"{place}: must be an object of texts")
    if unknown := sorted(entry.keys() - {"name", "address"}):
        raise ValueError(f"{place}: {unknown[0]!r} is neither name nor address")
    if "address" not in entry:
        raise ValueError(f"{place}: has no address")
    try:
        check_address(entry["address"], can_be_shm=True, lowest_port=1)
        if "name" in entry:
            check_engine_name(entry["name"])
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    address: str = entry["address"]
    return Member(entry.get("name", address), address)

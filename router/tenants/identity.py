"""Which token is whose: one token for every call, or a file that names tenants, their tokens, rights and quotas.

Tokens are found by their SHA-256. They are long and random, so a fast hash without salt keeps them secret: there are
too many to try. The time of a lookup by this hash reveals nothing either, because a client cannot choose a token whose
hash begins like that of another.
"""

from __future__ import annotations

import hashlib
import logging
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ...runtime import followed
from ...settings.request import MAX_ADAPTER_NAME, MAX_TENANT_LENGTH, TENANT_NAME
from ..errors import ConfigError, InvalidArgument, Unauthenticated
from .caller import ANYONE, EVERY_RIGHT, Caller, Right
from .quotas import Quota

log = logging.getLogger("pagoda.router")

TENANT_KEY = "x-pagoda-tenant"
FAIRNESS_KEY = "x-llm-d-inference-fairness-id"  # by which the gateway llm-d names a tenant
API_KEY = "x-api-key"  # in which clients of Anthropic's API send their token
MAX_FILE_BYTES = 8 << 20
MAX_QUOTA = 1 << 53  # beyond it, a float does not count one by one
_SCHEME = "Bearer "
_SHA256 = re.compile(r"[0-9a-f]{64}")


def digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


class Identities:
    """The callers that a server knows, by the digests of their tokens.

    tokens    None: calls need no token
    adapters  those that tenants may name; a tenant that is not here may name all
    """

    def __init__(self, tokens: Mapping[bytes, Caller] | None = None) -> None:
        self.tokens = tokens
        self.adapters: Mapping[str, frozenset[str]] = {}

    @classmethod
    def of_one_token(cls, token: str | None) -> Identities:
        """A server with one token, or none, for all calls: it trusts each of them with everything."""
        return cls(None if token is None else {digest(token): ANYONE})

    def caller_of(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Caller:
        """The caller of a call with this metadata.

        Raises Unauthenticated, InvalidArgument for a tenant's name, PermissionDenied to name a tenant.
        """
        authorizations: list[str | bytes] = []
        keys: list[str | bytes] = []
        names: dict[str, list[str | bytes]] = {}
        for key, value in metadata or ():
            if key == "authorization":
                authorizations.append(value)
            elif key == API_KEY:
                keys.append(value)
            elif key in (TENANT_KEY, FAIRNESS_KEY):
                names.setdefault(key, []).append(value)
        if not authorizations:
            authorizations = [f"{_SCHEME}{value}" if isinstance(value, str) else value for value in keys]
        own = ANYONE if self.tokens is None else self._owner(authorizations)
        if not names:
            return own
        key, tenant = _tenant_in(names)
        if tenant == own.tenant:
            return own
        own.require(Right.ACT_FOR_TENANTS, f"{key}: a call for another tenant")
        return replace(own, tenant=tenant, adapters=self.adapters.get(tenant))

    def _owner(self, authorizations: list[str | bytes]) -> Caller:
        """Raises Unauthenticated."""
        assert self.tokens is not None
        if len(authorizations) == 1:
            given = authorizations[0]
            if isinstance(given, str) and given.startswith(_SCHEME):
                owner = self.tokens.get(digest(given[len(_SCHEME) :]))
                if owner is not None:
                    return owner
        raise Unauthenticated


def _tenant_in(names: Mapping[str, list[str | bytes]]) -> tuple[str, str]:
    """The tenant that metadata names, with the key that does. Raises InvalidArgument."""
    found: list[tuple[str, str]] = []
    for key, values in names.items():
        if len(values) > 1:
            raise InvalidArgument(key, f"is given {len(values)} times")
        name = values[0]
        if not isinstance(name, str) or not TENANT_NAME.fullmatch(name):
            raise InvalidArgument(key, f"must be 1 to {MAX_TENANT_LENGTH} letters, digits or ._:@/-")
        found.append((key, name))
    if found[0][1] != found[-1][1]:
        raise InvalidArgument(FAIRNESS_KEY, f"names another tenant than {TENANT_KEY}")
    return found[0]


# -- the tenants file --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tenants:
    """The content of a tenants file."""

    tokens: Mapping[bytes, Caller]
    quotas: Mapping[str, Quota]
    adapters: Mapping[str, frozenset[str]]


def read_tenants(path: Path) -> Tenants:
    """Read a tenants file.

    Raises ConfigError, in one line, with the file and the place in it.
    """
    try:
        found = _tenants_from(tomllib.loads(followed.read_file(path, MAX_FILE_BYTES).decode()))
        if not found.tokens:
            raise ValueError("has no [[token]], so that every call would be refused")
        return found
    except OSError as error:
        raise ConfigError(f"--tenants-file: cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # also those of TOML and UTF-8, which name the place
        raise ConfigError(f"--tenants-file: {path}: {' '.join(str(error).split())}") from None


def _tenants_from(given: dict[str, Any]) -> Tenants:
    """Raises ValueError, which names the entry and the key."""
    _check_keys("the file", given, {"token", "tenant"})
    entries, tables = given.get("token", []), given.get("tenant", {})
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("token: must be tables, each under [[token]]")
    if not isinstance(tables, dict):
        raise ValueError("tenant: must be tables, each under [tenant.NAME]")
    tokens: dict[bytes, Caller] = {}
    for number, entry in enumerate(entries, start=1):
        place = f"[[token]] number {number}"
        hashed, caller = _token_from(place, entry)
        if hashed in tokens:
            raise ValueError(f"{place}: sha256 is that of another token")
        tokens[hashed] = caller
    quotas, adapters = dict[str, Quota](), dict[str, frozenset[str]]()
    for name, table in tables.items():
        quotas[name], named = _tenant_from(name, table)
        if named is not None:
            adapters[name] = named
    tokens = {hashed: replace(each, adapters=adapters.get(each.tenant)) for hashed, each in tokens.items()}
    return Tenants(tokens, quotas, adapters)


def _token_from(place: str, entry: dict[str, Any]) -> tuple[bytes, Caller]:
    _check_keys(place, entry, {"sha256", "tenant", "rights"})
    hashed = entry.get("sha256")
    if not isinstance(hashed, str) or not _SHA256.fullmatch(hashed):
        raise ValueError(f"{place}: sha256 must be a SHA-256 in 64 hexadecimal digits, in lower case")
    tenant = entry.get("tenant")
    if not isinstance(tenant, str):
        raise ValueError(f"{place}: tenant must be a name")
    check_tenant(f"{place}: tenant", tenant)
    rights = entry.get("rights", [])
    if not isinstance(rights, list) or not all(isinstance(right, str) for right in rights):
        raise ValueError(f"{place}: rights must be a list of names")
    if unknown := sorted(set(rights) - EVERY_RIGHT):
        raise ValueError(f"{place}: rights: {unknown[0]!r} is none of {', '.join(Right)}")
    return bytes.fromhex(hashed), Caller(tenant, frozenset(map(Right, rights)), is_proven=True)


def _tenant_from(name: str, table: object) -> tuple[Quota, frozenset[str] | None]:
    """A tenant's quota, and the adapters that it may name."""
    place = f"[tenant.{name}]" if re.fullmatch(r"[\w-]+", name) else f'[tenant."{name}"]'
    check_tenant(f"{place}: the name", name)
    if not isinstance(table, dict):
        raise ValueError(f"{place}: must be a table")
    _check_keys(place, table, {"adapters", *(field.name for field in fields(Quota))})
    adapters = table.get("adapters")
    if adapters is not None and not (isinstance(adapters, list) and all(map(_is_adapter, adapters))):
        raise ValueError(f"{place}: adapters must be a list of names, each of 1 to {MAX_ADAPTER_NAME} characters")
    numbers = {key: value for key, value in table.items() if key != "adapters"}
    for key, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_QUOTA:
            raise ValueError(f"{place}: {key} must be a whole number from 1 to {MAX_QUOTA}, not {value!r}")
    return Quota(**numbers), None if adapters is None else frozenset(adapters)


def _is_adapter(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= MAX_ADAPTER_NAME


def check_tenant(place: str, name: str) -> None:
    """Raise ValueError unless a tenant may have this name."""
    if not TENANT_NAME.fullmatch(name):
        raise ValueError(f"{place} must be 1 to {MAX_TENANT_LENGTH} letters, digits or ._:@/-, not {name!r}")


def _check_keys(place: str, table: dict[str, Any], known: set[str]) -> None:
    if unknown := sorted(table.keys() - known):
        raise ValueError(f"{place}: {unknown[0]!r} is none of {', '.join(sorted(known))}")


class TenantsFile:
    """A tenants file that is read again when it changes; a Followed.

    adopt  takes the content over
    """

    name = "the tenants"

    def __init__(self, path: Path, adopt: Callable[[Tenants], None]) -> None:
        self.paths = [path]
        self.adopt = adopt
        self.seen: followed.Stamps = ()

    def load(self) -> None:
        """Read the file. Raises ConfigError."""
        self.seen = followed.stamps(self.paths)
        self.adopt(self.read())

    def read(self) -> Tenants:
        return read_tenants(self.paths[0])

    async def follow(self) -> None:
        """Read the file whenever it has changed. What is wrong with it is logged, and the tenants stay as they were."""
        await followed.follow(self, ConfigError, log)

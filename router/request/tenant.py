"""Who a call is for: its tenant, named in metadata by the client or by a gateway that knows it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pagoda_server.router.errors import InvalidArgument

TENANT_KEY = "x-pagoda-tenant"
MAX_LENGTH = 64
_NAME = re.compile(rf"[A-Za-z0-9._:@/-]{{1,{MAX_LENGTH}}}")


def tenant_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The tenant's name, or "" for the calls that name none, which share one. Raises InvalidArgument."""
    given = [value for key, value in metadata or () if key == TENANT_KEY]
    if not given:
        return ""
    if len(given) > 1:
        raise InvalidArgument(TENANT_KEY, f"is given {len(given)} times")
    name = given[0]
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidArgument(TENANT_KEY, f"must be 1 to {MAX_LENGTH} letters, digits or ._:@/-")
    return name

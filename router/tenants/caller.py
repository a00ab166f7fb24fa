"""For whom a call is, and what it may do. `CallGuard` finds this once a call; handlers read it with `caller()`."""

from __future__ import annotations

import hashlib
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum

from ..errors import PermissionDenied


class Right(StrEnum):
    """What a token allows beyond its own tenant's requests."""

    ADMIN = "admin"  # drain the server, flush its cache, load adapters, abort any tenant's request
    OBSERVE = "observe"  # see every tenant, and figures of single requests, in load, step trace and settings
    ACT_FOR_TENANTS = "act_for_tenants"  # name any tenant in the metadata


EVERY_RIGHT = frozenset(Right)


@dataclass(frozen=True, slots=True)
class Caller:
    """
    tenant     the tenant that the call is for; "" is one like any other
    is_proven  whether a token vouches for the tenant; otherwise a header alone names it
    adapters   those that the tenant may name; None: all
    """

    tenant: str
    rights: frozenset[Right]
    is_proven: bool
    adapters: frozenset[str] | None = None

    def may_name(self, adapter: str) -> bool:
        return self.adapters is None or adapter in self.adapters

    def may(self, right: Right) -> bool:
        return right in self.rights

    def require(self, right: Right, what: str = "this call") -> None:
        """Raise PermissionDenied, which says that `what` needs the right, unless the caller has it."""
        if right not in self.rights:
            raise PermissionDenied(what, right)

    def cache_salt(self, given: str) -> str:
        """The salt under which a request's prompt is cached, of at most MAX_SALT_BYTES.

        Tenants that tokens prove share no cached prompt: with another tenant or another salt given, it is another one.
        """
        return hashlib.sha256(f"{self.tenant}\0{given}".encode()).hexdigest() if self.is_proven else given


ANYONE = Caller(tenant="", rights=EVERY_RIGHT, is_proven=False)  # where no token says whose a call is
_caller: ContextVar[Caller] = ContextVar("caller")


def caller() -> Caller:
    """The caller of the call that this task serves."""
    return _caller.get()


def set_caller(found: Caller) -> None:
    """Tell this task's `caller()`. gRPC runs a call's interceptors and its handler in one task."""
    _caller.set(found)

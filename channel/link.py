"""The interface of a connection between a router and an engine, the same for both ends and every transport."""

from __future__ import annotations

from typing import Protocol, TypeVar

Incoming_co = TypeVar("Incoming_co", covariant=True)
Outgoing_contra = TypeVar("Outgoing_contra", contravariant=True)

MAX_MESSAGE_BYTES = 64 << 20


class Link(Protocol[Incoming_co, Outgoing_contra]):
    """An open connection that delivers whole messages, in order, once. One task reads and one task writes.

    Both `read` and `write` raise ConnectionError when the connection breaks or the other end sends an invalid message.
    """

    async def read(self) -> Incoming_co | None:
        """Wait for the next message; return None when the other end is gone."""

    async def write(self, message: Outgoing_contra) -> None:
        """Send a message, waiting while the other end has no room for it.

        A cancelled write may leave half a message behind: close the link after one.
        """

    @property
    def is_free(self) -> bool:
        """Whether `try_write` may be called: no write is under way. Always False where the transport queues writes."""

    def try_write(self, message: Outgoing_contra) -> bool:
        """Write a message without waiting if all of it has room. Otherwise write nothing and return False."""

    def close(self) -> None:
        """End a waiting read (it returns None) and a waiting write (it raises ConnectionError)."""

"""One open connection between a router and an engine, as either end sees it, whatever carries it."""

from __future__ import annotations

from typing import Protocol, TypeVar

Incoming_co = TypeVar("Incoming_co", covariant=True)
Outgoing_contra = TypeVar("Outgoing_contra", contravariant=True)

MAX_MESSAGE_BYTES = 64 << 20


class Link(Protocol[Incoming_co, Outgoing_contra]):
    """Messages arrive whole, in order, once. One task reads and one task writes.

    Both calls raise ConnectionError when the connection breaks or the other end says what is no message.
    """

    async def read(self) -> Incoming_co | None:
        """The next message; None when the other end is gone."""

    async def write(self, message: Outgoing_contra) -> None:
        """Returns when the message is on its way, and waits while the other end has no room for it.

        A write that is cancelled may leave half a message: close the link then.
        """

    @property
    def is_free(self) -> bool:
        """Whether `try_write` can be called: nothing is being written. Never over a transport with turns of its own."""

    def try_write(self, message: Outgoing_contra) -> bool:
        """Writes a message within the call if all of it has room. False, and nothing written, where it has not."""

    def close(self) -> None:
        """Ends a read that waits (with None) and a write that waits (with ConnectionError)."""

"""One open connection between a router and an engine, as either end sees it, whatever carries it."""

from __future__ import annotations

from collections.abc import Callable
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

    def try_write(self, make: Callable[[], Outgoing_contra]) -> bool:
        """Writes a message within the call, where nothing else is being written and all of it has room.

        False, and nothing written, where not, and always over a transport that writes in turns of its own. `make` is
        not called where that is known before.
        """

    def close(self) -> None:
        """Ends a read that waits (with None) and a write that waits (with ConnectionError)."""

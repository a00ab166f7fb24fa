"""What an engine's address says of the transport.

shm:PATH   shared memory, offered on a Unix socket at a path, its owner's alone (mode 0600)
shm:@NAME  the same on a socket in Linux' abstract namespace: there is no file, so nothing can stay behind
unix:PATH  gRPC on a Unix socket
HOST:PORT  gRPC on TCP
"""

from __future__ import annotations

import os

SHM_PREFIX = "shm:"
HAS_SHM = hasattr(os, "memfd_create") and hasattr(os, "eventfd")  # Linux


def is_shm(address: str) -> bool:
    return address.startswith(SHM_PREFIX)


def socket_name(address: str) -> str:
    """What a Unix socket is bound to for a shm address; an abstract name starts with a zero byte."""
    name = address.removeprefix(SHM_PREFIX)
    return "\0" + name[1:] if name.startswith("@") else name


def socket_file(address: str) -> str | None:
    """Of a shm address; None for an abstract name."""
    name = socket_name(address)
    return None if name.startswith("\0") else name

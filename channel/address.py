"""Addresses, whose first letters name the transport.

shm:PATH   shared memory, offered on a Unix socket at a path that only its owner can open (mode 0600)
shm:@NAME  the same on a socket in Linux's abstract namespace, which has no file that could be left behind
unix:PATH  gRPC on a Unix socket
HOST:PORT  gRPC on TCP; an IPv6 address stands in brackets
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable

SHM_PREFIX = "shm:"
UNIX_PREFIX = "unix:"
HAS_SHM = hasattr(os, "memfd_create") and hasattr(os, "eventfd")  # Linux
HIGHEST_PORT = 65535
_ENGINE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

_HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^\s:/\[\]]+):([0-9]+)")


def is_shm(address: str) -> bool:
    return address.startswith(SHM_PREFIX)


def is_unix(address: str) -> bool:
    return address.startswith(UNIX_PREFIX)


def check_address(address: str, *, can_be_shm: bool, lowest_port: int) -> None:
    """Raise ValueError, which says what is wrong, unless `address` is valid.

    lowest_port  0 for a server, which may take a free port; otherwise 1

    gRPC itself does not check ports: it takes them modulo 65536.
    """
    is_path = is_unix(address) or (is_shm(address) and can_be_shm)
    try:
        # What looks a host up encodes it so, and its error is no OSError.
        address.encode() if is_path else host_of(address).encode("idna")
    except UnicodeError as error:
        raise ValueError(f"{address!r}: {error.__cause__ or error}") from None
    if is_path:
        if address.partition(":")[2] in ("", "@"):
            raise ValueError(f"{address!r} has no path")
    elif match := _HOST_AND_PORT.fullmatch(address):
        port = match[2]
        if len(port) > len(str(HIGHEST_PORT)) or not lowest_port <= int(port) <= HIGHEST_PORT:
            raise ValueError(f"{address!r}: a port is from {lowest_port} to {HIGHEST_PORT}")
    else:
        raise ValueError(f"{address!r} is not {'shm:PATH, ' if can_be_shm else ''}unix:PATH or HOST:PORT")


def check_engine_name(name: str) -> None:
    """Raise ValueError unless an engine may have this name."""
    if not _ENGINE_NAME.fullmatch(name):
        raise ValueError(f"an engine's name is 1 to 64 letters, digits or ._-, not {name!r}")


def named_address(text: str, place: int) -> tuple[str, str]:
    """The name and the address of NAME=ADDRESS. Without a name it is the place in the list. Raises ValueError."""
    first, has_name, rest = text.partition("=")
    is_path = is_shm(text) or is_unix(text)  # which may have such a sign in it
    name, address = (first, rest) if has_name and not is_path else (str(place), text)
    check_engine_name(name)
    check_address(address, can_be_shm=True, lowest_port=1)
    return name, address


def check_distinct(engines: Iterable[tuple[str, str]]) -> None:
    """Raise ValueError if two of these engines, each a name and an address, share one of both."""
    names: set[str] = set()
    addresses: set[str] = set()
    for name, address in engines:
        if name in names or address in addresses:
            raise ValueError(f"{address!r}: another engine has the same {'name' if name in names else 'address'}")
        names.add(name)
        addresses.add(address)


def host_of(address: str) -> str:
    """The host of HOST:PORT, without brackets."""
    return address.rpartition(":")[0].strip("[]")


def is_local(address: str) -> bool:
    """Whether only this machine can reach it: shared memory, a Unix socket or a loopback address."""
    if is_shm(address) or is_unix(address):
        return True
    try:
        return ipaddress.ip_address(host_of(address)).is_loopback
    except ValueError:  # a name: it may resolve to any machine, even if it looks like a loopback address
        return host_of(address) == "localhost"


def socket_name(address: str) -> str:
    """The name that a shm address's Unix socket is bound to; an abstract name starts with a zero byte."""
    name = address.removeprefix(SHM_PREFIX)
    return "\0" + name[1:] if name.startswith("@") else name


def socket_file(address: str) -> str | None:
    """The path of a shm address's socket; None for an abstract name."""
    name = socket_name(address)
    return None if name.startswith("\0") else name

"""Addresses: which are valid, and which only this machine can reach."""

from __future__ import annotations

import pytest

from pagoda_server.channel.address import check_address, is_local


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("127.0.0.1:65536", "a port is from 0 to 65535"),
        ("127.0.0.1:99999", "a port is from 0 to 65535"),
        (f"127.0.0.1:{'9' * 5000}", "a port is from 0 to 65535"),
        ("127.0.0.1:-1", "is not shm:PATH, unix:PATH or HOST:PORT"),
        ("127.0.0.1:http", "is not shm:PATH, unix:PATH or HOST:PORT"),
        ("nonsense", "is not shm:PATH, unix:PATH or HOST:PORT"),
        ("50051", "is not shm:PATH, unix:PATH or HOST:PORT"),
        (":50051", "is not shm:PATH, unix:PATH or HOST:PORT"),
        ("::1:50051", "is not shm:PATH, unix:PATH or HOST:PORT"),
        ("a b:1", "is not shm:PATH, unix:PATH or HOST:PORT"),
        ("", "is not shm:PATH, unix:PATH or HOST:PORT"),
        ("engine..example:50052", "label empty or too long"),
        (f"{'a' * 64}:50052", "label too long"),
        ("\ud800:1", "Invalid character"),
        ("shm:\ud800", "surrogates not allowed"),
        ("unix:", "has no path"),
        ("shm:@", "has no path"),
    ],
)
def test_an_invalid_address_is_refused_with_the_reason(address: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_address(address, can_be_shm=True, lowest_port=0)


def test_a_transport_or_port_that_is_not_allowed_here_is_refused() -> None:
    with pytest.raises(ValueError, match="'shm:@x' is not unix:PATH or HOST:PORT"):
        check_address("shm:@x", can_be_shm=False, lowest_port=0)
    with pytest.raises(ValueError, match="a port is from 1 to 65535"):
        check_address("engine:0", can_be_shm=True, lowest_port=1)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:0",
        "[::1]:65535",
        "my_engine.local:50052",
        "unix:relative/path",
        "unix:/a..b",
        "shm:@name",
        "shm:/path",
    ],
)
def test_an_address_of_each_kind_is_accepted(address: str) -> None:
    check_address(address, can_be_shm=True, lowest_port=0)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("unix:/path", True),
        ("shm:@name", True),
        ("localhost:1", True),
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("[::1]:1", True),
        ("127.example.com:1", False),
        ("localhost.example.com:1", False),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
    ],
)
def test_only_an_address_that_cannot_leave_the_machine_is_local(address: str, expected: bool) -> None:
    assert is_local(address) == expected

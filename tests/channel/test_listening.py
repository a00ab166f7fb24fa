"""A gRPC server's address: no other server is displaced, and no file of another is deleted."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import pytest

from pagoda_server.channel.listening import GrpcPort


@asynccontextmanager
async def listening(address: str) -> AsyncIterator[GrpcPort]:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    port = GrpcPort(address, server.add_insecure_port)
    await server.start()
    try:
        yield port
    finally:
        port.close()
        await server.stop(grace=0)


async def answers(address: str) -> bool:
    async with grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
    return True


@contextmanager
def deaf_socket(path: Path) -> Iterator[None]:
    """A socket that listens and never accepts, with a full backlog."""
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as waiting:
        listener.bind(str(path))
        listener.listen(0)
        waiting.connect(str(path))
        yield


async def test_a_socket_that_is_served_is_refused_to_another_server(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 's'}"
    async with listening(address):
        with pytest.raises(OSError, match="in use"):
            async with listening(address):
                pass
        assert await answers(address)
    assert os.listdir(tmp_path) == []


async def test_a_socket_whose_server_is_busy_is_refused_too(tmp_path: Path) -> None:
    with deaf_socket(tmp_path / "s"), pytest.raises(OSError, match="in use"):
        async with listening(f"unix:{tmp_path / 's'}"):
            pass


async def test_the_socket_of_a_server_that_is_gone_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "s"))
    async with listening(f"unix:{tmp_path / 's'}") as port:
        assert port.address == f"unix:{tmp_path / 's'}"
        assert await answers(port.address)


async def test_a_socket_that_another_server_has_put_in_its_place_stays(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 's'}"
    async with listening(address):
        os.unlink(tmp_path / "s")
        server = grpc.aio.server()
        other = GrpcPort(address, server.add_insecure_port)
        await server.start()
    assert await answers(address)
    other.close()
    await server.stop(grace=0)
    assert os.listdir(tmp_path) == []


async def test_a_file_that_is_no_socket_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("data")
    with pytest.raises(OSError, match="in use"):
        async with listening(f"unix:{tmp_path / 'precious'}"):
            pass
    assert (tmp_path / "precious").read_text() == "data"


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("unix:/no/such/folder/s", "No such file or directory"),
        (f"unix:/tmp/{'x' * 200}", "at most 107 bytes"),
        ("192.0.2.1:0", "Cannot assign requested address"),
        ("no-such-host.invalid:0", "not known|resolution"),
    ],
)
async def test_an_address_that_cannot_be_bound_is_refused_with_the_reason(address: str, reason: str) -> None:
    with pytest.raises(OSError, match=reason):
        async with listening(address):
            pass


async def test_a_free_port_is_reported_and_one_in_use_refused() -> None:
    async with listening("127.0.0.1:0") as port:
        assert await answers(port.address)
        with pytest.raises(OSError, match="in use"):
            async with listening(port.address):
                pass

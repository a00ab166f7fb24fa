"""What all ranks of a tensor-parallel group do: frames over a socket, and sums over gloo."""

from __future__ import annotations

import os
import socket
import struct
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ....settings.engine import EngineConfig
from ...models.share import Share

_LENGTH = struct.Struct("=I")  # of a frame; both ends are on one host


def join(config: EngineConfig, store: int, rank: int) -> None:
    """Wait for the other ranks. A rank that does not answer for the hang limit fails a sum on all others.

    store  the descriptor of a file that all ranks have inherited, through which they find each other
    """
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ["GLOO_SOCKET_IFNAME"] = loopback  # else gloo listens where the host's name leads
    dist.init_process_group(
        "gloo",
        init_method=f"file:///proc/self/fd/{store}",
        rank=rank,
        world_size=config.tensor_parallel,
        timeout=timedelta(seconds=config.hang_timeout_s),
    )


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def share_of(rank: int, count: int) -> Share:
    """A rank's part of a model, whose sums are over the ranks that have joined."""
    return Share(rank, count, partial(sum_over_ranks, count), partial(gather_columns, rank, count))


def sum_over_ranks(count: int, addend: Tensor) -> Tensor:
    """The sum of a tensor of each rank, added in float32 in the order of ranks, so that all ranks get the same bits."""
    parts = torch.empty(count, *addend.shape, dtype=addend.dtype)
    dist.all_gather([part.view(torch.uint8) for part in parts], addend.contiguous().view(torch.uint8))
    total = parts[0].float()
    for part in parts[1:]:
        total += part
    return total.to(addend.dtype)


def gather_columns(rank: int, count: int, part: Tensor, columns: int) -> Tensor:
    """On rank 0 the parts of all ranks beside each other; on the others their own. No rows are not sent."""
    if not len(part):
        return part.new_empty(0, columns)
    sizes = [Share(each, count).of(columns, "columns").size for each in range(count)]
    sent = functional.pad(part, (0, max(sizes) - part.shape[1])).contiguous()  # gloo gathers parts of one size
    parts = torch.empty(count, *sent.shape, dtype=part.dtype) if rank == 0 else part.new_empty(0)
    dist.gather(sent.view(torch.uint8), [each.view(torch.uint8) for each in parts] if rank == 0 else None)
    if rank:
        return part
    return torch.cat([each[:, :size] for each, size in zip(parts, sizes, strict=True)], dim=1)


def send_frame(connection: socket.socket, message: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(message)) + message)


def receive_frame(connection: socket.socket) -> bytes | None:
    """The next message; None if the other end has closed."""
    header = connection.recv(_LENGTH.size, socket.MSG_WAITALL)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    message = connection.recv(length, socket.MSG_WAITALL)
    return message if len(message) == length else None

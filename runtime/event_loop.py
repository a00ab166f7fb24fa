"""The event loop of a process that serves gRPC, which keeps up with what grpc.aio has done.

grpc.aio's poller thread sends the loop one byte for each event, and blocks while the socket is full; the loop reads one
byte in a turn. A few hundred events in one turn of the loop fill the socket, and then nothing of gRPC moves until the
loop has read most of it: with a crowd at the HTTP port, whose turns take milliseconds, all streams stood still for
0.2 to 0.4 s.
"""

from __future__ import annotations

import gc
import socket
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")

SWITCH_INTERVAL_S = 0.001
GC_THRESHOLD = 5_000  # net new objects before a collection; a request in flight holds about a hundred


class EventLoop(uvloop.Loop):
    """uvloop's, except that it reads all bytes of grpc.aio's poller at once."""

    def add_reader(self, fd: Any, callback: Callable[..., object], *arguments: Any) -> None:  # type: ignore[override]
        if isinstance(fd, socket.socket) and _is_grpc(callback):
            super().add_reader(fd, _after_all_but_one_byte(fd, callback), *arguments)
        else:
            super().add_reader(fd, callback, *arguments)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a process's main coroutine, like asyncio.run."""
    result: T = uvloop.run(main, loop_factory=EventLoop)
    return result


def prefer_streams() -> None:
    """Collect garbage rarely in this process, and give its event loop the interpreter soon.

    What is in memory now stays, and tokens come and go without reference cycles. With Python's default thresholds,
    collections held up the streams for 10 ms and more. A thread that parses or tokenizes something large gives way to
    the event loop after the switch interval: at Python's default of 5 ms the streams waited for 100 ms and more.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 50, 50)


def _is_grpc(callback: Callable[..., object]) -> bool:
    queue = getattr(callback.func, "__self__", None) if isinstance(callback, partial) else None
    return type(queue).__module__.startswith("grpc.")


def _after_all_but_one_byte(end: socket.socket, callback: Callable[..., object]) -> Callable[..., object]:
    """The callback, which reads one byte and handles every event that there is, whatever byte belongs to it."""
    read = bytearray(1 << 10)  # the socket holds about 280

    def drained(*arguments: Any) -> object:
        try:
            if (waiting := end.recv_into(read, 0, socket.MSG_PEEK)) > 1:
                end.recv_into(read, waiting - 1)
        except BlockingIOError:
            return None
        return callback(*arguments)

    return drained

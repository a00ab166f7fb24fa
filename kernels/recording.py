"""Recordings of a step's compiled ops, which one call replays, like CUDA graphs on a GPU.

Python takes some microseconds an op, during which memory is idle. A recording keeps the arguments of the compiled ops,
mainly addresses. So a step's inputs must stay at their addresses, and the ops' results are in memory that recordings
own, which `empty` hands out. Ops outside the compiled module are not recorded and must not take part.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left, insort_left
from collections.abc import Callable
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from .native_module import native


class _Room:
    """The memory of a recording's results. Buffers of tensors that are gone are reused, so that few fill the cache."""

    def __init__(self, buffers: list[np.ndarray]) -> None:
        self._buffers = buffers
        self._free = sorted(buffers, key=len)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        at = bisect_left(self._free, num_bytes, key=len)
        buffer = self._free.pop(at) if at < len(self._free) else self._allocate(num_bytes)
        part = buffer[:num_bytes]  # lives as long as any tensor that views it
        finalize(part, insort_left, self._free, buffer, key=len)
        return torch.from_numpy(part).view(dtype).view(shape)

    def _allocate(self, num_bytes: int) -> np.ndarray:
        # Sizes are powers of two, so that later, larger steps can reuse most buffers.
        buffer: np.ndarray = torch.empty(1 << (num_bytes - 1).bit_length(), dtype=torch.uint8).numpy()
        self._buffers.append(buffer)
        return buffer


class _Open(threading.local):
    room: _Room | None = None


_open = _Open()


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Allocate a compiled op's result: `torch.empty`, unless this thread is recording."""
    room = _open.room
    return torch.empty(shape, dtype=dtype) if room is None else room.empty(shape, dtype)


def is_recording() -> bool:
    """Whether this thread is recording, so that ops of torch would be missing later."""
    return _open.room is not None


class Recording:
    """Recorded ops that can be run again.

    result  what the recorded function returned; valid until the recorder's next recording or replay
    """

    def __init__(self, ops: object, result: Tensor, buffers: list[np.ndarray]) -> None:
        self._ops = ops
        self._buffers = buffers  # kept alive: the ops write to them
        self.result = result

    def replay(self) -> bool:
        """Run the ops again. If they were recorded with another instruction set, do nothing and return False."""
        assert native is not None
        has_run: bool = native.replay(self._ops)
        return has_run


class Recorder:
    """Makes recordings that share the memory of their results: read one's result before running another."""

    def __init__(self) -> None:
        self._buffers: list[np.ndarray] = []

    def record(self, compute: Callable[[], Tensor]) -> Recording:
        """Record `compute`, which must run only compiled ops, on tensors that outlive the recording."""
        assert native is not None
        _open.room = _Room(self._buffers)
        native.begin_recording()
        try:
            result = compute()
        finally:
            _open.room = None
            ops = native.end_recording()
        return Recording(ops, result, self._buffers)

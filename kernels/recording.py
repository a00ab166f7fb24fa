"""Steps of compiled ops that are recorded once and then run by one call, as CUDA graphs do it on a GPU.

Python takes some microseconds an op, in which memory idles. A recording keeps what the ops of the compiled module were
called with, addresses above all. So a step's inputs must stay where they are, and results of ops lie in memory that the
recordings own: `empty` hands it out. Ops that are not the compiled module's are not seen, and must not take part.
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

from pagoda_server.kernels.native_module import native


class _Room:
    """Memory of one recording's results. A buffer whose tensor is gone is used again, so that few stay in the cache."""

    def __init__(self, buffers: list[np.ndarray]) -> None:
        self._buffers = buffers
        self._free = sorted(buffers, key=len)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        at = bisect_left(self._free, num_bytes, key=len)
        buffer = self._free.pop(at) if at < len(self._free) else self._allocate(num_bytes)
        part = buffer[:num_bytes]  # lives as long as a tensor over it
        finalize(part, insort_left, self._free, buffer, key=len)
        return torch.from_numpy(part).view(dtype).view(shape)

    def _allocate(self, num_bytes: int) -> np.ndarray:
        # By powers of two: steps of more and more sequences leave no more behind than the largest has.
        buffer: np.ndarray = torch.empty(1 << (num_bytes - 1).bit_length(), dtype=torch.uint8).numpy()
        self._buffers.append(buffer)
        return buffer


class _Open(threading.local):
    room: _Room | None = None


_open = _Open()


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """What every compiled op takes the memory of its result from: `torch.empty`, unless this thread is recording."""
    room = _open.room
    return torch.empty(shape, dtype=dtype) if room is None else room.empty(shape, dtype)


class Recording:
    """Compiled ops that run again as they were recorded.

    result  of what was recorded; its values are those of the last replay, until the recorder's next recording or replay
    """

    def __init__(self, ops: object, result: Tensor, buffers: list[np.ndarray]) -> None:
        self._ops = ops
        self._buffers = buffers  # which the ops write to
        self.result = result

    def replay(self) -> bool:
        """Runs the ops again. Does nothing and returns False if they were recorded with another instruction set."""
        assert native is not None
        has_run: bool = native.replay(self._ops)
        return has_run


class Recorder:
    """Makes recordings that share the memory of their results: one at a time runs, and is read, before the next."""

    def __init__(self) -> None:
        self._buffers: list[np.ndarray] = []

    def record(self, compute: Callable[[], Tensor]) -> Recording:
        """Calls `compute`, which runs compiled ops only, at addresses that outlive the recording."""
        assert native is not None
        _open.room = _Room(self._buffers)
        native.begin_recording()
        try:
            result = compute()
        finally:
            _open.room = None
            ops = native.end_recording()
        return Recording(ops, result, self._buffers)

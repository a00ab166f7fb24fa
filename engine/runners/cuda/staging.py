"""Small arrays that go to the device, or come back, in one asynchronous copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes


def all_launched(device: torch.device) -> Callable[[], None]:
    """Return a function that waits until the device has finished everything launched so far."""
    if device.type != "cuda":  # it has finished already
        return lambda: None
    event = torch.cuda.Event()
    event.record()
    return event.synchronize


def host_bytes(size: int, device: torch.device) -> Tensor:
    """Allocate [size] uint8 on the host, pinned if the device is a GPU."""
    return torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


class Layout:
    """Named arrays, one behind the other in one piece of memory. `fields` gives their dtypes and lengths."""

    def __init__(self, fields: Mapping[str, tuple[torch.dtype, int]]) -> None:
        self._places: dict[str, tuple[torch.dtype, int, int]] = {}
        self.size = 0
        for name, (dtype, length) in fields.items():
            end = self.size + length * dtype.itemsize
            self._places[name] = dtype, self.size, end
            self.size = -(-end // _ALIGNMENT) * _ALIGNMENT

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        return {name: memory[start:end].view(dtype) for name, (dtype, start, end) in self._places.items()}


class Staging:
    """Arrays for the device, at addresses there that never change.

    sets  how many copies of the arrays the host has. They take turns: one is filled while others are being sent. If a
          step sends more often than there are sets, the host waits for the step before.
    """

    def __init__(self, fields: Mapping[str, tuple[torch.dtype, int]], device: torch.device, sets: int = 2) -> None:
        layout = Layout(fields)
        self._device = device
        self._target = torch.zeros(layout.size, dtype=torch.uint8, device=device)
        self._sources = [host_bytes(layout.size, device) for _ in range(sets)]
        self._arrays = [{name: view.numpy() for name, view in layout.views(s).items()} for s in self._sources]
        self._waits = [all_launched(device) for _ in range(sets)]
        self._turn = 0
        self.device = layout.views(self._target)

    def fill(self) -> dict[str, np.ndarray]:
        """Return the arrays to fill. They still hold what was written when their turn last came."""
        self._waits[self._turn]()
        return self._arrays[self._turn]

    def send(self) -> None:
        self._target.copy_(self._sources[self._turn], non_blocking=True)
        self._waits[self._turn] = all_launched(self._device)
        self._turn = (self._turn + 1) % len(self._sources)

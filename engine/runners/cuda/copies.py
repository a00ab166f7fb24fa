"""Which blocks a step copies, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda_server.engine.runners.cuda.staging import Staging


class CopyInputs:
    """At most `size` copies a step: a sequence needs one at most, when it starts."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._staging = Staging({"sources": (torch.int64, size), "targets": (torch.int64, size)}, device)

    def send(self, pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """
        pairs   a source and a target each
        return  [pairs] int64 each, valid until the next call
        """
        arrays, count = self._staging.fill(), len(pairs)
        arrays["sources"][:count] = [source for source, _ in pairs]
        arrays["targets"][:count] = [target for _, target in pairs]
        self._staging.send()
        sent = self._staging.device
        return sent["sources"][:count], sent["targets"][:count]

"""Adapters of a tensor-parallel group: every rank loads its part of the same bytes, or none does.

A load is numbered. Its number stands for the adapter in what rank 0 sends to the others.
"""

from __future__ import annotations

import itertools
import json
import logging
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....checkpoints import CheckpointError
from ....checkpoints.adapters import AdapterNotFound
from ...core.adapter import Adapter
from ...core.errors import EngineError
from ...core.step import Chunk
from ...models.adapted import AdapterBanks
from .packed_step import SlotChanges, packed_slots

if TYPE_CHECKING:
    from .leader import Leader  # it imports torch.distributed, which others do not need

log = logging.getLogger("pagoda.engine")

_FAULTS: dict[str, type[Exception]] = {
    "missing": AdapterNotFound,
    "invalid": CheckpointError,
    "failed": EngineError,
}


class _Part:
    """Rank 0's part of an adapter, and the number by which the other ranks know theirs."""

    def __init__(self, weights: object, number: int) -> None:
        self.weights, self.number = weights, number


class GroupAdapters:
    """Loads adapters on every rank of a group. Rank 0 has one.

    banks  rank 0's own
    """

    def __init__(self, banks: AdapterBanks, leader: Leader) -> None:
        self.num_slots, self.max_rank = banks.num_slots, banks.max_rank
        self._banks, self._leader = banks, leader
        self._numbers = itertools.count()
        self._dropped: deque[int] = deque()  # loads that nothing here needs any longer, whose parts others still have

    def load(self, path: Path) -> Adapter:
        """Have every rank read an adapter, on any thread, while steps run. Raises what `AdapterBanks.load` raises."""
        number = next(self._numbers)
        self._leader.ask(json.dumps({"number": number, "path": str(path)}).encode())
        try:
            try:
                own = self._banks.load(path)
            finally:
                answers = [json.loads(each) for each in self._leader.answers()]
            self._check(own, answers)
        except BaseException:
            self._dropped.append(number)
            raise
        part = _Part(own.weights, number)
        weakref.finalize(part, self._dropped.append, number)
        num_bytes = own.num_bytes + sum(each["num_bytes"] for each in answers)
        return replace(own, num_bytes=num_bytes, weights=part)

    def _check(self, own: Adapter, answers: list[dict[str, Any]]) -> None:
        for rank, answer in enumerate(answers, 1):
            if "fault" in answer:
                raise _FAULTS[answer["fault"]](f"rank {rank}: {answer['detail']}")
            if answer["identity"] != own.identity.hex():
                raise CheckpointError(f"rank {rank} has read other bytes than rank 0: the files have just changed")

    def place(self, chunks: Iterable[Chunk]) -> None:
        """Have the adapter of each chunk in its slot on all ranks. No step may be running."""
        puts = []
        for slot, adapter in self._banks.missing(chunks):
            part = adapter.weights
            assert isinstance(part, _Part), "load() has made it"
            self._banks.put(slot, adapter.identity, part.weights)
            puts.append((slot, part.number))
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        if puts or dropped:
            self._leader.send(packed_slots(SlotChanges(puts, dropped)))


class RankAdapters:
    """What a rank other than 0 has loaded. Loads and changes of slots come on different threads.

    banks  its own
    """

    def __init__(self, banks: AdapterBanks) -> None:
        self._banks = banks
        self._loaded: dict[int, Adapter] = {}  # by the number of the load

    def load(self, question: bytes) -> bytes:
        """Load what rank 0 loads; return the answer."""
        asked = json.loads(question)
        answer: dict[str, object]
        try:
            adapter = self._banks.load(Path(asked["path"]))
        except FileNotFoundError as error:
            answer = {"fault": "missing", "detail": str(error)}
        except CheckpointError as error:
            answer = {"fault": "invalid", "detail": str(error)}
        except Exception as error:
            log.exception("an adapter could not be loaded")
            answer = {"fault": "failed", "detail": type(error).__name__}
        else:
            self._loaded[asked["number"]] = adapter
            answer = {"identity": adapter.identity.hex(), "num_bytes": adapter.num_bytes}
        return json.dumps(answer).encode()

    def change(self, changes: SlotChanges) -> None:
        """Put adapters into slots, and forget some. No step may be running."""
        for slot, number in changes.puts:
            adapter = self._loaded[number]
            self._banks.put(slot, adapter.identity, adapter.weights)
        for number in changes.dropped:
            self._loaded.pop(number, None)

"""The ranks of a tensor-parallel group as threads of one process, which start in no time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import torch
from torch import Tensor

from pagoda_server.engine.models.share import Share
from pagoda_server.engine.runners.cpu.leader import Leader
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.settings import EngineConfig

LATE_S = 60.0


class ThreadRanks:
    """Shares that sum and gather as those of processes do."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=LATE_S)
        self._parts: list[Tensor] = [torch.empty(0)] * count
        self.shares = [Share(rank, count, self._summing(rank), self._gathering(rank)) for rank in range(count)]

    def run(self, compute: Callable[[Share], Tensor]) -> list[Tensor]:
        """What each rank computes, all at the same time."""
        with ThreadPoolExecutor(len(self.shares)) as threads:
            return list(threads.map(compute, self.shares))

    def abort(self) -> None:
        """End every wait for the others with BrokenBarrierError."""
        self._barrier.abort()

    def _exchanged(self, rank: int, part: Tensor) -> list[Tensor]:
        """The parts of all ranks."""
        self._parts[rank] = part
        self._barrier.wait()
        parts = [each.clone() for each in self._parts]
        self._barrier.wait()
        return parts

    def _summing(self, rank: int) -> Callable[[Tensor], Tensor]:
        def sum_(addend: Tensor) -> Tensor:
            return torch.stack(self._exchanged(rank, addend.float())).sum(0).to(addend.dtype)

        return sum_

    def _gathering(self, rank: int) -> Callable[[Tensor, int], Tensor]:
        def gather(part: Tensor, columns: int) -> Tensor:
            if not len(part):
                return part.new_empty(0, columns)
            whole = torch.cat(self._exchanged(rank, part), dim=1)
            assert whole.shape[1] == columns
            return whole

        return gather


class ThreadLeader(Leader):
    """Sends the messages of rank 0 to threads."""

    def __init__(self, ranks: ThreadRanks) -> None:
        self.share = ranks.shares[0]
        self.messages: list[queue.SimpleQueue[bytes | None]] = [queue.SimpleQueue() for _ in ranks.shares[1:]]
        self._is_in_step = True

    def wait_until_loaded(self) -> int:
        return 0

    def send(self, message: bytes) -> None:
        for each in self.messages:
            each.put(message)


class ThreadGroup:
    """A context in which rank 0's runner computes with the others.

    config  with the number of ranks
    """

    def __init__(self, config: EngineConfig) -> None:
        self._ranks = ThreadRanks(config.tensor_parallel)
        self._leader = ThreadLeader(self._ranks)
        self.runner = ModelRunner(config, leader=self._leader)
        followers = [ModelRunner(config, share=share) for share in self._ranks.shares[1:]]
        self._threads = [
            threading.Thread(target=self._follow, args=each, daemon=True)
            for each in zip(followers, self._leader.messages, strict=True)
        ]

    def __enter__(self) -> ModelRunner:
        for thread in self._threads:
            thread.start()
        return self.runner

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for messages in self._leader.messages:
            messages.put(None)
        for thread in self._threads:
            thread.join(LATE_S)
            assert not thread.is_alive()

    def _follow(self, runner: ModelRunner, messages: queue.SimpleQueue[bytes | None]) -> None:
        try:
            while (message := messages.get()) is not None:
                runner.follow(message)
        finally:
            if message is not None:  # it has failed
                self._ranks.abort()

"""Copies of blocks on the device, and between the device's KV cache and host memory, in the order of the steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....kernels import PagedKV, bytes_of_block, load_blocks, save_blocks
from ...core.step import StepPlan
from .staging import Staging


class CopyInputs:
    """The blocks that a step copies on the device: at most `size`, as a sequence needs at most one, when it starts."""

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


def nothing_copied() -> float:
    return 0.0


class HostCopies:
    """Pinned host memory for `num_blocks` blocks of all layers, and copies to and from it on a stream of their own.

    Torch allocates pinned memory by powers of two: 5 GB of blocks take 8 GB (2^33 bytes) of the host.
    """

    def __init__(self, layers: Sequence[PagedKV], num_blocks: int, device: torch.device) -> None:
        self._layers, self._device, self._block_size = layers, device, layers[0].block_size
        is_gpu = device.type == "cuda"
        self._rows = torch.empty(num_blocks, bytes_of_block(layers), dtype=torch.uint8, pin_memory=is_gpu)
        wide = (torch.int64, len(layers[0].keys))  # no step saves or loads more blocks than the cache has
        self._staging = Staging({"saved": wide, "loaded": wide}, device, sets=4)  # up to two for each of two steps
        self._stream = torch.cuda.Stream() if is_gpu else None
        self._before: torch.cuda.Event | None = None  # all that was launched before the last step
        self._last = _Touched.by(StepPlan([]), self._block_size)

    def row(self, host: int) -> memoryview:
        return self._rows[host].numpy().data

    def launch(self, plan: StepPlan) -> Callable[[], float]:
        """Start a plan's saves, then its loads. Call this for every plan, before anything else of it is launched.

        The current stream, which computes the steps, waits for the copies. They overlap with the step before, except
        those of blocks that it uses. Return a function that gives their time once they are done.
        """
        before, now = self._before, _all_launched_here(self._device)
        seconds = self._start(plan, before, now) if plan.saves or plan.loads else nothing_copied
        self._before, self._last = now, _Touched.by(plan, self._block_size)
        return seconds

    def copy(self, plan: StepPlan) -> None:
        """Make the copies of a plan that has nothing else, and wait for them."""
        self.launch(plan)
        if self._stream is not None:
            self._stream.synchronize()

    def _start(
        self, plan: StepPlan, before: torch.cuda.Event | None, now: torch.cuda.Event | None
    ) -> Callable[[], float]:
        written, used = self._last.written(), self._last.used()
        late_saves, early_saves = _split(plan.saves, lambda block, _: block in written)
        rows = {row for _, row in late_saves}
        late_loads, early_loads = _split(plan.loads, lambda row, block: block in used or row in rows)
        early, late = self._copy(early_saves, early_loads, before), self._copy(late_saves, late_loads, now)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        return lambda: early() + late()

    def _copy(
        self, saves: list[tuple[int, int]], loads: list[tuple[int, int]], after: torch.cuda.Event | None
    ) -> Callable[[], float]:
        """Start copies that wait for the event."""
        if not saves and not loads:
            return nothing_copied
        with torch.cuda.stream(self._stream):
            if self._stream is not None and after is not None:
                self._stream.wait_event(after)
            arrays = self._staging.fill()
            arrays["saved"][: len(saves)] = [block for block, _ in saves]
            arrays["loaded"][: len(loads)] = [block for _, block in loads]
            stop_watch = _stop_watch(self._device)
            self._staging.send()
            sent = self._staging.device
            if saves:
                save_blocks(self._layers, sent["saved"][: len(saves)], self._rows, [row for _, row in saves])
            if loads:
                load_blocks(self._layers, self._rows, [row for row, _ in loads], sent["loaded"][: len(loads)])
            return stop_watch()


@dataclass(frozen=True, slots=True)
class _Touched:
    """The blocks that a step touches.

    tables  each sequence's block tables, and their first and last block (exclusive) that the step writes to
    copies  from block to block
    """

    tables: list[tuple[list[int], int, int]]
    copies: list[tuple[int, int]]

    @staticmethod
    def by(plan: StepPlan, size: int) -> _Touched:
        # A sequence that gives up its blocks gets another table, so these stay those of the plan.
        tables = [
            (table, chunk.start // size, -(-chunk.end // size))
            for chunk in plan.chunks
            for table in (chunk.seq.blocks, *chunk.seq.blocks.windows)
        ]
        return _Touched(tables, plan.copies)

    def written(self) -> set[int]:
        return {block for blocks, start, end in self.tables for block in blocks[start:end]}.union(
            target for _, target in self.copies
        )

    def used(self) -> set[int]:
        return {block for blocks, _, _ in self.tables for block in blocks}.union(*self.copies)


def _split(
    pairs: list[tuple[int, int]], condition: Callable[[int, int], bool]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the pairs for which the condition holds, and the others."""
    return [pair for pair in pairs if condition(*pair)], [pair for pair in pairs if not condition(*pair)]


def _all_launched_here(device: torch.device) -> torch.cuda.Event | None:
    """Return an event that passes when the current stream has computed everything launched so far; None: it has."""
    return torch.cuda.current_stream().record_event() if device.type == "cuda" else None


def _stop_watch(device: torch.device) -> Callable[[], Callable[[], float]]:
    """Start a stop watch. Return a function that stops it and returns another one, which then gives the seconds."""
    if device.type != "cuda":
        started = time.perf_counter()

        def stop() -> Callable[[], float]:
            seconds = time.perf_counter() - started
            return lambda: seconds

        return stop
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()

    def stop_on_device() -> Callable[[], float]:
        last.record()
        return lambda: float(first.elapsed_time(last)) / 1e3

    return stop_on_device

"""A record of what every step of a loop did, and of when each request got its tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from bench.batching.loops import MODES, Mode, Model, is_padding, padded
from bench.measure import RequestTimes, Run
from bench.workloads import Workload
from pagoda_server.engine.core.sequence import Request, SamplingParams, Sequence
from pagoda_server.engine.core.step import Chunk
from pagoda_server.engine.runners.load import InformedRunner


class Work(Enum):
    """What a step did for the sequence in a slot."""

    PREFILL = "prefill"
    DECODE = "decode"
    PADDING = "padding"
    HELD = "held"  # nothing, but the sequence keeps the slot


@dataclass(frozen=True, slots=True)
class Cell:
    """A slot in a step. `request` is its number in the workload."""

    slot: int
    request: int
    work: Work


@dataclass(frozen=True, slots=True)
class Recording:
    """
    steps         for each step, the slots that were taken
    padding_rows  rows that were computed for the padding of prompts and for finished sequences
    run           as it is measured through gRPC
    """

    mode: Mode
    size: int
    steps: list[list[Cell]]
    padding_rows: int
    run: Run

    @property
    def num_slots(self) -> int:
        return 1 + max(cell.slot for cells in self.steps for cell in cells)

    @property
    def slot_use(self) -> float:
        """The share of the batch's rows that gave a token: output tokens ÷ (steps × batch size)."""
        return self.run.output_tokens / (len(self.steps) * self.size)


def record(
    runner: InformedRunner, workload: Workload, mode: Mode, size: int, on_tokens: Callable[[int], None]
) -> tuple[Recording, list[Sequence]]:
    """Serve a workload whose requests are all there at once; return the record and the finished sequences."""
    seqs = [_sequence(id, request.prompt, request.output_len) for id, request in enumerate(workload.requests)]
    recorder = _Recorder(len(seqs), on_tokens)
    MODES[mode](Model(runner, recorder), seqs, size)
    run = Run([RequestTimes(0.0, arrivals) for arrivals in recorder.arrivals], len(recorder.steps))
    return Recording(mode, size, recorder.steps, recorder.padding_rows, run), seqs


def _sequence(id: int, prompt: list[int], output_len: int) -> Sequence:
    params = SamplingParams(max_tokens=output_len)
    return Sequence(id, list(prompt), Request(len(prompt)), params, max_len=len(prompt) + output_len)


class _Recorder:
    """Gives a sequence the first free slot when it starts, for as long as it runs."""

    def __init__(self, num_requests: int, on_tokens: Callable[[int], None]) -> None:
        self.steps: list[list[Cell]] = []
        self.arrivals: list[list[float]] = [[] for _ in range(num_requests)]
        self.padding_rows = 0
        self._on_tokens = on_tokens
        self._slot_of: dict[int, int] = {}
        self._started = time.perf_counter()

    def stepped(self, running: list[Sequence], chunks: list[Chunk], served: list[Sequence]) -> None:
        now = time.perf_counter() - self._started
        got_token = {seq.id for seq in served}
        for id in got_token:
            self.arrivals[id].append(now)
        works: dict[int, Work] = {}
        for chunk in chunks:
            work = _work(chunk, got_token)
            if work is Work.PADDING:
                self.padding_rows += chunk.length
            works[padded(chunk.seq) if is_padding(chunk.seq) else chunk.seq.id] = work
        ids = [seq.id for seq in running if not is_padding(seq)]
        self._give_slots(ids)
        self.steps.append([Cell(self._slot_of[id], id, works.get(id, Work.HELD)) for id in ids])
        self._on_tokens(len(served))

    def _give_slots(self, ids: list[int]) -> None:
        self._slot_of = {id: self._slot_of[id] for id in ids if id in self._slot_of}
        free = iter(sorted(set(range(len(ids))) - set(self._slot_of.values())))
        for id in ids:
            if id not in self._slot_of:
                self._slot_of[id] = next(free)


def _work(chunk: Chunk, got_token: set[int]) -> Work:
    if is_padding(chunk.seq) or (chunk.samples and chunk.seq.id not in got_token):
        return Work.PADDING
    return Work.PREFILL if chunk.start < chunk.seq.request.prompt_len else Work.DECODE

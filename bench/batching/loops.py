"""Four ways to serve a queue of requests with one model, side by side: sequential, interleaved, static, continuous.

All four drive the same runner over the same paged KV cache, with the same kernels, and generate the same tokens. They
differ only in which requests share a step. Continuous batching is iteration-level scheduling (Orca, Yu et al., 2022);
the engine's scheduler (engine/scheduling/) does the same and adds what a server needs: policies, preemption, deadlines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, Protocol

from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.core.sequence import BlockTable, Request, SamplingParams, Sequence
from pagoda_server.engine.core.step import Chunk, StepPlan
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.runners.load import InformedRunner

TOKEN_BUDGET = 512  # tokens of a step at most

Mode = Literal["sequential", "interleaved", "static", "continuous"]


def sequential(model: Model, queue: list[Sequence], size: int) -> None:
    """One request at a time, from its prompt to its end."""
    for seq in queue:
        model.start(seq)
        while not is_done(seq):
            model.step(fill([seq]))
        model.leave(seq)


def interleaved(model: Model, queue: list[Sequence], size: int) -> None:
    """`size` requests at once, one step of each in turn. It is fair, but every step still computes one request."""
    waiting, running = deque(queue), deque[Sequence]()
    while waiting or running:
        while waiting and len(running) < size:
            running.append(model.start(waiting.popleft()))
        seq = running.popleft()
        model.step(fill([seq]))
        if is_done(seq):
            model.leave(seq)
        else:
            running.append(seq)


def static(model: Model, queue: list[Sequence], size: int) -> None:
    """Batches that no request joins or leaves before the longest member ends, as in `generate` on padded prompts.

    Prompts are padded to the longest, and a member that has finished keeps its row. The model computes these rows like
    any others, and the results are dropped.
    """
    for first in range(0, len(queue), size):
        batch = [model.start(seq) for seq in queue[first : first + size]]
        longest = max(seq.request.prompt_len for seq in batch)
        padding = [model.start(pad(seq, longest)) for seq in batch if seq.request.prompt_len < longest]
        for chunks in in_steps([whole(seq) for seq in (*padding, *batch)]):
            model.step(chunks)
        while not all(map(is_done, batch)):
            model.step([whole(seq) for seq in batch])  # a finished member computes its last token again
        for seq in (*padding, *batch):
            model.leave(seq)


def continuous(model: Model, queue: list[Sequence], size: int) -> None:
    """Requests join and leave the batch at every step.

    With padded tensors a join merges two batches and a leave filters one. With paged blocks both only change a list.
    """
    waiting, running = deque(queue), list[Sequence]()
    while waiting or running:
        while waiting and len(running) < size:
            running.append(model.start(waiting.popleft()))
        model.step(fill(running))
        for seq in filter(is_done, running):
            model.leave(seq)
        running = [seq for seq in running if not is_done(seq)]


MODES: dict[Mode, Callable[[Model, list[Sequence], int], None]] = {
    "sequential": sequential,
    "interleaved": interleaved,
    "static": static,
    "continuous": continuous,
}


# -- what the loops share ----------------------------------------------------------------------------------------------


class Observer(Protocol):
    def stepped(self, running: list[Sequence], chunks: list[Chunk], served: list[Sequence]) -> None:
        """See a step: the sequences that hold blocks, what it computed, and the sequences that got a token."""


class Model:
    """A runner and its KV blocks. A sequence holds blocks for its full length from its start to its end."""

    def __init__(self, runner: InformedRunner, observer: Observer) -> None:
        self._runner = runner
        self._observer = observer
        self._running: list[Sequence] = []
        self.pool = BlockPool(runner.info.num_blocks, runner.info.kv_cache.block_size)

    def start(self, seq: Sequence) -> Sequence:
        """Give a sequence its blocks. Raise ConfigError if there are too few."""
        needed = self.pool.blocks_for(seq.max_len)
        if needed > self.pool.num_available:
            raise ConfigError(
                f"the batch needs more than the {self.pool.num_blocks} KV blocks that there are: "
                "choose a smaller batch or shorter requests"
            )
        seq.blocks = BlockTable(self.pool.allocate(needed))
        self._running.append(seq)
        return seq

    def step(self, chunks: list[Chunk]) -> None:
        """Compute chunks and append the tokens that they choose; drop those of finished sequences and of padding."""
        sampled = self._runner.launch(StepPlan(chunks)).result()
        served = []
        for chunk, token in zip(chunks, sampled.tokens, strict=True):
            seq = chunk.seq
            if is_done(seq):
                continue
            seq.num_computed = chunk.end
            if chunk.samples:
                seq.tokens.append(token)
                served.append(seq)
        self._observer.stepped(self._running, chunks, served)

    def leave(self, seq: Sequence) -> None:
        """Take a sequence's blocks back."""
        self.pool.release(seq.blocks)
        seq.blocks = BlockTable()
        self._running.remove(seq)


def is_done(seq: Sequence) -> bool:
    return len(seq.tokens) >= seq.max_len


def whole(seq: Sequence) -> Chunk:
    """Everything that a sequence has not computed: its prompt, or its last token."""
    return Chunk(seq, seq.num_computed, seq.remaining_len, samples=not is_padding(seq))


def fill(running: Iterable[Sequence]) -> list[Chunk]:
    """One step: every decode, then as much of the prompts as the token budget holds."""
    in_order = sorted(running, key=lambda seq: seq.remaining_len > 1)
    return next(in_steps([whole(seq) for seq in in_order]))


def in_steps(chunks: list[Chunk]) -> Iterator[list[Chunk]]:
    """Cut chunks into steps of at most TOKEN_BUDGET tokens."""
    step: list[Chunk] = []
    room = TOKEN_BUDGET
    for chunk in chunks:
        start = chunk.start
        while start < chunk.end:
            length = min(room, chunk.end - start)
            step.append(Chunk(chunk.seq, start, length, chunk.samples and start + length == chunk.end))
            start += length
            room -= length
            if room == 0:
                yield step
                step, room = [], TOKEN_BUDGET
    if step:
        yield step


def pad(seq: Sequence, longest: int) -> Sequence:
    """Return the padding of a prompt: tokens 0 in blocks of their own, which no sequence reads."""
    length = longest - seq.request.prompt_len
    return Sequence(
        -1 - seq.id, [0] * length, Request(length, deadline=seq.request.deadline), SamplingParams(), max_len=length
    )


def is_padding(seq: Sequence) -> bool:
    return seq.id < 0


def padded(seq: Sequence) -> int:
    """Return the id of the sequence that this padding belongs to."""
    return -1 - seq.id

"""Drafters and rules for tests: guesses that are right as often as a test wants, made whether they pay or not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from pagoda_server.engine.core.sequence import Sequence
from pagoda_server.engine.core.step import Chunk
from pagoda_server.engine.drafting import Drafter, Speculation
from pagoda_server.engine.timing.cost_model import CostModel


class Oracle:
    """Guesses the tokens that `future` gives for a sequence and a count; each is right with a probability.

    The same tokens of the same sequence always have the same guesses.
    """

    token_s = 0.0

    def __init__(self, future: Callable[[Sequence, int], list[int]], accuracy: float, vocab_size: int) -> None:
        self.accuracy = accuracy
        self._future = future
        self._vocab_size = vocab_size

    def propose(self, seq: Sequence, most: int) -> list[int]:
        chance = random.Random(f"{seq.id} {seq.num_tokens}")
        return [
            token if chance.random() < self.accuracy else chance.randrange(self._vocab_size)
            for token in self._future(seq, most)
        ]

    def forget(self, seq: Sequence) -> None:
        """Nothing is kept."""


class AlwaysDrafts(Speculation):
    """Drafts as many tokens as it may for every decode, as long as the step has room.

    Where steps overlap, two sequences of three wait for their last token at every step, and so draft in all others.
    """

    def __init__(self, drafter: Drafter, most: int, vocab_size: int, max_choices: int | None = None) -> None:
        super().__init__(drafter, most, vocab_size, max_choices)
        self.is_on = True

    def holds(self, decodes: list[Chunk], costs: CostModel, num_running: int) -> list[Chunk]:
        return [chunk for chunk in decodes if chunk.seq.id % 3] if self.is_on else []

    def drafts(
        self, decodes: list[Chunk], room: int, costs: CostModel, num_running: int
    ) -> Iterator[tuple[Chunk, list[int]]]:
        for chunk in decodes if self.is_on else []:
            most = min(self.most, room, chunk.seq.max_len - chunk.seq.num_tokens - 1)
            if most > 0 and (guesses := self._allowed(chunk.seq, self._propose(chunk.seq, most))):
                room -= len(guesses)
                yield chunk, guesses

"""How many tokens a step drafts for each sequence, and which.

Speculative decoding (Leviathan et al., 2023; Chen et al., 2023): guessed tokens are computed behind a sequence's last
one in the same step. Here a guess is kept if the sequence's own sampler chooses that very token in its place, so tokens
do not depend on what was guessed. A guess that is refused has cost a row of the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Protocol

from pagoda_server.engine.core.sequence import Sequence
from pagoda_server.engine.core.step import Chunk
from pagoda_server.engine.timing.cost_model import CostModel

MARGIN = 1.25  # a draft must bring this many times the tokens that its row's time would bring without it
LEAST_CHANCE = 0.05  # a less likely draft is not made, however little its row seems to cost
FIRST_CHANCE = 0.5  # what is expected of a new sequence's drafts
WEIGHT = 0.2  # of the last verified draft in a sequence's chance: about five count
PATIENCE = 32  # steps without a draft after which one is tried again; doubled each time that it is refused
MOST_PATIENCE = 256


class Drafter(Protocol):
    """Guesses the tokens that follow those of a sequence.

    token_s  seconds that it takes for a token
    """

    @property
    def token_s(self) -> float: ...

    def propose(self, seq: Sequence, most: int) -> list[int]:
        """Return at most so many tokens: fewer, or none, if there is nothing to go by. None of its own is pending."""

    def forget(self, seq: Sequence) -> None:
        """Drop what is kept for a sequence, if anything: it has ended."""


@dataclass(slots=True)
class _Record:
    """What became of a sequence's drafts.

    chance    that a draft is accepted, if all before it were: a mean that forgets exponentially
    num_idle  steps since it last drafted
    patience  such steps after which it tries again
    """

    chance: float = FIRST_CHANCE
    num_idle: int = 0
    patience: int = PATIENCE

    @property
    def tries_again(self) -> bool:
        return self.num_idle >= self.patience


@dataclass(frozen=True, slots=True)
class _Offer:
    """Tokens that may be drafted for a sequence."""

    chunk: Chunk
    guesses: list[int]
    chance: float
    is_first_sure: bool


class Speculation:
    """
    most        drafts of a sequence in one step at most
    vocab_size  for the masks of guided sequences
    """

    def __init__(self, drafter: Drafter, most: int, vocab_size: int) -> None:
        self.most = most
        self._drafter = drafter
        self._num_words = -(-vocab_size // 32)
        self._records: dict[int, _Record] = {}

    def drafts(self, decodes: list[Chunk], room: int, costs: CostModel) -> Iterator[tuple[Chunk, list[int]]]:
        """Choose drafts for a step so that its expected tokens per second are the most, and never fewer than without.

        A step of n decodes that takes t seconds yields n / t tokens a second. Draft j of a sequence is accepted with
        the probability c to the power of j, where c is the sequence's chance; its row takes r seconds. Adding it raises
        the rate if c ** j / r exceeds what the step, with the drafts chosen so far, yields. So the likeliest drafts are
        taken first, until the next one would bring less than MARGIN times the step's rate. Both t and r are learned
        (CostModel); prompts in the same step are left out, as each output token has its share of them in any case.

        In a step of many decodes the row is most of what a token costs: no draft is likely enough, and none is made. A
        sequence whose drafts are refused stops drafting, and tries one draft after PATIENCE steps.

        decodes  of the step, without drafts, and all their tokens known
        room     tokens that the step has room for
        """
        count = len(decodes)
        keys = sum([chunk.start for chunk in decodes])
        step_s = costs.decodes_s(count, keys) if count else 0.0
        if not step_s:
            return
        row_s = costs.decodes_s(count + 1, keys + keys // count) - step_s + self._drafter.token_s
        if MARGIN * row_s * count >= step_s:
            return
        least_chance = max(LEAST_CHANCE, MARGIN * row_s * count / step_s)
        offers = []
        for chunk in decodes:
            record = self._record(chunk.seq)
            if guesses := self._guesses(chunk.seq, record, least_chance, room):
                offers.append(_Offer(chunk, guesses, record.chance, record.tries_again))
        for offer, taken in zip(offers, _likeliest(offers, count, step_s, row_s, room), strict=True):
            if taken:
                yield offer.chunk, offer.guesses[:taken]

    def verified(self, seq: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Learn how many of a sequence's drafts were accepted."""
        record = self._record(seq)
        for _ in range(num_accepted):
            record.chance += WEIGHT * (1.0 - record.chance)
        if num_accepted < num_drafted:
            record.chance -= WEIGHT * record.chance
        if num_accepted:
            record.patience = PATIENCE
        elif record.tries_again:
            record.patience = min(2 * record.patience, MOST_PATIENCE)
        record.num_idle = 0

    def forget(self, seq: Sequence) -> None:
        """Drop what is kept for a sequence: it has ended."""
        self._records.pop(seq.id, None)
        self._drafter.forget(seq)

    def _record(self, seq: Sequence) -> _Record:
        record = self._records.get(seq.id)
        if record is None:
            record = self._records[seq.id] = _Record()
        return record

    def _guesses(self, seq: Sequence, record: _Record, least_chance: float, room: int) -> list[int]:
        """Guess as many tokens as are likely enough, or one if the sequence has not drafted for long."""
        most = min(self.most, room, seq.max_len - seq.num_tokens - 1)  # one token is chosen behind the last draft
        if seq.params.max_draft_tokens is not None:
            most = min(most, seq.params.max_draft_tokens)
        if most <= 0 or (seq.token_mask is not None and seq.token_mask.is_slow):
            return []
        record.num_idle += 1
        likely = int(math.log(least_chance) / math.log(record.chance)) if record.chance < 1.0 else most
        if not likely and not record.tries_again:
            return []
        return self._allowed(seq, self._drafter.propose(seq, min(most, max(1, likely))))

    def _allowed(self, seq: Sequence, guesses: list[int]) -> list[int]:
        """Cut guesses before the first one that the sequence's mask does not allow."""
        if seq.token_mask is None:
            return guesses
        for at, guess in enumerate(guesses):
            words = memoryview(bytearray(4 * self._num_words)).cast("I")
            seq.token_mask.fill(seq.tokens + guesses[:at], words)
            if not words[guess // 32] >> guess % 32 & 1:
                return guesses[:at]
        return guesses


def _likeliest(offers: list[_Offer], tokens: float, step_s: float, row_s: float, room: int) -> list[int]:
    """Count the drafts to take of each offer: the likeliest of all, as long as each raises the step's rate.

    tokens, step_s  that the step yields, and takes, without drafts
    """
    taken = [0] * len(offers)
    line = [(-1.0 if offer.is_first_sure else -offer.chance, at) for at, offer in enumerate(offers)]
    heapify(line)
    while line and room:
        chance, at = -line[0][0], line[0][1]
        if chance * step_s < MARGIN * row_s * tokens:
            break
        offer = offers[at]
        taken[at] += 1
        tokens += offer.chance ** taken[at]
        step_s += row_s
        room -= 1
        if taken[at] < len(offer.guesses):
            heapreplace(line, (-(offer.chance ** (taken[at] + 1)), at))
        else:
            heappop(line)
    return taken

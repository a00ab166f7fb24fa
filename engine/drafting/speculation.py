"""How many tokens a step drafts for each sequence, and which.

Speculative decoding (Leviathan et al., 2023; Chen et al., 2023): guessed tokens are computed behind a sequence's last
one in the same step. Here a guess is kept if the sequence's own sampler chooses that very token in its place, so tokens
do not depend on what was guessed. A guess that is refused has cost a row of the step.

Where steps overlap, a draft costs more. Guesses follow known tokens, so a sequence that drafts is left out of the step
that is launched while its last token is computed. Its drafts must bring more than that loses.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Protocol

from ..core.sequence import Sequence
from ..core.step import Chunk
from ..timing.cost_model import CostModel

log = logging.getLogger("pagoda.engine")

MARGIN = 1.25  # a draft must bring this many times the tokens that its row's time would bring without it
LEAST_CHANCE = 0.05  # a less likely draft is not made, however little its row seems to cost
FIRST_CHANCE = 0.5  # what is expected of a new sequence's drafts
WEIGHT = 0.2  # of the last verified draft in a sequence's chance: about five count
PATIENCE = 32  # steps without a draft after which one is tried again; doubled each time that it is refused
MOST_PATIENCE = 256
DEAR = 0.125  # tokens that a row costs: where it costs more, drafts are tried that much more rarely
WAIT_MARGIN = 1.5  # where steps overlap, drafts must bring this many times the tokens that waiting for them loses
MOST_WATCHED = 64  # sequences whose tokens are guessed while they do not draft: each takes the host microseconds


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
    idle      steps since it last drafted; those in which a draft would have been dear count less
    patience  such steps after which it tries again
    guess     a position of the sequence and the token that was guessed there, but not drafted
    has_failed  the drafter raised an exception for the sequence, which gets no more drafts
    """

    chance: float = FIRST_CHANCE
    idle: float = 0.0
    patience: int = PATIENCE
    guess: tuple[int, int] | None = None
    has_failed: bool = False

    @property
    def tries_again(self) -> bool:
        return self.idle >= self.patience

    def num_likely(self, cost: float, most: int) -> int:
        """Count the drafts, up to `most`, that are each likely enough for what a row costs in tokens."""
        least_chance = max(LEAST_CHANCE, MARGIN * cost)
        return int(math.log(least_chance) / math.log(self.chance)) if self.chance < 1.0 else most

    def compare(self, tokens: list[int]) -> None:
        """Learn from the guess that was not drafted, once its token is known."""
        if self.guess is not None and self.guess[0] < len(tokens):
            position, guess = self.guess
            self.chance += WEIGHT * ((tokens[position] == guess) - self.chance)
            self.guess = None


@dataclass(frozen=True, slots=True)
class _Offer:
    """Tokens that may be drafted for a sequence."""

    chunk: Chunk
    guesses: list[int]
    chance: float
    is_first_sure: bool

    def gain(self, cost: float, first: int = 1) -> float:
        """Count the tokens that it is expected to bring, less the cost of each row that brings more.

        first  the draft whose row is the first
        """
        chances = (self.chance**index for index in range(first, len(self.guesses) + 1))
        return sum([chance - cost for chance in chances if chance > cost])


class Speculation:
    """
    most        drafts of a sequence in one step at most
    vocab_size  for the masks of guided sequences
    max_choices  tokens that a step can choose, those behind drafts included; None: as many as it can compute
    """

    def __init__(self, drafter: Drafter, most: int, vocab_size: int, max_choices: int | None = None) -> None:
        self.most = most
        self.max_choices = max_choices
        self._drafter = drafter
        self._num_words = -(-vocab_size // 32)
        self._records: dict[int, _Record] = {}

    def drafts(
        self, decodes: list[Chunk], room: int, costs: CostModel, num_running: int
    ) -> Iterator[tuple[Chunk, list[int]]]:
        """Choose drafts for a step so that its expected tokens per second are the most, and never fewer than without.

        A step of n decodes that takes t seconds yields n / t tokens a second. Draft j of a sequence is accepted with
        the probability c to the power of j, where c is the sequence's chance; its row takes r seconds. Adding it raises
        the rate if c ** j / r exceeds what the step, with the drafts chosen so far, yields. So the likeliest drafts are
        taken first, until the next one would bring less than MARGIN times the step's rate. Both t and r are learned
        (CostModel); prompts in the same step are left out, as each output token has its share of them in any case.

        In a step of many decodes the row is most of what a token costs: no draft is likely enough, and none is made. A
        sequence whose drafts are refused stops drafting, and tries one draft after PATIENCE steps.

        Where steps overlap, all drafts of a sequence must also bring WAIT_MARGIN times the tokens that it loses by
        waiting for their outcome.

        decodes      of the step, without drafts, and all their tokens known
        room         tokens that the step has room for
        num_running  all sequences that run, in this step or not
        """
        step_s, row_s = self._times(decodes, costs)
        count = len(decodes)
        if MARGIN * row_s * count >= step_s:
            return
        cost = row_s * count / step_s
        offers = []
        for chunk in decodes:
            record = self._record(chunk.seq)
            if guesses := self._guesses(chunk.seq, record, cost, room):
                offers.append(_Offer(chunk, guesses, record.chance, record.tries_again))
        if costs.overlap and costs.wait_s is None and len(offers) == num_running:
            return  # what waiting loses is not known: this step will show it
        gains = [math.inf if _waits_anyway(offer.chunk.seq) else offer.gain(cost) for offer in offers]
        offers = _worth_waiting(offers, gains, 1, num_running, costs, step_s)
        for offer, taken in zip(offers, _likeliest(offers, count, step_s, row_s, room), strict=True):
            if taken:
                yield offer.chunk, offer.guesses[:taken]

    def holds(self, decodes: list[Chunk], costs: CostModel, num_running: int) -> list[Chunk]:
        """Choose decodes to leave out of a step, so that they can draft in the next one: their last token is pending.

        Its guess, and those behind it, show what drafts would bring. It is compared with the token once that is known,
        so a sequence's chance is learned though it does not draft.

        num_running  all sequences that run, in this step or not
        """
        if (count := len(decodes)) > MOST_WATCHED:
            return []
        step_s, row_s = self._times(decodes, costs)
        if MARGIN * row_s * count >= step_s:
            return []
        cost = row_s * count / step_s
        offers = []
        for chunk in decodes:
            record = self._record(chunk.seq)
            if (most := self._most_drafts(chunk.seq, num_tokens=chunk.seq.num_tokens + 1)) <= 0:
                continue
            record.compare(chunk.seq.tokens)
            guesses = self._propose(chunk.seq, 1 + min(most, record.num_likely(cost, most)))
            if guesses:
                record.guess = chunk.seq.num_tokens, guesses[0]
                offers.append(_Offer(chunk, guesses, record.chance, False))
        gains = [offer.gain(cost, first=2) for offer in offers]
        num_waits = 2  # now, and for the drafts' outcome
        return [offer.chunk for offer in _worth_waiting(offers, gains, num_waits, num_running, costs, step_s)]

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
        record.idle = 0.0

    def forget(self, seq: Sequence) -> None:
        """Drop what is kept for a sequence: it has ended."""
        self._records.pop(seq.id, None)
        self._drop(seq)

    def _record(self, seq: Sequence) -> _Record:
        record = self._records.get(seq.id)
        if record is None:
            record = self._records[seq.id] = _Record()
        return record

    def _times(self, decodes: list[Chunk], costs: CostModel) -> tuple[float, float]:
        """Predict how long a step of these decodes takes, and how much longer with a draft. 0 if nothing is known."""
        count = len(decodes)
        keys = sum([chunk.start for chunk in decodes])
        step_s = costs.decodes_s(count, keys) if count else 0.0
        if not step_s:
            return 0.0, 0.0
        return step_s, costs.decodes_s(count + 1, keys + keys // count) - step_s + self._drafter.token_s

    def _most_drafts(self, seq: Sequence, num_tokens: int) -> int:
        """Return how many drafts a sequence of so many tokens may have: none where each would need a slow mask."""
        if seq.token_mask is not None and seq.token_mask.is_slow:
            return 0
        most = min(self.most, seq.max_len - num_tokens - 1)  # one token is chosen behind the last draft
        return most if seq.params.max_draft_tokens is None else min(most, seq.params.max_draft_tokens)

    def _guesses(self, seq: Sequence, record: _Record, cost: float, room: int) -> list[int]:
        """Guess as many tokens as are likely enough, or one if the sequence has not drafted for long.

        cost  of a row, in tokens
        """
        most = min(room, self._most_drafts(seq, seq.num_tokens))
        if most <= 0:
            return []
        record.idle += DEAR / max(DEAR, cost)
        likely = record.num_likely(cost, most)
        if not likely and not record.tries_again:
            return []
        return self._allowed(seq, self._propose(seq, min(most, max(1, likely))))

    def _propose(self, seq: Sequence, most: int) -> list[int]:
        """Ask the drafter. A sequence for which it raises goes on without drafts: they change none of its tokens."""
        record = self._record(seq)
        if record.has_failed:
            return []
        try:
            return self._drafter.propose(seq, most)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic of a library in Rust derives from nothing narrower
            log.exception("sequence %d gets no more drafts", seq.id)
            record.has_failed = True
            self._drop(seq)
            return []

    def _drop(self, seq: Sequence) -> None:
        """Have the drafter forget a sequence, whatever state it has left behind."""
        try:
            self._drafter.forget(seq)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            log.exception("the drafter could not forget sequence %d", seq.id)

    def _allowed(self, seq: Sequence, guesses: list[int]) -> list[int]:
        """Cut guesses before the first one that the sequence's mask does not allow."""
        if seq.token_mask is None:
            return guesses
        for index, guess in enumerate(guesses):
            tokens = seq.tokens + guesses[:index]
            if seq.token_mask.surely_allows(tokens, guess):
                continue
            words = memoryview(bytearray(4 * self._num_words)).cast("I")
            seq.token_mask.fill(tokens, words)
            if not words[guess // 32] >> guess % 32 & 1:
                return guesses[:index]
        return guesses


def _worth_waiting(
    offers: list[_Offer], gains: list[float], num_waits: int, num_running: int, costs: CostModel, step_s: float
) -> list[_Offer]:
    """Choose offers that gain WAIT_MARGIN times the tokens that their sequences lose by waiting for their tokens.

    A sequence that waits loses a step, unless all that run wait together: then the next step follows at once, and loses
    only the time in which the host commits the one and launches the other.

    num_waits  how often each must wait
    """
    if not costs.overlap:
        return offers

    def worth(lost: float) -> list[_Offer]:
        least = WAIT_MARGIN * num_waits * lost
        return [offer for offer, gain in zip(offers, gains, strict=True) if gain > least]

    together = worth(min(1.0, (costs.wait_s or 0.0) / step_s))
    return together if len(together) == num_running else worth(1.0)


def _waits_anyway(seq: Sequence) -> bool:
    return seq.token_mask is not None and seq.token_mask.depends_on_tokens


def _likeliest(offers: list[_Offer], tokens: float, step_s: float, row_s: float, room: int) -> list[int]:
    """Count the drafts to take of each offer: the likeliest of all, as long as each raises the step's rate.

    tokens, step_s  that the step yields, and takes, without drafts
    """
    taken = [0] * len(offers)
    line = [(-1.0 if offer.is_first_sure else -offer.chance, index) for index, offer in enumerate(offers)]
    heapify(line)
    while line and room:
        chance, index = -line[0][0], line[0][1]
        if chance * step_s < MARGIN * row_s * tokens:
            break
        offer = offers[index]
        taken[index] += 1
        tokens += offer.chance ** taken[index]
        step_s += row_s
        room -= 1
        if taken[index] < len(offer.guesses):
            heapreplace(line, (-(offer.chance ** (taken[index] + 1)), index))
        else:
            heappop(line)
    return taken

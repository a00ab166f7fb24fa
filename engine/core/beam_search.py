"""Beam search: the continuations of a prompt with the highest sum of log-probabilities, and when to stop looking.

The rules are those of transformers' `generate(num_beams=…)`. In each step the `width` best beams are continued by every
token; of all these the best `width` that do not end are the next beams, and those that end are hypotheses if they are
among the best `width`. A hypothesis is worth its sum divided by length ** length_penalty; the best `width` are kept.
Tokens and numbers only: who computes the log-probabilities, and where, is engine/kv/beams.py. Standard library only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum


class EarlyStopping(Enum):
    """When a search that has `width` hypotheses ends; as transformers' `early_stopping`.

    ESTIMATED  the best beam, were it to end at its present length, is worth no more than the worst of them (False)
    ENOUGH     at once (True)
    BEST       no beam can become worth more than the worst of them ("never")
    """

    ESTIMATED = "estimated"
    ENOUGH = "enough"
    BEST = "best"


@dataclass(frozen=True, slots=True)
class BeamParams:
    """
    width            beams, and hypotheses that are kept
    length_penalty   above 0 favours long hypotheses, below 0 short ones
    tells_logprobs   of the tokens of hypotheses
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.ESTIMATED
    tells_logprobs: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """A continuation of the prompt: another one and a token more; without a parent, of no tokens.

    score    sum of its tokens' log-probabilities
    logprob  of its last token
    """

    score: float = 0.0
    parent: Beam | None = None
    token: int = -1
    logprob: float = 0.0

    def path(self) -> tuple[list[int], list[float]]:
        """Its tokens, and their log-probabilities."""
        tokens, logprobs, beam = [], [], self
        while beam.parent is not None:
            tokens.append(beam.token)
            logprobs.append(beam.logprob)
            beam = beam.parent
        return tokens[::-1], logprobs[::-1]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A continuation that has ended: by a stop id, `matched`, or by its length. `score` is what it is worth."""

    score: float
    beam: Beam
    matched: int | None


class BeamSearch:
    """
    stop_ids    end a beam, as token number min_tokens + 1 of it or later; before that they are no candidates
    max_tokens  end every beam

    beams       that go on, best first; at first the prompt alone
    hypotheses  best first
    """

    def __init__(self, params: BeamParams, stop_ids: Collection[int], min_tokens: int, max_tokens: int) -> None:
        self.beams = [Beam()]
        self.hypotheses: list[Hypothesis] = []
        self.is_over = False
        self.params = params
        self._stop_ids = stop_ids
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._length = 0  # of each beam

    def advance(self, found: Sequence[tuple[Sequence[int], Sequence[float]]]) -> list[tuple[int, int]]:
        """Makes every beam longer by a token.

        found   for each beam, its most likely next tokens and their log-probabilities, best first: at least `width` and
                one for each stop id, so that `width` of them do not end it
        return  for each of the new beams, best first: its parent's place among the former ones, and its token

        Of equals come first those of the better parent, then the more likely token.
        """
        self._length += 1
        width, parents = self.params.width, self.beams
        candidates = [
            (beam.score + logprob, at, token, logprob)
            for at, (beam, (ids, logprobs)) in enumerate(zip(parents, found, strict=True))
            for token, logprob in zip(ids, logprobs, strict=True)
            if self._length > self._min_tokens or token not in self._stop_ids
        ]
        candidates.sort(key=lambda candidate: candidate[0], reverse=True)
        self.beams, origins = [], []
        for rank, (score, at, token, logprob) in enumerate(candidates):
            stops = token in self._stop_ids
            if stops or self._length == self._max_tokens:
                if rank < width:
                    self._add(Beam(score, parents[at], token, logprob), token if stops else None)
            else:
                self.beams.append(Beam(score, parents[at], token, logprob))
                origins.append((at, token))
                if len(origins) == width:
                    break
        self.is_over = not origins or not self._can_improve()
        return origins

    def _add(self, beam: Beam, matched: int | None) -> None:
        worth: float = beam.score / self._length**self.params.length_penalty
        self.hypotheses.append(Hypothesis(worth, beam, matched))
        self.hypotheses.sort(key=lambda hypothesis: hypothesis.score, reverse=True)
        del self.hypotheses[self.params.width :]

    def _can_improve(self) -> bool:
        if len(self.hypotheses) < self.params.width:
            return True
        if self.params.early_stopping is EarlyStopping.ENOUGH:
            return False
        length, penalty = self._length, self.params.length_penalty
        if self.params.early_stopping is EarlyStopping.BEST and penalty > 0:
            length = self._max_tokens
        best: float = self.beams[0].score / length**penalty
        return best > self.hypotheses[-1].score

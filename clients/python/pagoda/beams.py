"""The rules of beam search, on tokens and log-probabilities alone: those of transformers' `generate(num_beams=…)`.

In each step the `width` best beams are continued by their most likely tokens. The best `width` of all continuations
that do not end are the next beams; those that end are hypotheses if they are among the best `width`. A hypothesis
scores its sum of log-probabilities divided by length ** length_penalty, and the best `width` hypotheses are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pagoda.chunk import FinishReason
from pagoda.fields import wrong

MOST_LOGPROBS = 20  # that a server reports for one token
MOST_BEAMS = 16
EarlyStopping: TypeAlias = Literal["estimated", "enough", "best"]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A continuation that beam search has found.

    tokens    the ids of all of its tokens, with the one that ended it
    logprobs  one per token
    score     the sum of `logprobs`, divided by the number of tokens to the power of `length_penalty`
    text      of the tokens, without the one that ended it
    matched   the token id that ended it; None: its length did
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    score: float
    matched: int | None = None
    text: str = ""

    @property
    def finish_reason(self) -> FinishReason:
        return FinishReason.LENGTH if self.matched is None else FinishReason.STOP

    @property
    def body(self) -> tuple[int, ...]:
        """The tokens without the one that ended it."""
        return self.tokens if self.matched is None else self.tokens[:-1]


@dataclass(frozen=True, slots=True)
class Beam:
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    sum: float = 0.0

    def longer(self, token: int, logprob: float) -> Beam:
        return Beam((*self.tokens, token), (*self.logprobs, logprob), self.sum + logprob)


class BeamSearch:
    """One search.

    max_tokens      length at which every beam ends
    length_penalty  above 0 favours long hypotheses, below 0 short ones
    early_stopping  when a search with `width` hypotheses ends. "estimated": when the best beam, if it ended at its
                    current length, would score no more than the worst hypothesis; "enough": at once; "best": when no
                    beam can still score more, whatever its length
    stop_ids        end a beam as its token number min_tokens + 1 or later; before that they are no candidates

    beams       unfinished beams, best first; initially the prompt alone
    hypotheses  finished ones, best first

    Raises InvalidArgument.
    """

    def __init__(
        self,
        width: int,
        max_tokens: int,
        *,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = "estimated",
        stop_ids: Collection[int] = (),
        min_tokens: int = 0,
    ) -> None:
        if not 2 <= width <= MOST_BEAMS:
            raise wrong("beams", f"is {width}, must be from 2 to {MOST_BEAMS}")
        if width + len(stop_ids) > MOST_LOGPROBS:  # each beam needs `width` continuations that do not end it
            detail = f"is {width}, and {len(stop_ids)} ids end a sequence; together at most {MOST_LOGPROBS} are allowed"
            raise wrong("beams", detail)
        if max_tokens < 1:
            raise wrong("max_tokens", f"is {max_tokens}, must be at least 1")
        if early_stopping not in ("estimated", "enough", "best"):
            raise wrong("early_stopping", f"{early_stopping!r} is none of estimated, enough, best")
        self.beams = [Beam()]
        self.hypotheses: list[Hypothesis] = []
        self.is_over = False
        self.num_candidates = width + len(stop_ids)
        self._width = width
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._stop_ids = frozenset(stop_ids)
        self._min_tokens = min_tokens
        self._length = 0

    def advance(self, found: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Make every beam longer by one token.

        found  for each beam, its `num_candidates` most likely next tokens and their log-probabilities, best first

        Among equals, the continuation of the better beam comes first, then the more likely token.
        """
        self._length += 1
        candidates = [
            beam.longer(token, logprob)
            for beam, likely in zip(self.beams, found, strict=True)
            for token, logprob in likely
            if self._length > self._min_tokens or token not in self._stop_ids
        ]
        candidates.sort(key=lambda beam: beam.sum, reverse=True)
        self.beams = []
        for rank, beam in enumerate(candidates):
            stops = beam.tokens[-1] in self._stop_ids
            if stops or self._length == self._max_tokens:
                if rank < self._width:
                    self._add(beam, beam.tokens[-1] if stops else None)
            else:
                self.beams.append(beam)
                if len(self.beams) == self._width:
                    break
        self.is_over = not self.beams or not self._can_improve()

    def _add(self, beam: Beam, matched: int | None) -> None:
        score: float = beam.sum / self._length**self._length_penalty
        self.hypotheses.append(Hypothesis(beam.tokens, beam.logprobs, score, matched))
        self.hypotheses.sort(key=lambda hypothesis: hypothesis.score, reverse=True)
        del self.hypotheses[self._width :]

    def _can_improve(self) -> bool:
        if len(self.hypotheses) < self._width:
            return True
        if self._early_stopping == "enough":
            return False
        is_best = self._early_stopping == "best" and self._length_penalty > 0
        length = self._max_tokens if is_best else self._length
        best: float = self.beams[0].sum / length**self._length_penalty
        return best > self.hypotheses[-1].score

"""A token mask that follows a grammar."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np
from llguidance import LLMatcher

from pagoda_server.engine.core.sequence import TokenMask
from pagoda_server.engine.guidance.masks_ahead import Job, MasksAhead, Pace
from pagoda_server.settings.grammars import GrammarError, check_matcher

SLOW_S = 0.005  # of this thread's processor time, in one call: the engine's loop does nothing else meanwhile
MOST_SLOW = 5  # times that a sequence may be slow

Result = TypeVar("Result")


class GrammarMask:
    """The mask of one sequence's grammar. One thread uses it at a time.

    matcher     compiled, at its start; it is copied
    first       its mask there
    end_id      stands in masks for the end of the output; no sequence chooses it
    vocab_size  ids from there on are not allowed
    ahead       computes masks, if they take long while this thread does other things
    pace        of the grammar's masks
    prompt_len  tokens before the output
    stop_ids    allowed wherever the output may end; below vocab_size
    min_tokens  of the output before a stop id can be chosen
    also        what restricts the tokens besides the grammar; None: nothing does
    jumps       `follow` tells forced tokens; never where the grammar may force a long text

    The matcher goes forward by the tokens that are new since the last call, and back where the tokens differ from
    those, so the mask follows from the tokens alone.
    """

    depends_on_tokens = True

    def __init__(
        self,
        matcher: LLMatcher,
        first: bytes,
        end_id: int,
        vocab_size: int,
        ahead: MasksAhead,
        pace: Pace,
        *,
        prompt_len: int,
        stop_ids: Iterable[int] = (),
        min_tokens: int = 0,
        also: TokenMask | None = None,
        jumps: bool = True,
    ) -> None:
        self.fault = ""
        self._matcher = matcher.deep_copy()
        self._ahead = ahead
        self._pace = pace
        self._vocab_size = vocab_size
        self._prompt_len = prompt_len
        self._min_tokens = min_tokens
        self._also = also
        self._jumps = jumps and also is None and pace.is_bounded
        self._followed: list[int] = []  # the output that the matcher has consumed
        self._words = np.frombuffer(first, dtype=np.uint32).copy()
        self._has_words = True  # `_words` is the mask after `_followed`
        self._is_next_known = False
        self._next: list[int] | None = None  # what `follow` returns after `_followed`, if that is known
        self._job = Job(self._matcher, self._words, pace)
        self._is_watched = False  # it may be slow
        self._num_slow = 0
        num_words = -(-vocab_size // 32)
        self._end_word, self._end_bit = end_id // 32, np.uint32(1 << end_id % 32)
        self._within = _bits(range(vocab_size - vocab_size % 32, vocab_size), num_words)
        self._within[: vocab_size // 32] = 0xFFFF_FFFF
        if end_id < vocab_size:
            self._within[self._end_word] &= ~self._end_bit
        self._stops = _bits(stop_ids, num_words)

    @property
    def is_slow(self) -> bool:
        return self._pace.is_slow or (self._also is not None and self._also.is_slow)

    def is_ready(self, tokens: list[int], timeout_s: float) -> bool:
        if self._also is not None and not self._also.is_ready(tokens, timeout_s):
            return False
        if self._job.is_started and not self._job.wait(timeout_s):
            return self._job.is_overdue
        return not self._go_to(tokens) or self._has_words or self._compute(timeout_s)

    def surely_allows(self, tokens: list[int], token: int) -> bool:
        """Go on with a token, if the grammar can, as `follow` would do next anyway."""
        if self._job.is_started or self._also is not None or self._num_slow > MOST_SLOW or not self._go_to(tokens):
            return False
        return self._allows(token) if self._has_words else self._goes_on_with(token)

    def fill(self, tokens: list[int], words: memoryview) -> None:
        self.fault = ""
        try:
            self._fill(tokens, np.frombuffer(words, dtype=np.uint32))
        except GrammarError as error:
            self.fault = str(error)

    def _fill(self, tokens: list[int], mask: np.ndarray) -> None:
        """Raises GrammarError if nothing can follow."""
        if self._num_slow > MOST_SLOW or self._job.is_overdue:
            raise GrammarError("takes too long to follow")
        if self._job.is_started:
            self._compute()
        is_allowed = self._go_to(tokens)
        check_matcher(self._matcher)
        if not is_allowed:
            raise GrammarError("does not allow the output that exists")
        if not self._has_words:
            self._compute()
        check_matcher(self._matcher)
        np.bitwise_and(self._words[: len(mask)], self._within, out=mask)
        if self._words[self._end_word] & self._end_bit:
            mask |= self._stops
        if self._also is not None:
            others = np.zeros_like(mask)
            self._also.fill(tokens, others.data)
            mask &= others
        if not mask.any():
            raise GrammarError("leaves no token that the request's other rules allow")
        if len(self._followed) < self._min_tokens and not (mask & ~self._stops).any():
            raise GrammarError("leaves only stop tokens, before stopping.min_tokens")

    def follow(self, tokens: list[int]) -> list[int] | None:
        if not self._go_to(tokens):
            return []
        if self.fault and self._has_words and self._allows_end_alone:  # for some grammars only the mask tells this
            return None
        self._find_next()
        if self._next == [] and not self._has_words and not self._job.is_started:
            self._ahead.ask(self._job)
        return self._next

    def _find_next(self) -> None:
        """Find what `follow` returns, unless that is known.

        Always before the mask: while that is computed, the matcher tells nothing, and afterwards maybe something else.
        """
        if self._is_next_known:
            return
        self._is_next_known, self._next = True, []
        if self._matcher.is_stopped():
            self._next = [] if self._matcher.is_error() else None
        elif self._jumps:
            forced = self._timed(self._matcher.compute_ff_tokens)
            self._next = forced if max(forced, default=0) < self._vocab_size else []

    @property
    def _allows_end_alone(self) -> bool:
        return bool(self._words[self._end_word] == self._end_bit) and np.count_nonzero(self._words) == 1

    def _go_to(self, tokens: list[int]) -> bool:
        """Bring the matcher to the state after `tokens`. Return False if there is none."""
        output = tokens[self._prompt_len :]
        followed = self._followed
        if output != followed:
            self._drop()
            if output[: len(followed)] != followed:
                same = 0
                while same < len(output) and output[same] == followed[same]:
                    same += 1
                self._matcher.rollback(len(followed) - same)
                del followed[same:]
            new = output[len(followed) :]
            followed += new[: self._timed(self._matcher.try_consume_tokens, new)]
        return len(followed) == len(output)

    def _allows(self, token: int) -> bool:
        """Say whether the mask, which is there, has this token."""
        at, bit = token >> 5, np.uint32(1 << (token & 31))
        return bool(self._words[at] & self._within[at] & bit)

    def _goes_on_with(self, token: int) -> bool:
        """Bring the matcher to the state after one more token, unless there is none."""
        if token >= self._vocab_size or not self._timed(self._matcher.try_consume_tokens, [token]):
            return False
        self._drop()
        self._followed.append(token)
        return True

    def _timed(self, call: Callable[..., Result], *args: object) -> Result:
        """Call the matcher, and count it if that was slow.

        This thread's time, which takes long to read, is read only once a call was slow by the clock.
        """
        now = time.thread_time if self._is_watched else time.monotonic
        began = now()
        result = call(*args)
        if now() - began > SLOW_S:
            self._num_slow += self._is_watched
            self._is_watched = True
        return result

    def _compute(self, timeout_s: float | None = None) -> bool:
        """Compute the mask of the matcher's state, here or on another thread; wait for that at most so long.

        Return whether the mask is there.
        """
        if not self._job.is_started:
            self._find_next()
            self._num_slow += self._ahead.compute(self._job) > SLOW_S
        self._has_words = self._job.ends(timeout_s)
        return self._has_words

    def _drop(self) -> None:
        """Forget what is known of the matcher's state, to use it for another."""
        if self._job.is_started:
            self._job.ends()
        else:
            self._ahead.drop(self._job)
        self._has_words = self._is_next_known = False


def _bits(ids: Iterable[int], num_words: int) -> np.ndarray:
    """[num_words] uint32 with the bits of these ids set."""
    words = np.zeros(num_words, dtype=np.uint32)
    for id in ids:
        words[id // 32] |= np.uint32(1 << id % 32)
    return words

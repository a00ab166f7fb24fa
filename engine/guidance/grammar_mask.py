"""A token mask that follows a grammar."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
from llguidance import LLMatcher

from pagoda_server.engine.core.sequence import TokenMask
from pagoda_server.engine.guidance.masks_ahead import Job, MasksAhead, Pace
from pagoda_server.settings.grammars import GrammarError, check_matcher

SLOW_S = 0.005  # of this thread's processor time, in one call: the engine's loop does nothing else meanwhile
MOST_SLOW = 5  # times that a sequence may be slow


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
        self._is_told = False  # `follow` was asked after `_followed`, and nothing must come next
        self._job: Job | None = None
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
        return self._pace.is_slow

    def is_ready(self, tokens: list[int], timeout_s: float) -> bool:
        began = time.thread_time()
        job = self._job
        if job is not None and job.is_started and not job.is_done.wait(timeout_s):
            return job.is_overdue
        if self._go_to(tokens) and not self._has_words:
            self._ask()
            job = self._job
            assert job is not None, "it was just made"
            if job.is_started:
                return job.is_done.wait(timeout_s)
            self._settle()
        self._count_slow(began)
        return True

    def fill(self, tokens: list[int], words: memoryview) -> None:
        began = time.thread_time()
        self.fault = ""
        try:
            self._fill(tokens, np.frombuffer(words, dtype=np.uint32))
        except GrammarError as error:
            self.fault = str(error)
        self._count_slow(began)

    def _fill(self, tokens: list[int], mask: np.ndarray) -> None:
        """Raises GrammarError if nothing can follow."""
        if self._num_slow > MOST_SLOW:
            raise GrammarError("takes too long to follow")
        if self._job is not None and self._job.is_started:
            if self._job.is_overdue:
                raise GrammarError("takes too long to follow")
            self._settle()
        is_allowed = self._go_to(tokens)
        check_matcher(self._matcher)
        if not is_allowed:
            raise GrammarError("does not allow the output that exists")
        if not self._has_words:
            self._ask()
            self._settle()
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
        began = time.thread_time()
        if not self._go_to(tokens) or self._job is not None:
            return []  # in the second case they are those of the last call
        if self._is_told and not self.fault:
            return []  # even if the mask, which is there now, tells more: when it came must not change the output
        if self._is_complete:
            return None
        forced = self._matcher.compute_ff_tokens() if self._jumps else []
        if max(forced, default=0) >= self._vocab_size:
            forced = []
        self._is_told = not forced
        if not forced and not self._has_words:
            self._ask()
        self._count_slow(began)
        return forced

    def _count_slow(self, began: float) -> None:
        if time.thread_time() - began > SLOW_S:
            self._num_slow += 1

    @property
    def _is_complete(self) -> bool:
        """Whether the output matches and nothing may follow. For some grammars only the mask tells."""
        if self._matcher.is_error():  # it allows the end, too
            return False
        if self._has_words:
            return bool(self._words[self._end_word] == self._end_bit) and np.count_nonzero(self._words) == 1
        return self._matcher.is_stopped()

    def _go_to(self, tokens: list[int]) -> bool:
        """Bring the matcher to the state after `tokens`. Return False if there is none."""
        output = tokens[self._prompt_len :]
        followed = self._followed
        if output != followed:
            self._drop()
            self._has_words = self._is_told = False
            if output[: len(followed)] != followed:
                same = 0
                while same < len(output) and output[same] == followed[same]:
                    same += 1
                self._matcher.rollback(len(followed) - same)
                del followed[same:]
            new = output[len(followed) :]
            followed += new[: self._matcher.try_consume_tokens(new)]
        return len(followed) == len(output)

    def _ask(self) -> None:
        """Ask for the mask of the matcher's state, unless it is being computed."""
        if self._job is None:
            self._job = Job(self._matcher, self._words, self._pace)
        self._ahead.ask(self._job)

    def _settle(self) -> None:
        """Have the mask that was asked for: compute it, or wait for it."""
        job, self._job = self._job, None
        if job is not None:
            if job.is_started:
                job.is_done.wait()
            else:
                self._ahead.compute(job)
            self._has_words = True

    def _drop(self) -> None:
        """Use the matcher for something else than the mask that was asked for."""
        job, self._job = self._job, None
        if job is not None:
            if job.is_started:
                job.is_done.wait()
            else:
                self._ahead.drop(job)


def _bits(ids: Iterable[int], num_words: int) -> np.ndarray:
    """[num_words] uint32 with the bits of these ids set."""
    words = np.zeros(num_words, dtype=np.uint32)
    for id in ids:
        words[id // 32] |= np.uint32(1 << id % 32)
    return words

"""A token mask that follows a grammar."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import numpy as np
from llguidance import LLMatcher

from ...grammars.compiling import GrammarError
from ..core.sequence import TokenMask
from .compiled_grammar import CompiledGrammar
from .masks_ahead import Job, MasksAhead

SLOW_S = 0.005  # of this thread's processor time, in one call: the engine's loop does nothing else meanwhile
MOST_SLOW = 5  # times that a sequence may be slow

Result = TypeVar("Result")


class GrammarMask:
    """The mask of one sequence's grammar. One thread uses it at a time.

    grammar     compiled
    end_id      stands in masks for the end of the output
    vocab_size  ids from there on are not allowed; `end_id` is one of them
    ahead       computes masks, if they take long while this thread does other things
    prompt_len  tokens before the output
    stop_ids    allowed wherever the output may end; below vocab_size
    min_tokens  of the output before a stop id can be chosen
    also        what restricts the tokens besides the grammar; None: nothing does
    jumps       `follow` returns forced tokens; never where the grammar may force a long text

    The matcher goes forward by the tokens that are new since the last call, and back where the tokens differ from
    those, so the mask follows from the tokens alone.
    """

    depends_on_tokens = True
    field = "guided"
    error = ""

    def __init__(
        self,
        grammar: CompiledGrammar,
        end_id: int,
        vocab_size: int,
        ahead: MasksAhead,
        *,
        prompt_len: int,
        stop_ids: Iterable[int] = (),
        min_tokens: int = 0,
        also: TokenMask | None = None,
        jumps: bool = True,
    ) -> None:
        self.fault = ""
        self._grammar = grammar
        self._pace = grammar.pace
        self._matcher, self._version = grammar.start()
        self._is_new = False  # the matcher was made again for the state that it is in
        self._failure: GrammarError | None = None  # why there is no mask in this state
        self._ahead = ahead
        self._vocab_size = vocab_size
        self._prompt_len = prompt_len
        self._min_tokens = min_tokens
        self._also = also
        self._jumps = jumps and also is None and self._pace.is_bounded
        self._followed: list[int] = []  # the output that the matcher has consumed
        self._words = np.frombuffer(grammar.first, dtype=np.uint32)[: ahead.num_words].copy()
        self._has_words = True  # `_words` is the mask after `_followed`
        self._is_next_known = False
        self._next: list[int] | None = None  # what `follow` returns after `_followed`, if that is known
        self._job = Job(self._matcher, self._words, self._pace)
        self._is_watched = False  # it may be slow
        self._num_slow = 0
        num_words = -(-vocab_size // 32)
        self._end_word, self._end_bit = end_id // 32, np.uint32(1 << end_id % 32)
        self._within = _bits(range(vocab_size - vocab_size % 32, vocab_size), num_words)
        self._within[: vocab_size // 32] = 0xFFFF_FFFF
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
        if self._failure is not None:
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
        if not self._go_to(tokens):
            raise self._failure or GrammarError("does not allow the output that exists")
        if not self._has_words:
            self._compute()
        if self._failure is not None:
            raise self._failure
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
        if self.fault and self._has_words and self._allows_end_alone and self._is_complete:
            return None  # for some grammars only the mask shows it
        self._find_next()
        if self._next == [] and not self._has_words and not self._job.is_started:
            self._ahead.ask(self._job)
        return self._next

    def _find_next(self) -> None:
        """Find what `follow` returns, unless that is known.

        Always before the mask: while that is computed the matcher gives no answer, and afterwards maybe another one.
        """
        if self._is_next_known:
            return
        self._is_next_known, self._next = True, []
        if self._matcher.is_stopped():
            self._next = None if self._is_complete else []
        elif self._jumps:
            forced = self._timed(self._matcher.compute_ff_tokens)
            self._next = forced if max(forced, default=0) < self._vocab_size else []

    @property
    def _is_complete(self) -> bool:
        """Whether the output matches the grammar, where nothing can follow it.

        A matcher that has met a limit says that nothing can follow, too.
        """
        return self._matcher.is_accepting() and self._is_sound

    @property
    def _is_sound(self) -> bool:
        return not self._matcher.is_error() and self._grammar.is_sound(self._version)

    @property
    def _allows_end(self) -> bool:
        return bool(self._words[self._end_word] & self._end_bit)

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
            self._consume(output)
            if len(followed) < len(output) and not self._is_sound:
                self._begin_again(output)
        return len(followed) == len(output)

    def _consume(self, output: list[int]) -> None:
        """Follow an output that begins with what was followed, as far as the grammar allows it."""
        followed = self._followed
        new = output[len(followed) :]
        followed += new[: self._timed(self._matcher.try_consume_tokens, new)]
        if len(new) > 1:  # all of them had the work of one step: the rest may need more
            for token in output[len(followed) :]:
                if not self._timed(self._matcher.try_consume_tokens, [token]):
                    break
                followed.append(token)

    def _begin_again(self, output: list[int]) -> None:
        """Follow an output with a new matcher, because the automaton has met a limit."""
        try:
            self._matcher = self._job.matcher = self._renewed(output)
        except GrammarError as error:
            self._failure = error
            return
        self._followed[:] = output

    def _renewed(self, output: list[int]) -> LLMatcher:
        """Return a new matcher that has consumed an output. Raises GrammarError."""
        matcher, self._version = self._grammar.again(self._version, output, self._matcher.get_error())
        return matcher

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

        A mask that allows the end may follow from a limit that was met: it is then computed again, by a new matcher.
        Return whether the mask is there.
        """
        if not self._job.is_started:
            self._find_next()
            self._num_slow += self._ahead.compute(self._job) > SLOW_S
        while True:
            try:
                self._has_words = self._job.ends(timeout_s)
            except GrammarError as error:
                self._has_words, self._failure = True, error
                return True
            if not self._has_words:
                return False
            self._matcher = self._job.matcher
            if not (self._matcher.is_error() or self._allows_end) or self._is_sound:
                return True
            if self._is_new:
                self._failure = GrammarError("is too complex to follow")
                self._grammar.is_spent = True
                return True
            self._is_new, self._has_words = True, False
            self._job.renew = partial(self._renewed, list(self._followed))
            self._ahead.compute_apart(self._job)

    def _drop(self) -> None:
        """Forget what is known of the matcher's state, to use it for another."""
        if self._job.is_started:
            with suppress(GrammarError):  # of a state that is left
                self._job.ends()
            self._matcher = self._job.matcher
        else:
            self._ahead.drop(self._job)
        self._has_words = self._is_next_known = self._is_new = False
        self._failure = None


def _bits(ids: Iterable[int], num_words: int) -> np.ndarray:
    """[num_words] uint32 with the bits of these ids set."""
    words = np.zeros(num_words, dtype=np.uint32)
    for id in ids:
        words[id // 32] |= np.uint32(1 << id % 32)
    return words

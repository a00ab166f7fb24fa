"""A grammar that was compiled for the model's vocabulary, and that is compiled again once it has met a limit."""

from __future__ import annotations

import threading

from llguidance import LLMatcher, LLTokenizer

from ...grammars.compiling import GrammarError, compiled
from .masks_ahead import Pace

_TOO_MANY_STATES = "too many states"  # in llguidance's message


class CompiledGrammar:
    """The matcher at the grammar's start, its first mask, and its pace.

    All copies of a matcher share one automaton, which grows with the masks that are computed. When it meets one of
    llguidance's limits, it is lost for all of them. The copy that met the limit reports an error. The others report
    none, reject every token, and may seem to be complete. So nothing that ends an output is believed unless the
    automaton is sound, and whoever finds that it is not moves on to a new one.

    A mask may meet a limit or not, depending on what was computed before it. The new automaton therefore has larger
    limits, which show what the grammar alone decides; its masks are computed on other threads.

    first     the mask of the first token
    memory    bytes that it took when it was compiled
    is_spent  it has met the larger limits, too: the next request must compile it again
    """

    def __init__(self, grammar: str, tokenizer: LLTokenizer) -> None:
        """Takes up to about a second. Raises GrammarError."""
        self.pace = Pace()
        self.is_spent = False
        self.memory = 0
        self._grammar = grammar
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # while it is compiled again
        self._version = 0
        self._matcher, self.first = compiled(grammar, tokenizer)
        allowed = int.from_bytes(self.first, "little") & ~(1 << tokenizer.eos_token)
        self._some_token = (allowed & -allowed).bit_length() - 1  # that an output can begin with

    def start(self) -> tuple[LLMatcher, int]:
        """Return a copy of the matcher, and the version of the automaton that it uses."""
        return self._matcher.deep_copy(), self._version

    def is_sound(self, version: int) -> bool:
        """Whether this version of the automaton has met no limit."""
        if version != self._version:
            return False
        return bool(self._matcher.deep_copy().try_consume_tokens([self._some_token]) == 1)

    def again(self, version: int, tokens: list[int], error: str) -> tuple[LLMatcher, int]:
        """Return a matcher that has consumed these tokens, and its version, which is newer than the one that failed.

        error  that the version has met

        Raises GrammarError if the grammar does not allow the tokens, or meets a limit again.
        """
        with self._lock:
            if version == self._version:
                is_patient = self.pace.is_hard or _TOO_MANY_STATES not in error
                self._matcher, _ = compiled(self._grammar, self._tokenizer, is_patient=is_patient)
                self.pace.is_hard = is_patient
                self._version += 1
        matcher, version = self.start()
        for token in tokens:  # one at a time, because each call has the work of one step
            if not matcher.try_consume_tokens([token]):
                self.is_spent = not self.is_sound(version)
                is_complex = self.is_spent or matcher.is_error()
                raise GrammarError("is too complex" if is_complex else "does not allow the output that exists")
        return matcher, version

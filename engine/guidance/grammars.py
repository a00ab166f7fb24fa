"""The grammars of requests, compiled for the model's vocabulary. The ones used last are kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path

from llguidance import LLTokenizer

from pagoda.v1 import inference_pb2

from ...grammars.compiling import GrammarError, grammar_of
from ...grammars.fair_threads import allocated_bytes
from ...grammars.forced_text import longest_forced
from .compiled_grammar import CompiledGrammar
from .grammar_mask import GrammarMask
from .masks_ahead import MasksAhead
from .vocabulary import Vocabulary

MOST_KEPT = 32  # compiled grammars
MOST_MEMORY_KEPT = 16 << 20  # bytes that they took when they were compiled: some take some MB
MOST_BYTES_KEPT = 4 << 20  # of their texts
MOST_FORCED = 8192  # bytes that a grammar may force at once, so that finding them takes some milliseconds at most


class Grammars:
    """Compiles grammars, on any thread, and makes the masks of sequences that follow them.

    folder           of the model; its tokenizer.json is read when the first grammar arrives
    vocab_size       rows of the embedding: ids from there on are never allowed
    needs_all_masks  sampling needs a mask for each token, and does not ask first whether it does
    """

    def __init__(self, folder: Path, vocab_size: int, *, needs_all_masks: bool = True) -> None:
        self._needs_all_masks = needs_all_masks
        self._folder = folder
        self._vocab_size = vocab_size
        self._lock = threading.Lock()  # of what is kept
        self._loading = threading.Lock()  # of the tokenizer, for seconds: `knows` must not wait for it
        self._tokenizer: LLTokenizer | None = None
        self._refusal = ""  # why there will be none: to find out takes up to a second
        self._ahead: MasksAhead | None = None
        self._kept: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self._num_bytes = 0  # of their texts
        self._memory = 0  # that they took

    def knows(self, guided: inference_pb2.Guided) -> bool:
        """Whether `mask_maker` returns without compiling."""
        with self._lock:
            found = self._kept.get(guided.SerializeToString(deterministic=True))
            return found is not None and not found.is_spent

    def mask_maker(self, guided: inference_pb2.Guided) -> Callable[..., GrammarMask]:
        """Compile a grammar and return what makes a mask of it, with the other arguments of GrammarMask.

        Takes up to about a second where the grammar is not kept. Raises GrammarError.
        """
        key = guided.SerializeToString(deterministic=True)
        with self._loading:
            tokenizer = self._load()
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
        if found is None or found.is_spent:
            format = guided.WhichOneof("format") or ""
            value = guided.choice.options if format == "choice" else getattr(guided, format)
            before = allocated_bytes()
            found = CompiledGrammar(grammar_of(format, value), tokenizer)
            found.memory = max(0, allocated_bytes() - before)  # with what other threads took meanwhile
            found.pace.is_bounded = longest_forced(format, value) <= MOST_FORCED
            self._keep(key, found)
        assert self._ahead is not None, "it is made with the tokenizer"
        return partial(GrammarMask, found, tokenizer.eos_token, self._vocab_size, self._ahead)

    def _load(self) -> LLTokenizer:
        """`_loading` is held. Raises GrammarError if llguidance cannot read the model's tokenizer."""
        if self._refusal:
            raise GrammarError(self._refusal)
        if self._tokenizer is None:
            try:
                content = (self._folder / "tokenizer.json").read_bytes()
                self._tokenizer = Vocabulary(content, self._vocab_size).for_grammars()
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # the libraries raise nothing narrower: a panic is no Exception
                self._refusal = f"cannot be followed: the model's tokenizer is of another kind: {error}"
                raise GrammarError(self._refusal) from error
            self._ahead = MasksAhead(self._tokenizer.vocab_size, needs_all=self._needs_all_masks)
        return self._tokenizer

    def _keep(self, key: bytes, found: CompiledGrammar) -> None:
        with self._lock:
            if (previous := self._kept.pop(key, None)) is not None:
                self._num_bytes -= len(key)
                self._memory -= previous.memory
            self._kept[key] = found
            self._num_bytes += len(key)
            self._memory += found.memory
            while (
                len(self._kept) > MOST_KEPT or self._num_bytes > MOST_BYTES_KEPT or self._memory > MOST_MEMORY_KEPT
            ) and self._kept:
                oldest, dropped = self._kept.popitem(last=False)
                self._num_bytes -= len(oldest)
                self._memory -= dropped.memory

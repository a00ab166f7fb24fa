"""The grammars of requests, compiled for the model's vocabulary. The ones used last are kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import tokenizers
from llguidance import LLMatcher, LLTokenizer

from pagoda.v1 import inference_pb2
from pagoda_server.engine.guidance.grammar_mask import GrammarMask
from pagoda_server.engine.guidance.masks_ahead import MasksAhead, Pace
from pagoda_server.settings.forced_text import longest_forced
from pagoda_server.settings.grammars import GrammarError, compiled, grammar_of

MOST_KEPT = 32  # compiled grammars; each may take some 40 MB
MOST_BYTES_KEPT = 4 << 20  # of their texts
MOST_FORCED = 8192  # bytes that a grammar may force at once, so that finding them takes some milliseconds at most

_END = "<|end of guided output|>"  # a token that llguidance allows where the grammar may end; no sequence chooses it


class _Compiled(NamedTuple):
    """
    first  the mask of the first token
    """

    matcher: LLMatcher
    first: bytes
    pace: Pace


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
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._ahead: MasksAhead | None = None
        self._kept: OrderedDict[bytes, _Compiled] = OrderedDict()
        self._num_bytes = 0

    def knows(self, guided: inference_pb2.Guided) -> bool:
        """Whether `mask_maker` returns without compiling."""
        with self._lock:
            return guided.SerializeToString(deterministic=True) in self._kept

    def mask_maker(self, guided: inference_pb2.Guided) -> Callable[..., GrammarMask]:
        """Compile a grammar and return what makes a mask of it, with the other arguments of GrammarMask.

        Takes up to about a second where the grammar is not kept. Raises GrammarError.
        """
        key = guided.SerializeToString(deterministic=True)
        with self._lock:
            tokenizer = self._load()
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
        if found is None:
            format = guided.WhichOneof("format") or ""
            value = guided.choice.options if format == "choice" else getattr(guided, format)
            matcher, first = compiled(grammar_of(format, value), tokenizer)
            found = _Compiled(matcher, first, Pace(is_bounded=longest_forced(format, value) <= MOST_FORCED))
            self._keep(key, found)
        assert self._ahead is not None, "it is made with the tokenizer"
        return partial(
            GrammarMask, found.matcher, found.first, tokenizer.eos_token, self._vocab_size, self._ahead, found.pace
        )

    def _load(self) -> LLTokenizer:
        """The lock is held. Raises GrammarError if llguidance cannot read the model's tokenizer."""
        if self._tokenizer is None:
            try:
                tokenizer = tokenizers.Tokenizer.from_file(str(self._folder / "tokenizer.json"))
                tokenizer.add_special_tokens([_END])
                end = tokenizer.token_to_id(_END)
                assert end is not None, "it was just added"
                num_tokens = max(self._vocab_size, end + 1)
                self._tokenizer = LLTokenizer(tokenizer.to_str(), n_vocab=num_tokens, eos_token=end)
            except Exception as error:  # the libraries raise nothing narrower
                raise GrammarError(f"cannot be followed: the model's tokenizer is of another kind: {error}") from error
            self._ahead = MasksAhead(self._tokenizer.vocab_size, needs_all=self._needs_all_masks)
        return self._tokenizer

    def _keep(self, key: bytes, found: _Compiled) -> None:
        with self._lock:
            if key not in self._kept:
                self._num_bytes += len(key)
            self._kept[key] = found
            while len(self._kept) > MOST_KEPT or self._num_bytes > MOST_BYTES_KEPT:
                oldest, _ = self._kept.popitem(last=False)
                self._num_bytes -= len(oldest)

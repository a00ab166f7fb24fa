"""The grammars of requests, compiled for the model's vocabulary. The ones used last are kept."""

from __future__ import annotations

import json
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

MOST_KEPT = 32  # compiled grammars
MOST_MEMORY_KEPT = 16 << 20  # bytes that they took when they were compiled: some take some MB
MOST_BYTES_KEPT = 4 << 20  # of their texts
MOST_FORCED = 8192  # bytes that a grammar may force at once, so that finding them takes some milliseconds at most

_END = "<|end of guided output|>"  # a token that llguidance allows where the grammar may end; no sequence chooses it


def _for_grammars(content: bytes) -> tuple[str, int]:
    """Edit a tokenizer.json: add the token _END, and hide added tokens that are not special. Return it with _END's id.

    llguidance takes every added token for special: it would force text that spells one as that token, which it then
    refuses. So added tokens that are not special are tokens like others, or spell no text. A grammar names such a token
    by its id. The library would take twice as long as this for the same edit, and holds the interpreter's lock.
    """
    document = json.loads(content)
    vocabulary = document["model"]["vocab"]
    if isinstance(vocabulary, list):  # of pairs, each a text and its score
        vocabulary = {text: id for id, (text, _) in enumerate(vocabulary)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    # The library ignores empty texts, and takes the last of several tokens with one text.
    added = {token["content"]: token for token in document.get("added_tokens") or [] if token["content"]}
    added[_END] = {"content": _END, **flags}
    kept, ids, free = [], {}, len(vocabulary)
    for text, token in added.items():
        if not token["special"] and text in vocabulary:
            continue
        # The library ignores the file's ids: a token that is not in the vocabulary gets the id behind all others.
        ids[text] = vocabulary.get(text, free)
        free = max(free, ids[text] + 1)
        hidden = f"\ufdd0{ids[text]}"  # no character
        kept.append({**token, "id": ids[text], "content": text if token["special"] else hidden})
    document["added_tokens"] = kept
    return json.dumps(document, ensure_ascii=False), ids[_END]


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
        with self._lock:
            tokenizer = self._load()
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
        """The lock is held. Raises GrammarError if llguidance cannot read the model's tokenizer."""
        if self._refusal:
            raise GrammarError(self._refusal)
        if self._tokenizer is None:
            try:
                document, end = _for_grammars((self._folder / "tokenizer.json").read_bytes())
                num_tokens = max(self._vocab_size, end + 1)
                self._tokenizer = LLTokenizer(document, n_vocab=num_tokens, eos_token=end)
            except Exception as error:  # the libraries raise nothing narrower
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
